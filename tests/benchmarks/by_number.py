"""by_number: one batch of a run again, by its number: what finding it takes, and making it.

An epoch of 10,000,000 samples (--quick: the same) dealt out to 8 ranks, in batches of 32; a batch from its middle:

- keys: `loader.batch_keys(epoch, number)`: which samples it has, by `ElasticSampler` and by torch's RandomSampler. Both
  draw again what lies before it.
- batch: `loader.batch(epoch, number)`, of samples that cost nothing, so that all of it is beside making them: in the
  trainer's process, and in a worker that is started for it.
- on from a state: the only way without it, where a run is resumed at the nearest state, here 1,000 batches before, and
  drawn to the batch with torch's loader beside ours.

Found on two cores at 2.5 GHz:

                                      median ms   least    most
    keys, ElasticSampler                 669        534      969
    keys, torch's RandomSampler         1682        884     2414
    batch, in the trainer's process      770        308      976
    batch, in a worker                   870        393     1040
    on from a state, 1,000 batches       780        297     1462

That was beside seven other busy programs. What lies before the batch is drawn again: 620,000 indices of one rank in
eight, and 5,000,000 of torch's sampler.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import Dataset

from asyncloader import DataLoader
from asyncloader.samplers import ElasticSampler
from tests.benchmarks.bench import Bench, main

MANY = 10_000_000
BATCH = 32


class Numbers(Dataset[int]):
    """Samples that cost nothing."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def milliseconds(call: Callable[[], Any], times: int) -> list[float]:
    """Return how long calls take."""
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        taken.append((time.perf_counter() - began) * 1e3)
    return taken


def elastic(num_workers: int) -> DataLoader[int]:
    """Return a loader of the large epoch that has begun it."""
    loader = DataLoader(Numbers(MANY), batch_size=BATCH, sampler=ElasticSampler(MANY, 8, 3), num_workers=num_workers)
    next(iter(loader))
    loader.close()
    return loader


def from_a_state(before: int) -> None:
    """Read on to a batch from a state of so many batches before it."""
    loader = elastic(1)
    state = loader.state_dict()
    loader.load_state_dict(state)
    for number, _ in enumerate(loader):
        if number == before:
            break
    loader.close()


def measure(bench: Bench) -> None:
    times = 20 if bench.quick else 100
    number = MANY // 8 // BATCH // 2
    here, there = elastic(0), elastic(1)
    shuffled = DataLoader(Numbers(MANY), batch_size=BATCH, shuffle=True)
    next(iter(shuffled))
    made = [here.dataset[key] for key in here.batch_keys(0, number)]
    calls: dict[str, Callable[[], Any]] = {
        "keys, ElasticSampler": lambda: here.batch_keys(0, number),
        "keys, torch's RandomSampler": lambda: shuffled.batch_keys(0, MANY // BATCH // 2),
        "batch, in the trainer's process": lambda: here.batch(0, number),
        "batch, in a worker": lambda: there.batch(0, number),
        "on from a state, 1,000 batches": lambda: from_a_state(1000),
        "making the batch itself": lambda: torch.utils.data.default_collate(made),
    }
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(5):
        for name, call in calls.items():
            found[name] += milliseconds(call, 3 if "Random" in name or "state" in name else times // 5)
    medians = {name: statistics.median(each) for name, each in found.items()}
    bench.table(
        "one batch of an epoch of 10,000,000 samples",
        ["", "median ms", "least", "most"],
        [[name, f"{medians[name]:.2f}", f"{min(each):.2f}", f"{max(each):.2f}"] for name, each in found.items()],
    )
    bench.found["ms"] = medians


if __name__ == "__main__":
    main(__doc__ or "", measure)
