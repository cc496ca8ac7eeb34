"""Samples that tell who made them: the proof that our workers did it, and not torch's.

A framework may build another loader out of ours without a word; what it trains on then looks the same. So each sample
carries the worker that fetched it, its process, that process's parent, and whose code was on the stack.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info

OUR_WORKER = "asyncloader.worker.serve"
TORCHS_WORKER = "torch.utils.data._utils.worker"

Sample = dict[str, Any]


def attest() -> Tensor:
    """Tell who makes a sample: worker id, pid, the parent's pid, whether our worker's code called us, or torch's."""
    info = get_worker_info()
    callers = set(_callers())
    worker = -1 if info is None else info.id
    return torch.tensor([worker, os.getpid(), os.getppid(), OUR_WORKER in callers, TORCHS_WORKER in callers])


def _callers() -> Iterator[str]:
    frame = sys._getframe(1)
    while frame is not None:
        yield frame.f_globals.get("__name__", "")
        frame = frame.f_back


def sample(index: int) -> Sample:
    """Make a point of the line y = 3 x + 1, with its index and its witness."""
    x = torch.tensor([index / 64])
    return {"x": x, "y": 3 * x + 1, "index": index, "witness": attest()}


class Line(Dataset[Sample]):
    """Points of a line, to be fitted."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Sample:
        return sample(index)


class Stream(IterableDataset[Sample]):
    """The same points as a stream, of which each worker gives its share."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Sample]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return map(sample, range(first, self.length, step))


def indices(batches: Iterable[Sample]) -> list[int]:
    """List the indices of all samples, in the order in which they came."""
    return [int(index) for batch in batches for index in batch["index"]]


def assert_made_by_us(batches: Iterable[Sample], *, num_workers: int, parents: set[int] | None = None) -> None:
    """Fail unless workers of ours, children of this process (or of these), made each sample, and each made some."""
    rows = torch.cat([batch["witness"] for batch in batches])
    workers, pids, makers, by_us, by_torch = rows.unbind(1)
    assert by_us.all(), "samples that our workers have not made"
    assert not by_torch.any()
    assert set(workers.tolist()) == set(range(num_workers))
    assert set(makers.tolist()) == (parents or {os.getpid()})
    assert os.getpid() not in pids.tolist()


def assert_made_by_torch(batches: Iterable[Sample]) -> None:
    """Fail unless each sample comes from a worker of torch's own."""
    rows = torch.cat([batch["witness"] for batch in batches])
    assert rows[:, 4].all()
    assert not rows[:, 3].any()
