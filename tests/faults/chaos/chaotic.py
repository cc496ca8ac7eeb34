"""What chaos plays with: datasets of every kind, and what happens to them at some samples, once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from asyncloader import sample_rng, sample_seed
from tests.faults.datasets import DEATHS

gate = threading.Event()
"""Open between runs: what hangs in a thread of this process, which nobody can kill, goes on then."""


class Bad(Exception):
    """What a bad sample raises."""


class Chaotic(Dataset[Any]):
    """Random samples, and faults at some of them.

    Args:
        length: Of the dataset.
        size: Float32 values in a sample.
        bad: Samples that always raise.
        faults: What happens at which sample, once.
        folder: Where each fault writes down that it happened.
    """

    def __init__(self, length: int, size: int, bad: set[int], faults: dict[int, str], folder: Path) -> None:
        self.length = length
        self.size = size
        self.bad = bad
        self.faults = faults
        self.folder = folder

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        sample = torch.rand(self.size)
        draws = random.random() + np.random.rand()
        self.befall(index)
        return index, draws, sample

    def befall(self, index: int) -> None:
        """Let happen what is planned for this sample."""
        if (fault := self.faults.get(index)) and note(self.folder, fault, index):
            self._suffer(fault)
        if index in self.bad:
            raise Bad(index)

    def _suffer(self, fault: str) -> None:
        if fault == "hangs":
            gate.wait()
        elif fault == "is slow":
            time.sleep(0.05)
        else:
            DEATHS[fault.removeprefix("dies: ")][0]()


class DrawingChaotic(Chaotic):
    """The same with a generator for each sample: workers in one process share the global ones."""

    def __getitem__(self, index: int) -> Any:
        rng = sample_rng()
        self.befall(index)
        return index, rng.random(), torch.from_numpy(rng.random(self.size, dtype=np.float32))


class AsyncChaotic(Chaotic):
    """The same for an async dataset: its samples overlap, so they draw from generators of their own."""

    async def __getitem__(self, index: int) -> Any:
        rng = sample_rng()
        await asyncio.sleep(0.002 * rng.random())
        sample = torch.from_numpy(rng.random(self.size, dtype=np.float32))
        if self.faults.get(index) == "hangs" and note(self.folder, "hangs", index):
            await asyncio.Event().wait()
        self.befall(index)
        return index, rng.random(), sample


class Drawing(Dataset[Any]):
    """Samples that draw in one way, with deaths at some of them.

    Args:
        length: Of the dataset.
        how: "sample_rng", "in a block" of sample_seed, "global" generators, or "nothing".
        deaths: At which samples their worker dies, once, and of which of DEATHS.
        folder: Where each death writes down that it happened.
    """

    def __init__(self, length: int, how: str, deaths: dict[int, str], folder: Path) -> None:
        self.length = length
        self.how = how
        self.chaotic = Chaotic(length, 0, set(), deaths, folder)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        self.chaotic.befall(index)
        return index, self.draw()

    def draw(self) -> float:
        """Draw what belongs to a sample."""
        if self.how == "nothing":
            return 0.0
        if self.how == "sample_rng":
            return sample_rng().random()
        if self.how == "global":
            return random.random() + np.random.rand() + torch.rand(()).item()
        with sample_seed():
            time.sleep(0.0005)  # as a decoder that releases the interpreter's lock
            return random.random() + np.random.rand() + torch.rand(()).item()


class AsyncDrawing(Drawing):
    """The same for an async dataset."""

    async def __getitem__(self, index: int) -> Any:
        self.chaotic.befall(index)
        await asyncio.sleep(0.0005 * (index % 3))
        return index, self.draw()


class DrawingStream(IterableDataset[Any]):
    """The same samples as a stream without a state: each worker reads a share.

    Args:
        drawing: The samples.
    """

    def __init__(self, drawing: Drawing) -> None:
        self.drawing = drawing

    def __iter__(self) -> Iterator[Any]:
        first, step = share()
        for index in range(first, len(self.drawing), step):
            yield self.drawing[index]


class ChaoticStream(IterableDataset[Any]):
    """The samples of a Chaotic dataset in order, without the random numbers: each worker reads a share.

    Args:
        chaotic: Whose faults happen, and who has no bad samples.
    """

    deterministic = True

    def __init__(self, chaotic: Chaotic) -> None:
        self.chaotic = chaotic

    def __iter__(self) -> Iterator[Any]:
        first, step = share()
        for index in range(first, self.chaotic.length, step):
            self.chaotic.befall(index)
            yield index, 0.5, torch.full((self.chaotic.size,), float(index))


class AsyncChaoticStream:
    """The same for an async stream: its samples overlap, and what befalls them does so when they are read or awaited.

    Args:
        chaotic: Whose faults happen, and who has no bad samples.
    """

    deterministic = True

    def __init__(self, chaotic: Chaotic) -> None:
        self.chaotic = chaotic
        self.at = 0

    async def __aiter__(self) -> AsyncIterator[Any]:
        first, step = share()
        try:
            while (index := first + self.at * step) < self.chaotic.length:
                await asyncio.sleep(0)
                self.at += 1
                if index % 2:
                    self.chaotic.befall(index)
                yield self.later(index)
        finally:
            self.at = 0

    async def later(self, index: int) -> Any:
        """Get a sample that was read."""
        chaotic = self.chaotic
        await asyncio.sleep(0.002 * (index * 7 % 5))
        if chaotic.faults.get(index) == "hangs" and note(chaotic.folder, "hangs", index):
            await asyncio.Event().wait()
        chaotic.befall(index)
        return index, 0.5, torch.full((chaotic.size,), float(index))


class TellingChaoticStream(AsyncChaoticStream):
    """The same, which tells where it is."""

    deterministic = False

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


STREAMS: dict[str, Any] = {
    "stream": ChaoticStream,
    "async stream": AsyncChaoticStream,
    "telling stream": TellingChaoticStream,
}


def share() -> tuple[int, int]:
    """Return the first sample of this worker, and the step to its next."""
    worker = torch.utils.data.get_worker_info()
    return (0, 1) if worker is None else (worker.id, worker.num_workers)


def note(folder: Path, fault: str, number: int) -> bool:
    """Write down that a fault happens; False if it has happened before."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(folder / f"{number} {fault}", os.O_CREAT | os.O_EXCL))
        return True
    return False
