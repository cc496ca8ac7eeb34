"""decode: real photographs, as JPEG, with 2 workers.

Measured: 2,048 crops of 160 x 160 pixels of the two photographs that scikit-learn carries, decoded with Pillow, batches
of 32, next to no work in the trainer, whole epochs. Beside torch's DataLoader and ours stands the bound: two processes
that decode half of the photographs each and do nothing else, started before the clock. The clock of the loaders runs
from the second batch of each worker on. With --quick 512 photographs.

Targets: at least 1.2 times torch's images a second, and at least 90 % of the bound.

Not profiled yet.
"""

from __future__ import annotations

import multiprocessing
import time
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from tests.benchmarks.bench import Bench, Target, main
from tests.benchmarks.measure import Run, cpu_seconds, drain
from tests.benchmarks.photos import decode, jpegs

BATCH = 32
WORKERS = 2


class Photographs(Dataset[Tensor]):
    """JPEG files in memory, decoded when they are asked for."""

    def __init__(self, count: int) -> None:
        self._encoded = jpegs(min(count, 256))
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Tensor:
        return decode(self._encoded[index % len(self._encoded)])


def bound(dataset: Photographs) -> Run:
    """Decode in processes that do nothing else."""
    context = multiprocessing.get_context("fork")
    started = context.Barrier(WORKERS + 1)

    def work(first: int) -> None:
        started.wait()
        for index in range(first, len(dataset), WORKERS):
            dataset[index]

    processes = [context.Process(target=work, args=(first,)) for first in range(WORKERS)]
    for process in processes:
        process.start()
    started.wait()
    began, cpu = time.perf_counter(), cpu_seconds()
    for process in processes:
        process.join()
    took_s = time.perf_counter() - began
    return Run(len(dataset) / took_s, {"cpu us/batch": (cpu_seconds() - cpu) / (len(dataset) / BATCH) * 1e6})


def load(make: Any, dataset: Photographs) -> Run:
    return drain(make(dataset, BATCH, num_workers=WORKERS), None, BATCH, warm_up=2 * WORKERS - 1)


def measure(bench: Bench) -> None:
    dataset, rounds = (Photographs(512), 3) if bench.quick else (Photographs(2048), 7)
    sides: dict[str, Any] = {name: partial(load, make, dataset) for name, make in bench.loaders.items()}
    sides["two processes alone"] = partial(bound, dataset)
    found = bench.compare(
        "JPEG photographs, 2 workers", "images/s", sides, rounds=rounds, targets={"ours": Target(">=", 1.2)}
    )
    shares = sorted(
        mine.value / most.value for mine, most in zip(found["ours"], found["two processes alone"], strict=True)
    )
    bench.check("ours, share of the bound", shares[len(shares) // 2], Target(">=", 0.9))


if __name__ == "__main__":
    main(__doc__ or "", measure)
