"""A program, run once per rank: takes uneven streams in equal steps, with a collective in each step.

python tests/wrap/equal_steps_ranks.py
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from asyncloader import AsyncLoaderError, DataLoader
from asyncloader.wrap import equal_steps
from tests.support.ranks import tell

LENGTHS = (13, 20, 14, 24)
RESUMED_AFTER = {("drop", 0): (3, 9), ("drop", 2): (7,), ("pad", 0): (7,), ("pad", 2): (12,)}
"""After how many steps runs are resumed, by the mode and the number of workers."""


class Uneven(IterableDataset[int]):
    """So many samples for each rank, divided among its workers; numbers that say whose they are."""

    def __init__(self, lengths: list[float], pause_s: float = 0.0) -> None:
        self.length = lengths[dist.get_rank()]
        self.first = 1000 * dist.get_rank()
        self.pause_s = pause_s

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        for number in itertools.count(worker, workers):
            if number >= self.length:
                return
            time.sleep(self.pause_s)
            yield self.first + number


def in_step() -> None:
    """What a trainer does in each step: it waits for all ranks."""
    dist.all_reduce(torch.ones(()))


class Counting(Uneven):
    """It counts its epochs, and its numbers say which they are of."""

    epochs = 0

    def __iter__(self) -> Iterator[int]:
        self.epochs += 1
        for number in super().__iter__():
            yield 10_000 * self.epochs + number

    def state_dict(self) -> dict[str, int]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epochs = state["epochs"]


def taken(batches: Any, steps: int | None = None) -> list[list[int]]:
    found = []
    for batch in itertools.islice(batches, steps):
        found.append(batch.tolist())
        batch.fill_(-1)  # what a trainer does to its batches is not seen in those that are repeated
        in_step()
    return found


async def taken_async(loader: Any) -> list[list[int]]:
    found = []
    async for batch in loader:
        found.append(batch.tolist())
        in_step()
    return found


def resumed(make: Any, steps: int) -> tuple[list[list[int]], list[list[int]]]:
    """Take some steps, go on from the state of those with another loader to the end, and take one more epoch."""
    loader = make()
    found = taken(loader, steps)
    state = json.loads(json.dumps(loader.state_dict()))
    other = make()
    other.load_state_dict(state)
    found += taken(other)
    assert other.state_dict()["finished"] or len(found) == steps
    return found, taken(other)


def third_epochs(make: Any) -> list[list[list[int]]]:
    """Take two epochs, and the third by the same loader and by one that was given its state."""
    loader, other = make(), make()
    taken(loader), taken(loader)
    other.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    found = [taken(loader), taken(other)]
    loader.close()
    other.close()
    return found


async def cancelled(loader: Any) -> list[list[int]]:
    """On rank 0, stop waiting for the very first batch twice, before the other ranks have come."""
    iterator = aiter(loader)
    if dist.get_rank() == 0:
        for _ in range(2):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(anext(iterator), 0.3)
    in_step()
    return [batch.tolist() async for batch in iterator]


def mixed_up(loaders: list[Any]) -> list[str]:
    """Begin runs with two loaders, on rank 0 in another order; return what is raised."""
    raised = []
    for loader in loaders if dist.get_rank() == 0 else reversed(loaders):
        try:
            next(iter(loader))
        except AsyncLoaderError as error:
            raised.append(str(error))
    return raised


def without_bad(samples: list[int]) -> list[int]:
    if {5, 1001} & set(samples):
        raise ValueError(f"bad: {samples}")
    return samples


def with_errors(loader: Any) -> list[Any]:
    """Take everything, and what is raised in place of batches."""
    found: list[Any] = []
    iterator = iter(loader)
    while True:
        try:
            found.append(next(iterator))
        except StopIteration:
            return found
        except ValueError as error:
            found.append(str(error).splitlines()[0])


def main() -> None:
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    on_threads: dict[str, Any] = {"worker_backend": "thread"}  # forks of four ranks would cost fifteen times as much
    for mode in ("drop", "pad"):
        for workers in (0, 2):

            def make(lengths: Any = LENGTHS, mode: Any = mode, workers: int = workers, **options: Any) -> Any:
                loader = DataLoader(Uneven(lengths), 2, num_workers=workers, **{**on_threads, **options})
                return equal_steps(loader, mode)

            if not found:  # the group of the ranks is not there yet
                found["cancelled"] = asyncio.run(cancelled(make()))
            found[f"{mode} {workers}"] = taken(make(worker_backend="process" if mode == "drop" else "thread"))
            found[f"{mode} {workers} even"] = taken(make([6, 6, 6, 6]))
            found[f"{mode} {workers} async"] = asyncio.run(taken_async(make()))
            for steps in RESUMED_AFTER[mode, workers]:
                found[f"{mode} {workers} resumed after {steps}"] = resumed(make, steps)
        persistent = make(persistent_workers=True, worker_backend="process" if mode == "pad" else "thread")
        found[f"{mode} persistent"] = [taken(persistent, 5), taken(persistent), taken(persistent)]
        persistent.close()
    found["endless"] = taken(make([5, float("inf"), float("inf"), 9], mode="drop"))
    found["nothing"] = taken(make([5, 0, 3, 9], mode="drop"))
    try:
        taken(make([5, 0, 3, 9], mode="pad"))
    except AsyncLoaderError as error:
        found["nothing to repeat"] = str(error)
    lengths = [6, 2, 12, 12]
    found["errors"] = with_errors(make(lengths, mode="pad", workers=0, collate_fn=without_bad))
    for workers in (0, 1):
        options: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
        found[f"epochs {workers}"] = third_epochs(
            lambda o=options: equal_steps(DataLoader(Counting([26, 12, 12, 18]), 2, **o))
        )
    found["mixed up"] = mixed_up([make(), make()])
    tell(dist.get_rank(), found)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
