"""renewal: what it costs to renew workers, with samples each of which leaves 1 MB behind.

Two workers, batches of 8 samples. A sample sleeps or computes for 5 ms; a trainer that does nothing takes all there is,
so whatever a renewal holds up is seen. Sides: workers that stay, and grow by as much as they leak; renewed by
`max_worker_memory`, 256 MB; renewed by `max_tasks_per_child`, 30 batches; and the same without a leak and without an
option. Beside the rate: renewals, the longest that the trainer waited for a batch, and the most memory that a worker
had to itself. Then async samples of 50 ms, 32 in flight in one worker, where the tail of a worker's last batch cannot
overlap with the first one of its successor. Then a fork server.

What is drawn for each sample is summed up: it has to be the same on all sides.

Target: at least 0.95 of the rate of workers that stay; not for async samples, where a renewal costs about one wait.

What was found, in one short run on two cores (``--quick``: workers live for 1.4 s): of the rate of workers that stay
0.97 (by memory) and 0.95 (by tasks) where samples sleep, 1.07 and 1.02 where they compute, which is noise, and 0.98
with a fork server. The longest wait for a batch was 35 ms longer at most. Async samples: 0.92, a renewal every 2 s.
(Before workers looked whenever they have grown, one that leaks 180 MB a second came to 310 MB, and to 550 where another
one started slower.)
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any

import torch
from torch.utils.data import Dataset

from asyncloader import DataLoader
from tests.benchmarks.bench import Bench, Target, main
from tests.benchmarks.measure import Run

SAMPLE_S = 0.005
AWAITED_S = 0.05
BATCH = 8
LEAST = Target(">=", 0.95)


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


class Awaited(Leaks):
    """The same, awaited, without a draw."""

    async def __getitem__(self, index: int) -> Any:  # type: ignore[override]
        await asyncio.sleep(AWAITED_S)
        self.leak()
        return torch.tensor(float(index))


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
    by_memory, by_tasks = {"max_worker_memory": 256 << 20}, {"max_tasks_per_child": 30}
    for title, computes in (("samples that sleep", False), ("samples that compute", True)):
        leaks, sums = Leaks(1 << 20, computes=computes), dict[int, float]()
        sides = {
            "stay": partial(play, leaks, batches, sums),
            "max_worker_memory": partial(play, leaks, batches, sums, **by_memory),
            "max_tasks_per_child": partial(play, leaks, batches, sums, **by_tasks),
            "no leak": partial(play, Leaks(0, computes=computes), batches, sums),
        }
        bench.compare(
            title, "batches/s", sides, rounds=rounds, targets=dict.fromkeys(list(by_memory | by_tasks), LEAST)
        )
    options: dict[str, Any] = {"num_workers": 1, "concurrency": 32}
    leaks, sums = Awaited(1 << 20, computes=False), {}
    sides = {
        "stay": partial(play, leaks, 2 * batches, sums, **options),
        "max_tasks_per_child": partial(play, leaks, 2 * batches, sums, **options, max_tasks_per_child=100),
    }
    bench.compare("async samples", "batches/s", sides, rounds=rounds)
    options = {"multiprocessing_context": "forkserver"}
    leaks, sums = Leaks(1 << 20, computes=False), {}
    sides = {
        "stay": partial(play, leaks, batches, sums, **options),
        "max_worker_memory": partial(play, leaks, batches, sums, **options, **by_memory),
    }
    bench.compare("a fork server", "batches/s", sides, rounds=rounds, targets={"max_worker_memory": LEAST})


if __name__ == "__main__":
    main(__doc__ or "", measure)
