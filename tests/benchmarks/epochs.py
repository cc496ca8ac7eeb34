"""epochs: how long it takes from iter() to the first batch of a later epoch.

Measured: a loader with 2 workers over a dataset of ints runs through whole epochs of 200 batches; the clock runs from
`iter(loader)` to the first batch of each epoch after the first. With persistent workers the workers are there already;
without, each epoch starts its own (fork) once those of the last one have gone. The sides take turns epoch by epoch. 20
epochs each; with --quick 10.

The gap between two epochs: 2 persistent workers, samples that take 1 ms, batches of 8, a trainer that takes 10 ms a
batch, so that loading is faster. From the end of the last step of an epoch to the first batch of the next one, with the
loader's own generator; three epochs in a row on each side.

An epoch that is left: 8 forked workers, the iterator dropped after one batch and the next one begun at once; from the
drop to the first batch of the next epoch, since torch's waits in it for its workers to end, and ours end beside the new
ones. 10 each; with --quick 5.

Targets: with persistent workers at most a third of torch's; without, no later than torch's; after an epoch that was
left at most 1.05 of torch's.

What profiling found: with persistent workers torch sends each worker a message to resume and waits for all answers
before it hands out the first index; ours sends the new run and its first tickets in one message. Messages that do
nothing at all go that way (main thread, loop thread, worker, loop thread, main thread) in 0.17 ms; the same work takes
0.8 ms when our epochs follow each other and 1.5 when one of torch's lies between them, which leaves nothing of ours in
the caches. The worker that a message wakes takes the core of the thread that is to send the next one: with the parent
on one core and the workers on the other it is 1.3. Of an epoch's start with 8 new workers half the CPU time of each
worker went into a look at its own memory after its second batch, 5 ms of the kernel's for all that torch has mapped;
the first look comes a second later now, and the workers take what torch's take. The trainer took 90 ms where torch
takes 62: for the executor that each worker had, with two threads and five semaphores, and the pages that these write to
between two forks. All workers of a start have one executor now, which they are given when they run: the trainer takes
1.2 times torch's CPU time. Between two forks it wrote to 725 pages, each of which was copied, where torch's loader
writes to 295: workers are launched up to eight in a row now, and these are 260. The rest of the difference is in the
workers, which take 2.5 ms longer until their first sample (380 more pages, in some thirty small steps of a few pages
each), and in the executor's thread, whose start takes some ms where all cores are busy.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
from torch.utils.data import Dataset

from tests.benchmarks.bench import Bench, Target, main
from tests.benchmarks.dispatch import Ints
from tests.benchmarks.measure import Run, cpu_seconds, settle

A_THIRD = Target("<=", 1 / 3)
NO_LATER = Target("<=", 1.0)
AT_MOST = Target("<=", 1.05)


def epoch(loader: Any) -> Run:
    """Run through one epoch; time its first batch."""
    cpu = cpu_seconds()
    began = time.perf_counter()
    iterator = iter(loader)
    next(iterator)
    first = time.perf_counter()
    for _ in iterator:
        pass
    ended = time.perf_counter()
    return Run((first - began) * 1e3, {"whole epoch ms": (ended - began) * 1e3, "cpu ms": (cpu_seconds() - cpu) * 1e3})


def left(loader: Any) -> Run:
    """Leave an epoch after one batch; time the first batch of the next from there."""
    iterator = iter(loader)
    next(iterator)
    time.sleep(0.5)  # all are up, with batches in hand
    cpu = cpu_seconds()
    began = time.perf_counter()
    del iterator
    dropped = time.perf_counter()
    iterator = iter(loader)
    next(iterator)
    ended = time.perf_counter()
    drop_ms = (dropped - began) * 1e3
    del iterator
    settle()
    return Run((ended - began) * 1e3, {"of it drop ms": drop_ms, "cpu ms": (cpu_seconds() - cpu) * 1e3})


class Slow(Dataset[int]):
    """Samples that take 1 ms."""

    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int) -> int:
        time.sleep(0.001)
        return index


def gap(loader: Any) -> Run:
    """Run through three epochs; return the mean of the two gaps between them."""
    gaps = []
    ended = 0.0
    for _ in range(3):
        for number, _ in enumerate(loader):
            if number == 0:
                gaps.append(time.perf_counter() - ended)
            time.sleep(0.01)
            ended = time.perf_counter()
    return Run(sum(gaps[1:]) / 2 * 1e3)


def measure_gap(bench: Bench) -> None:
    options: dict[str, Any] = {"batch_size": 8, "shuffle": True, "num_workers": 2, "persistent_workers": True}
    sides: dict[str, Any] = {}
    for name, make in bench.loaders.items():
        sides[name] = partial(gap, make(Slow(), generator=torch.Generator(), **options))
    bench.compare("gap between epochs", "ms", sides, rounds=5 if bench.quick else 10, workers_stay=True)


def measure(bench: Bench) -> None:
    measure_gap(bench)
    rounds = 10 if bench.quick else 20
    for persistent, target in ((True, A_THIRD), (False, NO_LATER)):
        loaders = {
            name: make(Ints(1600), batch_size=8, num_workers=2, persistent_workers=persistent)
            for name, make in bench.loaders.items()
        }
        for loader in loaders.values():
            epoch(loader)
        sides = {name: partial(epoch, loader) for name, loader in loaders.items()}
        title = "persistent workers" if persistent else "new workers for each epoch, fork"
        bench.compare(title, "ms", sides, rounds=rounds, targets={"ours": target}, workers_stay=persistent)
        loaders.clear()
    sides = {name: partial(left, make(Ints(1600), batch_size=8, num_workers=8)) for name, make in bench.loaders.items()}
    bench.compare("an epoch that is left", "ms", sides, rounds=5 if bench.quick else 10, targets={"ours": AT_MOST})


if __name__ == "__main__":
    main(__doc__ or "", measure)
