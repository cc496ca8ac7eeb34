"""counting: what `loader.stats()` costs, whether anybody asks for it or not.

CPU time of the calling thread, medians of many rounds: `Meter.made` and `Meter.took`, which the loop thread and the
consumer call once for each batch, and `Meter.stats`, a snapshot of all figures after 256 more batches.

Targets: 5 us a batch, where a batch that has next to nothing in it takes about 30 us of the parent in all; 50 us a
snapshot.
"""

from __future__ import annotations

import statistics
from time import perf_counter, thread_time

from asyncloader.observe.meter import Meter
from asyncloader.observe.record import Record
from tests.benchmarks.bench import Bench, Target, main

BATCHES = 256


def measure(bench: Bench) -> None:
    meter = Meter(0, 4, 8)
    record = Record(1, 1, 8, perf_counter(), 1e-5, 2e-5, 3e-5, 4e-5, 0.0, 50 << 20, 5e-5)
    counting, taking = [], []
    for _ in range(50 if bench.quick else 500):
        began = thread_time()
        for _ in range(BATCHES):
            now = perf_counter()
            meter.made(1, [record])
            meter.took(0.0, now, [*record, 1, 1, 1000, now, now, now, 0.0, now, now], 4, 2)
        counting.append((thread_time() - began) / BATCHES)
        began = thread_time()
        meter.stats()
        taking.append(thread_time() - began)
    bench.check("counting a batch, us", statistics.median(counting) * 1e6, Target("<=", 5))
    bench.check("a snapshot, us", statistics.median(taking) * 1e6, Target("<=", 50))


if __name__ == "__main__":
    main(__doc__ or "", measure)
