"""overlapping_draws: what the watch over draws costs coroutines that draw nothing, and draws of their own.

CPU time of one worker process a sample, from the opening of the dataset to its end, with `seeding="worker"`, which does
nothing of the kind, with the default, which watches, and with `seeding="sample"`, which seeds each step, in turns;
batches of 32, 128 samples in flight that wait 5 ms. A short run shows what its beginning costs: generators of the
dataset's own are looked for.

Target: the watch takes 5 % of a run of 50 times as many samples as are in flight.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import time
from operator import truediv
from typing import Any

from asyncloader import DataLoader
from tests.benchmarks.bench import Bench, Target, main

IN_FLIGHT = 128
WAITS_S = 0.005
_spent: Any = multiprocessing.Queue()


class Waits:
    """Samples that wait, and draw nothing."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.began = 0.0

    def __len__(self) -> int:
        return self.length

    async def __aenter__(self) -> None:
        self.began = time.process_time()

    async def __aexit__(self, *exc_info: object) -> None:
        _spent.put(time.process_time() - self.began)

    async def __getitem__(self, index: int) -> int:
        await asyncio.sleep(WAITS_S)
        return index


def spent(length: int, **options: Any) -> float:
    """Return the worker's CPU time a sample, in us."""
    loader: Any = DataLoader(Waits(length), 32, num_workers=1, concurrency=IN_FLIGHT, **options)  # type: ignore[arg-type]
    for _ in loader:
        pass
    return float(_spent.get(timeout=60)) / length * 1e6


def measure(bench: Bench) -> None:
    for waves, target in ((5, None), (50, Target("<=", 1.05)), (200, Target("<=", 1.05))):
        found: dict[str, list[float]] = {"worker": [], "batch": [], "sample": []}
        for turn in range(3 if bench.quick else 11):
            for seeding in [*found] if turn % 2 else [*found][::-1]:
                found[seeding].append(spent(waves * IN_FLIGHT, seeding=seeding))
        ratio = statistics.median(map(truediv, found["batch"], found["worker"]))
        medians = {seeding: statistics.median(each) for seeding, each in found.items()}
        bench.note(f"{waves * IN_FLIGHT} samples, us each", **medians)
        if target is None:
            bench.note(f"{waves * IN_FLIGHT} samples, ratio", ratio=ratio)
        else:
            bench.check(f"{waves * IN_FLIGHT} samples, ratio", ratio, target)


if __name__ == "__main__":
    main(__doc__ or "", measure)
