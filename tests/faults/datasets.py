"""Datasets that do harm."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset


def _raise_keyboard_interrupt() -> None:
    raise KeyboardInterrupt


DEATHS = {
    "SIGKILL": (lambda: os.kill(os.getpid(), signal.SIGKILL), -signal.SIGKILL),
    "SIGTERM": (lambda: os.kill(os.getpid(), signal.SIGTERM), -signal.SIGTERM),
    "segmentation fault": (lambda: ctypes.string_at(0), -signal.SIGSEGV),
    "abort": (os.abort, -signal.SIGABRT),
    "os._exit": (lambda: os._exit(3), 3),
    "os._exit(0)": (lambda: os._exit(0), 0),
    "sys.exit": (lambda: sys.exit(4), 4),
    "KeyboardInterrupt": (_raise_keyboard_interrupt, 1),
}
"""Ways for a worker to end on its own, with the exit code of each."""


class Augmented(Dataset[Any]):
    """Samples that draw from all three global generators, as augmentation does."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return index, random.random(), np.random.rand(), torch.rand(3)


class Deadly(Augmented):
    """Ends its worker at some samples, each time or so many times for each sample, and notes when.

    Args:
        length: Number of samples.
        folder: Where the deaths are noted, one file each.
        death: One of DEATHS.
        at: Indices of the samples.
        times: How often each of them ends its worker.
        child: Leave a child process behind, which would live for a minute.
    """

    def __init__(
        self, length: int, folder: Path, death: str, at: tuple[int, ...], times: int = 1, child: bool = False
    ) -> None:
        super().__init__(length)
        self._folder = folder
        self._death = death
        self._at = at
        self._times = times
        self._child = child

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        if index in self._at:
            number = len(list(self._folder.glob(f"{index}-*")))
            if number < self._times:
                child = subprocess.Popen(["sleep", "60"]).pid if self._child else 0
                (self._folder / f"{index}-{number}").write_text(f"{time.monotonic()} {os.getpid()} {child}")
                DEATHS[self._death][0]()
        return sample


def deaths(folder: Path) -> list[tuple[float, int, int]]:
    """Return when each worker of a Deadly dataset ended, its pid, and its child's."""
    found = []
    for path in sorted(folder.iterdir()):
        ended, pid, child = path.read_text().split()
        found.append((float(ended), int(pid), int(child)))
    return found


def plain(batch: Any) -> Any:
    """Turn tensors into lists, so that batches can be compared."""
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    if isinstance(batch, (list, tuple)):
        return [plain(part) for part in batch]
    return batch
