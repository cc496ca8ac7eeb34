"""busy_trainer: how much a trainer that is busy in pure Python is slowed by the loader beside it.

Measured: steps of a fixed amount of pure Python work (20 ms when nothing else runs: calibrated first, then counted
in loop turns, never in time), with batches from a list made before, from torch's DataLoader and from ours, with 2
workers and default options; batches of 1 kB (16 samples of 64 bytes) and of 38.5 MB (64 x 3 x 224 x 224 float32),
both from one constant sample. The first 10 steps of a run are left out (start of the workers, first touch of
memory). Beside the time of a step: "take ms", the wait for a batch, and "work ms", the work itself, which grows
when something else wants the interpreter lock, a core, or memory bandwidth. On 2 cores, 2 workers and the trainer
are 3 who want 2.

Target: a step with our loader takes at most 5 % longer than one with batches from a list.

What profiling found: with small batches that follow each other the loop thread takes 30 us a batch; after 20 ms of
somebody else's work it takes 0.7 ms (nothing of it is in the caches), of which 0.2 are the system call that wakes the
worker. With 38.5 MB batches the two workers and the trainer want three cores; on a machine of two, that is most of what
the steps lose, with torch's loader too. Tried without a gain: reading and writing the sockets without giving up the
interpreter lock, which saves half of the loop thread's turns.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial
from itertools import repeat

import torch
from torch.utils.data import Dataset

from tests.benchmarks.bench import Bench, Target, main
from tests.benchmarks.measure import Run, cpu_seconds

STEP_S = 0.020
LEFT_OUT = 10


class Constant(Dataset[torch.Tensor]):
    """The same sample at every index."""

    def __init__(self, sample: torch.Tensor) -> None:
        self.sample = sample

    def __len__(self) -> int:
        return 10**7

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.sample


def work(turns: int) -> int:
    """Keep the interpreter busy."""
    total = 0
    for turn in range(turns):
        total += turn & 7
    return total


def turns_per_step() -> int:
    """Return how many turns take STEP_S when nothing disturbs: by the fastest of 30 tries."""
    turns, best = 100_000, float("inf")
    for _ in range(30):
        began = time.perf_counter()
        work(turns)
        best = min(best, time.perf_counter() - began)
    return round(turns * STEP_S / best)


def train(batches: Iterable[torch.Tensor], turns: int, steps: int) -> Run:
    """Run the steps; the figure is the mean of a step in milliseconds."""
    taken = worked = cpu = 0.0
    iterator = iter(batches)
    for step in range(LEFT_OUT + steps):
        if step == LEFT_OUT:
            cpu = cpu_seconds()
            taken = worked = 0.0
        began = time.perf_counter()
        batch = next(iterator)
        got = time.perf_counter()
        work(turns)
        taken += got - began
        worked += time.perf_counter() - got
    cpu = cpu_seconds() - cpu
    del batch
    return Run(
        (taken + worked) / steps * 1e3,
        {"take ms": taken / steps * 1e3, "work ms": worked / steps * 1e3, "cpu ms/step": cpu / steps * 1e3},
    )


def measure(bench: Bench) -> None:
    rounds, steps = (2, 40) if bench.quick else (7, 100)
    turns = turns_per_step()
    bench.note("a step of 20 ms", loop_turns=turns)
    for title, shape, batch_size in (("1 kB", (16,), 16), ("38.5 MB", (3, 224, 224), 64)):
        dataset = Constant(torch.ones(shape))
        made = torch.ones((batch_size, *shape))
        sides = {"list": lambda made=made: train(repeat(made), turns, steps)}
        for name, loader in bench.loaders.items():
            make = partial(loader, dataset, batch_size, num_workers=2)
            sides[name] = lambda make=make: train(make(), turns, steps)
        bench.compare(f"batches of {title}", "ms/step", sides, rounds=rounds, targets={"ours": Target("<=", 1.05)})


if __name__ == "__main__":
    main(__doc__ or "", measure)
