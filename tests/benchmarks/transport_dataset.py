"""transport_dataset: a large dataset on its way to workers that do not inherit it.

Measured: a dataset with one numpy array of 1 GB, start method spawn, 4 workers (0.2 GB and 2 workers with --quick);
every run in a fresh process of its own, torch's DataLoader and ours taking turns, 5 times each. The time from
iter() to the first batch; the CPU seconds up to then; the memory of the process tree when the last batch of a whole
pass has come, so that every part of the array has been read, beyond the same program with an array of 1 MB (the
interpreters) and beyond the array that the program itself has made; and, in one more run whose times do not count
(none with --quick), the highest memory on the way.

Targets: at most 1.3 GB beyond the interpreters (1.3 times the array); first batch in at most half of torch's time.

Not profiled yet.
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from tests.benchmarks.bench import Bench, Target, main
from tests.benchmarks.measure import Memory, Run, cpu_seconds

ROW = 1024  # float32, so that a row is a page
BATCH = 256
MB = 1e6


class Rows(Dataset[Any]):
    """The rows of one large array."""

    def __init__(self, megabytes: float) -> None:
        count = round(megabytes * MB / (4 * ROW))
        self.array = np.repeat(np.arange(count, dtype=np.float32)[:, None], ROW, axis=1)

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index: int) -> Any:
        return self.array[index]


def load(bench: Bench, name: str, megabytes: str, workers: str) -> dict[str, float]:
    """Take a whole pass over the array; say how long the first batch took and how much memory there was at the end."""
    dataset = Rows(float(megabytes))
    loader = bench.loaders[name](dataset, BATCH, num_workers=int(workers), multiprocessing_context="spawn")
    memory = Memory()
    before = memory.bytes()
    cpu, began = cpu_seconds(), time.perf_counter()
    first_s = last = 0.0
    for number, batch in enumerate(loader):
        if number == 0:
            first_s, cpu = time.perf_counter() - began, cpu_seconds() - cpu
        if not np.array_equal(batch[:, -1].numpy(), dataset.array[number * BATCH : (number + 1) * BATCH, -1]):
            raise RuntimeError(f"batch {number} is wrong")
        if number == len(loader) - 1:
            last = memory.bytes()
    return {
        "first batch s": first_s,
        "cpu s": cpu,
        "grown MB": (last - before) / MB,
    }


def measure(bench: Bench) -> None:
    megabytes, workers = (200, 2) if bench.quick else (1000, 4)

    def one(name: str) -> Run:
        said, _ = bench.alone("load", name, str(megabytes), str(workers), watch=False)
        return Run(said.pop("first batch s"), said)

    sides = {name: partial(one, name) for name in bench.loaders}
    title = f"{megabytes} MB under spawn, {workers} workers, first batch"
    rounds = 1 if bench.quick else 5
    found = bench.compare(title, "s", sides, rounds=rounds, targets={"ours": Target("<=", 0.5)})
    for name, runs in found.items():
        tiny, _ = bench.alone("load", name, "1", str(workers), watch=False)
        grown = statistics.median(run.extras["grown MB"] for run in runs) - tiny["grown MB"]
        bound = Target("<=", 1.3 * megabytes)
        if name == "ours":
            bench.check("ours: MB beyond the interpreters", grown, bound)
        else:
            bench.note(f"{name}: MB beyond the interpreters", all=grown)
        if bench.quick:
            continue
        _, peak = bench.alone("load", name, str(megabytes), str(workers))
        bench.note(f"{name}: highest on the way", MB=peak / MB)


if __name__ == "__main__":
    main(__doc__ or "", measure, load=load)
