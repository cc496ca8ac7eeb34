"""transport: how fast batches come across when making them costs next to nothing.

Measured: GB/s (batches/s for the dictionaries) at default options from a constant source (the sample is one tensor
that stays in the worker's cache, so a batch costs its collation and its way), while the consumer reads one element
per page and lets go of the batch before last. Beside torch's DataLoader and beside a single-thread memcpy of the
same size, whose source and four destinations in turn are larger than the caches, taken in every round. Batches of
(64, 3, 224, 224) float32 (38.5 MB) with 0, 1 and 2 workers, 300 a run (with --quick: 40, or 0.6 s); of (64, 3, 32,
32) (0.8 MB) and of 114 tensors of 64 floats in a dictionary with 2 workers, for 2 s a run; the dictionary once as
it comes from the dataset (batch_size=None) and once collated out of 8 samples. The first batch ("start ms") and the
16 after it ("warm-up ms/batch": first touch of memory) are outside the rate; what the very first run saw of them is
printed by itself, because memory is used again in later runs. Peak memory is that of a fresh process per side.

Targets: 38.5 MB with 1 worker at least 10 times torch's, 2 workers 7 times, 0 workers 6 times; with 1 and 2 workers
at least 60 % of the memcpy; 0.8 MB at least 5 times; the dictionaries at least 12 times.

What profiling found: the memory is what costs. A new slab of 38.5 MB takes about 10 ms to reserve in the worker, and
page faults on both sides; used again, a batch costs one pass of collation in the worker and no copy in the parent. The
constant source stays in the cache, which is how 38.5 MB batches can be quicker than memcpy between two buffers.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset

from tests.benchmarks.bench import Bench, Target, main
from tests.benchmarks.measure import Run, cpu_seconds, drain

GB = 1e9
PAGE_FLOATS = 1024
WARM_UP = 16
IMAGES = (64, 3, 224, 224)


class Constant(Dataset[Any]):
    """The same sample at every index."""

    def __init__(self, sample: Any) -> None:
        self.sample = sample

    def __len__(self) -> int:
        return 10**8

    def __getitem__(self, index: int) -> Any:
        return self.sample


class Case(NamedTuple):
    """One kind of batch, and what is asked of it."""

    sample: Callable[[], Any]
    batch_size: int | None
    workers: int
    gigabytes: float | None  # of a batch; None: batches are counted instead
    batches: float
    bound: float

    def run(self, loader: Callable[..., Any], batches: float, seconds: float) -> Run:
        """Take batches of this kind from a loader."""
        made = loader(Constant(self.sample()), batch_size=self.batch_size, num_workers=self.workers)
        per_batch = self.gigabytes or 1.0
        return drain(made, read_pages, per_batch, warm_up=WARM_UP, batches=batches, seconds=seconds)


def read_pages(batch: Any) -> None:
    """Read one element of every page of a batch."""
    for tensor in batch.values() if isinstance(batch, dict) else (batch,):
        tensor.view(-1)[::PAGE_FLOATS].sum()


def dictionary() -> dict[str, torch.Tensor]:
    return {f"feature_{number}": torch.ones(64) for number in range(114)}


def image(size: int) -> torch.Tensor:
    return torch.ones(3, size, size)


INF = float("inf")
CASES = {
    "38.5 MB, 1 worker": Case(partial(image, 224), 64, 1, 64 * 3 * 224 * 224 * 4 / GB, 300, 10),
    "38.5 MB, 2 workers": Case(partial(image, 224), 64, 2, 64 * 3 * 224 * 224 * 4 / GB, 300, 7),
    "38.5 MB, 0 workers": Case(partial(image, 224), 64, 0, 64 * 3 * 224 * 224 * 4 / GB, 300, 6),
    "0.8 MB, 2 workers": Case(partial(image, 32), 64, 2, 64 * 3 * 32 * 32 * 4 / GB, INF, 5),
    "114 tensors, 2 workers": Case(dictionary, None, 2, None, INF, 12),
    "114 tensors out of 8 samples, 2 workers": Case(dictionary, 8, 2, None, INF, 12),
}


class Memcpy:
    """memcpy with one thread, from one buffer of a batch's size into four in turn."""

    def __init__(self) -> None:
        self.source = torch.ones(IMAGES)
        self.destinations = [torch.ones(IMAGES) for _ in range(4)]

    def __call__(self, copies: int) -> Run:
        cpu, began = cpu_seconds(), time.perf_counter()
        for number in range(copies):
            ctypes.memmove(self.destinations[number % 4].data_ptr(), self.source.data_ptr(), self.source.nbytes)
        seconds = time.perf_counter() - began
        cpu = cpu_seconds() - cpu
        return Run(copies * self.source.nbytes / GB / seconds, {"cpu us/batch": cpu / copies * 1e6})


def measure(bench: Bench) -> None:
    rounds, seconds = (1, 0.6) if bench.quick else (5, 2.0)
    memcpy = Memcpy()
    for title, case in CASES.items():
        counted = case.batches != INF
        batches = 40 if bench.quick and counted else case.batches
        limit_s = INF if counted and not bench.quick else seconds
        sides = {name: partial(case.run, loader, batches, limit_s) for name, loader in bench.loaders.items()}
        if case.gigabytes:
            sides["memcpy"] = partial(memcpy, 40)
        unit = "GB/s" if case.gigabytes else "batches/s"
        found = bench.compare(title, unit, sides, rounds=rounds, targets={"ours": Target(">=", case.bound)})
        for name in bench.loaders:
            first = found[name][0].extras
            bench.note(
                f"{title}: first run, {name}",
                start_ms=first["start ms"],
                warm_up_ms_per_batch=first["warm-up ms/batch"],
            )
        if counted and case.workers:
            share = [ours.value / copy.value for ours, copy in zip(found["ours"], found["memcpy"], strict=True)]
            bench.check(f"{title}: ours as a share of memcpy", statistics.median(share), Target(">=", 0.6))
    for title in list(CASES)[:1] if bench.quick else CASES:
        for name in bench.loaders:
            said, peak = bench.alone("memory", name, title)
            bench.note(f"peak memory, {title}, {name}", MB=peak / 1e6, **said)


def memory(bench: Bench, name: str, title: str) -> dict[str, float]:
    """Take batches for a while in a process of its own, to be watched."""
    run = CASES[title].run(bench.loaders[name], INF, 2.0)
    return {"batches": run.extras["batches"]}


if __name__ == "__main__":
    main(__doc__ or "", measure, memory=memory)
