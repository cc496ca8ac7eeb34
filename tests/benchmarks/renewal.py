"""renewal: what it costs to renew workers, with samples each of which leaves 1 MB behind.

Two workers, batches of 8 samples. A sample sleeps or computes for 5 ms; a trainer that does nothing takes all there is,
so whatever a renewal holds up is seen. Sides: workers that stay, and grow by as much as they leak; renewed by
`max_worker_memory`, 256 MB; and the same without a leak and without an option. Beside the rate: renewals, the longest
that the trainer waited for a batch, and the most memory that a worker had to itself. Then a fork server.

What is drawn for each sample is summed up: it has to be the same on all sides.

Target: at least 0.75 of the rate of workers that stay, where workers live for 1.4 s. Each renewal costs the start of a
process, in which the other worker goes on, while batches in order may wait.

What was found for such a renewal, in one short run on two cores (``--quick``): 0.90 of the rate of workers that stay,
and 0.77 with a fork server.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
from torch.utils.data import Dataset

from asyncloader import DataLoader
from tests.benchmarks.bench import Bench, Target, main
from tests.benchmarks.measure import Run

SAMPLE_S = 0.005
BATCH = 8
LEAST = Target(">=", 0.75)


class Leaks(Dataset[Any]):
    """Samples that leave memory behind.

    Args:
        leak_bytes: Of each.
        computes: They need a core.
    """

    def __init__(self, leak_bytes: int, *, computes: bool) -> None:
        self.leak_bytes = leak_bytes
        self.computes = computes
        self.left: list[bytearray] = []

    def __len__(self) -> int:
        return 10**6

    def leak(self) -> None:
        """Leave some."""
        if self.leak_bytes:
            self.left.append(bytearray(b"x" * 4096) * (self.leak_bytes // 4096))

    def __getitem__(self, index: int) -> Any:
        until = time.perf_counter() + SAMPLE_S
        self.leak()
        if not self.computes:
            time.sleep(max(0.0, until - time.perf_counter()))
        while time.perf_counter() < until:
            pass
        return torch.rand(())


def play(dataset: Leaks, batches: int, sums: dict[int, float], num_workers: int = 2, **options: Any) -> Run:
    """Take so many batches; return batches a second after the first."""
    torch.manual_seed(0)
    loader: Any = DataLoader(dataset, BATCH, num_workers=num_workers, max_buffered_bytes=0, **options)
    iterator = iter(loader)
    total, longest, memory = 0.0, 0.0, 0
    next(iterator)
    began = last = time.perf_counter()
    for number in range(batches):
        total += float(next(iterator).sum())
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
        if number % 8 == 0:
            memory = max(memory, *(worker.private_bytes for worker in loader.stats().workers.each), 0)
    seconds = time.perf_counter() - began
    renewals = loader.stats().workers.renewals
    iterator.close()
    assert sums.setdefault(batches, total) == total, "other data"
    extras = {"renewals": float(renewals), "longest wait ms": longest * 1e3, "MB of a worker": memory / 1e6}
    return Run(batches / seconds, extras)


def measure(bench: Bench) -> None:
    batches, rounds = (150, 1) if bench.quick else (400, 3)
    by_memory = {"max_worker_memory": 256 << 20}
    for title, computes in (("samples that sleep", False), ("samples that compute", True)):
        leaks, sums = Leaks(1 << 20, computes=computes), dict[int, float]()
        sides = {
            "stay": partial(play, leaks, batches, sums),
            "max_worker_memory": partial(play, leaks, batches, sums, **by_memory),
            "no leak": partial(play, Leaks(0, computes=computes), batches, sums),
        }
        bench.compare(title, "batches/s", sides, rounds=rounds, targets={"max_worker_memory": LEAST})
    options: dict[str, Any] = {"multiprocessing_context": "forkserver"}
    leaks, sums = Leaks(1 << 20, computes=False), dict[int, float]()
    sides = {
        "stay": partial(play, leaks, batches, sums, **options),
        "max_worker_memory": partial(play, leaks, batches, sums, **options, **by_memory),
    }
    bench.compare("a fork server", "batches/s", sides, rounds=rounds, targets={"max_worker_memory": LEAST})


if __name__ == "__main__":
    main(__doc__ or "", measure)
