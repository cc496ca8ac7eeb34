"""scheduling: what the scheduler takes for a batch, with few workers and with thousands.

No process and no loader: the scheduler alone is told what would happen. Workers return their batches in random order,
as far apart as 4,096 of them can be, so most batches are parked; the consumer waits, and reads on as far as it is let.
Counted is all that a batch takes here: planning it, sending it, its return, its turn; window and run-ahead included.

Target: at most 10 us a batch at 4,096 workers.

What was found: where each decision looked at all workers, 4,096 of them took 750 us a batch; now 6 to 12, on a machine
that others use as well, of which a heap of 4,096 entries takes two. With 2 workers it is 6 to 10.
"""

from __future__ import annotations

import random
from collections import deque
from functools import partial
from time import perf_counter
from typing import Any

from asyncloader.engine.scheduler import Scheduler
from tests import deciders
from tests.benchmarks.bench import Bench, Target, main
from tests.benchmarks.measure import Run

MOST_US = 10.0


class Simulation:
    """Workers that return their batches in random order, and a consumer that waits.

    Args:
        num_workers: How many there are.
        options: Of the scheduler.
    """

    def __init__(self, num_workers: int, **options: Any) -> None:
        self.scheduler = Scheduler(deciders.options(num_at_start=num_workers, **options))
        self.window = 2 * num_workers
        self.planned = self.taken = 0
        self.queues: list[deque[int]] = [deque() for _ in range(num_workers)]
        self.busy: list[int] = []  # a worker for each ticket that it has
        self.chance = random.Random(0)
        self.seconds = 0.0

    def run(self, batches: int) -> Run:
        """Return microseconds a batch."""
        self.read()
        planned = self.planned
        for _ in range(batches):
            place = self.chance.randrange(len(self.busy))
            self.busy[place], self.busy[-1] = self.busy[-1], self.busy[place]
            worker = self.busy.pop()
            batch = self.queues[worker].popleft()
            began = perf_counter()
            self.scheduler.returned(worker, batch, 0.01, 0.0001)
            self.scheduler.ready(batch, batch, 10_000)
            self.scheduler.assign()
            self.seconds += perf_counter() - began
            self.carry_out()
            self.read()
        return Run(self.seconds / max(batches, self.planned - planned) * 1e6)  # more are sent while the queues fill

    def read(self) -> None:
        """Read the sampler as far as a consumer may that waits."""
        count = max(self.window + self.taken, self.scheduler.read_until) - self.planned
        if count > 0:
            began = perf_counter()
            self.scheduler.planned(range(count))
            self.scheduler.assign()
            self.seconds += perf_counter() - began
            self.planned += count
            self.carry_out()

    def carry_out(self) -> None:
        """Be workers and consumer."""
        for worker, tickets in self.scheduler.outbox.items():
            self.queues[worker] += [ticket.batch for ticket in tickets]
            self.busy += [worker] * len(tickets)
        self.taken += len(self.scheduler.delivered)
        self.scheduler.outbox.clear()
        self.scheduler.delivered.clear()


def simulate(batches: int, num_workers: int, **options: Any) -> Run:
    """Return microseconds a batch."""
    return Simulation(num_workers, **options).run(batches)


def measure(bench: Bench) -> None:
    """Compare few workers and many."""
    batches = 10_000 if bench.quick else 60_000
    for scheduling in ("static", "dynamic"):
        for max_buffered_bytes in (0, 64 << 20, 1 << 40):
            options: dict[str, Any] = {"scheduling": scheduling, "max_buffered_bytes": max_buffered_bytes}
            sides = {
                f"{count} workers": partial(
                    lambda count, options: Simulation(count, **options).run(batches), count, options
                )
                for count in (2, 64, 4096)
            }
            title = f"{scheduling}, run-ahead of {max_buffered_bytes >> 20} MiB"
            runs = bench.compare(title, "us/batch", sides, rounds=3)
            bench.check(
                f"{title}: us a batch at 4096 workers",
                min(run.value for run in runs["4096 workers"]),
                Target("<=", MOST_US),
            )


if __name__ == "__main__":
    main(__doc__ or "", measure)
