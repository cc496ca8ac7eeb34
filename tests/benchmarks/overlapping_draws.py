"""overlapping_draws: what it costs that coroutines have draws of their own, where they draw nothing.

CPU time of one worker process a sample, from the opening of the dataset to its end, with `seeding="worker"`, which does
nothing of the kind, and with the default, in turns; batches of 32, 128 samples in flight that wait 5 ms. A short run
shows what its beginning costs: generators of the dataset's own are looked for, and the first steps are looked at.

Target: 5 % of a run of 50 times as many samples as are in flight.

Found on two cores, with 8 other jobs on them, medians of 11 pairs: 13 us, and 2 % more, in runs of 6,400 and of 25,600
samples. A beginning costs 1.4 ms: 10 to 20 % of a run of 640.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import time
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
        pairs = []
        for turn in range(3 if bench.quick else 11):
            kinds: list[dict[str, Any]] = [{"seeding": "worker"}, {}]
            found = {len(each): spent(waves * IN_FLIGHT, **each) for each in (kinds if turn % 2 else kinds[::-1])}
            pairs.append((found[1], found[0]))
        ratio = statistics.median(ours / plain for plain, ours in pairs)
        bench.note(f"{waves * IN_FLIGHT} samples, us each", plain=statistics.median(plain for plain, _ in pairs))
        if target is None:
            bench.note(f"{waves * IN_FLIGHT} samples, ratio", ratio=ratio)
        else:
            bench.check(f"{waves * IN_FLIGHT} samples, ratio", ratio, target)


if __name__ == "__main__":
    main(__doc__ or "", measure)
