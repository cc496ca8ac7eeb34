"""Datasets of which workers on other machines make batches. In a module, which workers import."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

LENGTH = 200


class Drawing(Dataset[Any]):
    """Samples with random numbers, and the process that made them."""

    def __init__(self, folder: Path | None = None, length: int = LENGTH) -> None:
        self.folder = folder
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(100, 300), os.getpid()

    def once(self, name: str) -> bool:
        """Whether this happens for the first time."""
        assert self.folder is not None
        with contextlib.suppress(FileExistsError):
            (self.folder / name).touch(exist_ok=False)
            return True
        return False


class Gated(Drawing):
    """Beyond the first few, samples wait for a file."""

    def __getitem__(self, index: int) -> Any:
        assert self.folder is not None
        while index >= 20 and not (self.folder / "open").exists():
            time.sleep(0.005)
        return super().__getitem__(index)


class Deadly(Drawing):
    """So many samples kill the process that makes them, once each."""

    def __init__(self, folder: Path, deaths: int, length: int) -> None:
        super().__init__(folder, length)
        self.every = length // deaths

    def __getitem__(self, index: int) -> Any:
        if index % self.every == self.every // 2 and self.once(f"killed {index}"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Slow(Drawing):
    """Takes a while, so that nodes can go meanwhile."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.02)
        return super().__getitem__(index)


class Hanging(Drawing):
    """One sample hangs, once."""

    def __getitem__(self, index: int) -> Any:
        if index == 30 and self.once("hung"):
            _wait_for_ever()
        return super().__getitem__(index)


def _wait_for_ever() -> None:
    while True:
        time.sleep(0.1)


class Awaited(Drawing):
    """Samples that are awaited, of a dataset that is opened and closed."""

    async def __aenter__(self) -> Awaited:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self.folder is not None:
            (self.folder / f"closed {os.getpid()}").touch()

    async def __getitem__(self, index: int) -> Any:  # type: ignore[override]
        await asyncio.sleep(0.001 * (index % 5))
        return index, torch.rand(100, 300), os.getpid()


class Counting(IterableDataset[Any]):
    """A stream whose workers share its samples; it provides its state."""

    def __init__(self, length: int = 60, slow_s: float = 0.0) -> None:
        self.length, self.slow_s, self.at = length, slow_s, 0

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        mine = range(info.id, self.length, info.num_workers)
        while self.at < len(mine):
            self.at += 1
            time.sleep(self.slow_s)
            yield mine[self.at - 1], os.getpid()
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class OneBuffer(Dataset[Any]):
    """Gives the same memory each time."""

    def __init__(self) -> None:
        self.buffer = np.zeros(500_000)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        self.buffer[:] = index
        return self.buffer


class Failing(Drawing):
    """Samples that fail in the ways of samples."""

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            with open("/nowhere/5.jpg") as file:
                return file.read()
        if index == 9:
            sys.exit(3)
        return super().__getitem__(index)


class Leaving(Drawing):
    """Registers something for the end of its process, and says what it was given by Ray."""

    def __getitem__(self, index: int) -> Any:
        if not hasattr(self, "pid"):
            self.pid = os.getpid()
            atexit.register(self.once, f"left {self.pid}")
        return index, os.environ.get("GIVEN_BY_RAY", ""), self.pid


class Unreadable(Drawing):
    """Cannot be unpickled."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise ImportError("a module that is not here")


class Lookup(Drawing):
    """Looks samples up in something that is shared."""

    def __init__(self, rows: Any) -> None:
        super().__init__()
        self.rows = rows

    def __getitem__(self, index: int) -> Any:
        return self.rows[index], os.getpid()
