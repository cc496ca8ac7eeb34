"""counting: what `loader.stats()` costs, whether anybody asks for it or not.

CPU time of the calling thread, medians of many rounds: `Meter.made` and `Meter.took`, which the loop thread and the
consumer call once for each batch, with the sums that are due meanwhile; and `Meter.stats`, a snapshot of all figures,
after 256 more batches as they are, and when a consumer has just summed them up.

Targets: 5 us a batch, where a batch that has next to nothing in it takes about 30 us of the parent in all; 50 us a
snapshot of what is summed up, 500 where 256 batches are not.
"""

from __future__ import annotations

import statistics
from time import perf_counter, sleep, thread_time

from asyncloader.observe.meter import Meter
from asyncloader.observe.record import Record
from tests.benchmarks.bench import Bench, Target, main

BATCHES = 256


def measure(bench: Bench) -> None:
    meter = Meter(0, 4, 8)
    record = Record(1, 1, 8, perf_counter(), 1e-5, 2e-5, 3e-5, 4e-5, 0.0, 50 << 20, 5e-5)
    counting, working_out, taking = [], [], []

    def take() -> None:
        now = perf_counter()
        meter.made(1, [record])
        meter.add([*record, 1, 1, 1000, now, now, now, 0.0, now, now, now, now, 4, 2, now])

    def snapshot() -> float:
        began = thread_time()
        meter.stats()
        return thread_time() - began

    for _ in range(50 if bench.quick else 500):
        began = thread_time()
        for _ in range(BATCHES):
            take()
        counting.append((thread_time() - began) / BATCHES)
        working_out.append(snapshot())
        sleep(0.02)
        began = thread_time()
        take()  # and sum up
        counting[-1] += (thread_time() - began) / BATCHES
        snapshot()  # the sleep has left the caches to others
        taking.append(snapshot())
    bench.check("counting a batch, us", statistics.median(counting) * 1e6, Target("<=", 5))
    bench.check("a snapshot, us", statistics.median(taking) * 1e6, Target("<=", 50))
    bench.check("a snapshot of what is not summed up, us", statistics.median(working_out) * 1e6, Target("<=", 500))


if __name__ == "__main__":
    main(__doc__ or "", measure)
