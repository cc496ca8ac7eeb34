"""recovery: how long the trainer waits when a worker is killed.

Measured, under fork:

- "nothing in advance": one worker with one ticket at a time makes batches of 20 ms. It is killed with SIGKILL in the
  middle of a batch, when the trainer waits for just that one; the time is from the kill to the batch, which the
  replacement has to make from the beginning. Target: at most the batch's own time and 100 ms.
- "a normal window": two workers with default options make batches of 10 ms for steps of 15 ms; one of them is killed in
  the middle of the epoch. The figure is the longest time that the trainer waited in the second half of the epoch, with
  and without the kill. Target: it does not notice, that is, waits no longer than a step.

20 kills each; with --quick 5. torch's DataLoader raises here, and its epoch is over.

What profiling found: the fork itself takes 8 to 15 ms of a process with torch in it, the worker's start as long again.
"""

from __future__ import annotations

import logging
import os
import signal
import statistics
import threading
import time

from torch.utils.data import Dataset

from asyncloader import DataLoader
from tests.benchmarks.bench import Bench, Target, main
from tests.benchmarks.measure import settle

BATCH_S = 0.02
STEP_S = 0.015


class Slow(Dataset[int]):
    """Numbers that take their time."""

    def __init__(self, length: int, sample_s: float) -> None:
        self.length = length
        self.sample_s = sample_s

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        time.sleep(self.sample_s)
        return index


def kill_in_a_batch() -> float:
    """Kill the only worker while it makes the awaited batch; return the seconds to that batch."""
    iterator = iter(DataLoader(Slow(8, BATCH_S), num_workers=1, prefetch_factor=1, max_buffered_bytes=0))
    for _ in range(3):
        next(iterator)
    killed: list[float] = []

    def kill() -> None:
        killed.append(time.perf_counter())
        os.kill(iterator._workers[0].pid, signal.SIGKILL)

    timer = threading.Timer(BATCH_S / 2, kill)
    timer.start()
    assert int(next(iterator)) == 3
    took_s = time.perf_counter() - killed[0]
    timer.join()
    assert [int(batch) for batch in iterator] == [4, 5, 6, 7]
    return took_s


def longest_wait(kill: bool) -> float:
    """Train for 40 steps, kill a worker at the twentieth if asked; return the longest wait after that, in seconds."""
    iterator = iter(DataLoader(Slow(40, 0.01), num_workers=2))
    waits = []
    for step in range(40):
        if kill and step == 20:
            os.kill(iterator._workers[0].pid, signal.SIGKILL)
        began = time.perf_counter()
        assert int(next(iterator)) == step
        waits.append(time.perf_counter() - began)
        time.sleep(STEP_S)
    return max(waits[20:])


def measure(bench: Bench) -> None:
    logging.getLogger("asyncloader").setLevel(logging.ERROR)  # each death is a warning
    rounds = 5 if bench.quick else 20
    seconds = []
    waits: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(rounds):
        seconds.append(kill_in_a_batch())
        settle()
        for kill in (True, False):
            waits[kill].append(longest_wait(kill))
            settle()
    ms = [1e3 * value for value in seconds]
    bench.note("nothing in advance, ms from the kill", low=min(ms), median=statistics.median(ms), high=max(ms))
    most = 1e3 * BATCH_S + 100
    bench.check("nothing in advance: median ms", statistics.median(ms), Target("<=", most))
    killed, calm = (1e3 * statistics.median(waits[kill]) for kill in (True, False))
    bench.note("a normal window, longest wait in ms", killed=killed, calm=calm, worst=1e3 * max(waits[True]))
    bench.check("a normal window: median of the longest waits, ms", killed, Target("<=", 1e3 * STEP_S))


if __name__ == "__main__":
    main(__doc__ or "", measure)
