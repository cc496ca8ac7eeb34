"""by_number: one batch of a run again, by its number: what finding it takes, and making it.

An epoch of 1,000,000,000 samples (--quick: the same) dealt out to 8 ranks, in batches of 32; a batch from its middle:

- keys: `loader.batch_keys(epoch, number)`: which samples it has. By `ElasticSampler`, whose order can be looked at
  anywhere; and by torch's RandomSampler over 10,000,000 samples, which is drawn again.
- batch: `loader.batch(epoch, number)`, of samples that cost nothing, so that all of it is beside making them: in the
  trainer's process, and in a worker that is started for it.
- on from a state: the only way without it, where a run is resumed at the nearest state, here 1,000 batches before, and
  drawn to the batch with torch's loader beside ours.

Target: <= 10 ms beside making the batch, of an epoch of 10^9 samples with ElasticSampler.

Found on two cores at 2.5 GHz:

                                                 median ms   least    most
    keys, ElasticSampler                            1.80      1.50     6.5
    keys, torch's RandomSampler of 10,000,000     271       236      322
    batch, in the trainer's process                 2.93      2.60     5.4
    batch, in a worker                             22.4      18.9     27.3
    on from a state, 1,000 batches                108       100      129

So the target is met without workers, and missed with them: the start of a worker takes nearly all of that. A batch
that is made in the trainer's process would have other surroundings (docs/decisions/states.md).
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
from tests.benchmarks.bench import Bench, Target, main

MANY = 1_000_000_000
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
    shuffled = DataLoader(Numbers(10_000_000), batch_size=BATCH, shuffle=True)
    next(iter(shuffled))
    made = [here.dataset[key] for key in here.batch_keys(0, number)]
    calls: dict[str, Callable[[], Any]] = {
        "keys, ElasticSampler": lambda: here.batch_keys(0, number),
        "keys, torch's RandomSampler of 10,000,000": lambda: shuffled.batch_keys(0, 10_000_000 // BATCH // 2),
        "batch, in the trainer's process": lambda: here.batch(0, number),
        "batch, in a worker": lambda: there.batch(0, number),
        "on from a state, 1,000 batches": lambda: from_a_state(1000),
        "making the batch itself": lambda: torch.utils.data.default_collate(made),
    }
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(5):
        for name, call in calls.items():
            found[name] += milliseconds(call, 3 if "10,000,000" in name or "state" in name else times // 5)
    medians = {name: statistics.median(each) for name, each in found.items()}
    bench.table(
        "one batch of an epoch of 1,000,000,000 samples",
        ["", "median ms", "least", "most"],
        [[name, f"{medians[name]:.2f}", f"{min(each):.2f}", f"{max(each):.2f}"] for name, each in found.items()],
    )
    bench.found["ms"] = medians
    making = medians["making the batch itself"]
    for name in ("batch, in the trainer's process", "batch, in a worker"):
        bench.check(f"{name}, ms beside making it", medians[name] - making, Target("<=", 10))


if __name__ == "__main__":
    main(__doc__ or "", measure)
