"""skew: how well the workers stay busy when samples differ in cost.

Measured: 4 workers, batches of 16, in order, over 3,200 samples that only sleep (cores do not matter, so 4 workers
mean 4 at once on any machine): 0.5 ms each and every 200th 200 ms, or log-normal times (median 0.5 ms, sigma 1.5,
one draw for all runs). First at default options, then with prefetch_factor 2, 4, 8, 16 and max_buffered_bytes=0, which
is torch's window. The clock runs from the moment the first sample starts (samples carry that time; the monotonic
clock is one for all processes) to the arrival of the last batch, so workers' start is outside and is the column
"start ms". With --quick there is one round, and prefetch_factor is 2 and 8. (Fewer samples would not do: in 25 batches
a slow one at the end is luck, and moves the figures by a tenth.)

Beside each stands a simulation with no overhead at all: static assignment (batch i to worker i % 4) or greedy (to
whoever is free first), batch i sent off when batch i - window has been taken, or at once if nothing bounds the
window (waiting batches here are far below max_buffered_bytes). A sleep of 0.5 ms takes longer than that on any kernel
(timer slack, waking up); the mean excess of 1,000 sleeps in this process, idle, in the same run, is added to every
sample of the simulation. "of nominal" is what the simulation without that excess would make of it.

Targets: at default options at least 2.5 times torch's in-order throughput, and at least 92 % of the static
simulation (scheduling="dynamic": of the greedy one); likewise 92 % in the sweep, of the simulation with the same
window.

What profiling found: with torch's window a slow batch stops everybody, whatever the scheduling; run-ahead is what
gains. Under dynamic scheduling a second ticket in a worker's queue is what keeps a short window from the greedy bound;
a worker gets one at a time where the measured latency of the channel is below 5 % of a batch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from tests.benchmarks.bench import Bench, Target, main
from tests.benchmarks.measure import Run, cpu_seconds

WORKERS = 4
BATCH = 16


class Sleeps(Dataset[tuple[int, float]]):
    """Samples that sleep; each tells its index and when it started."""

    def __init__(self, times_s: Sequence[float]) -> None:
        self.times_s = list(times_s)

    def __len__(self) -> int:
        return len(self.times_s)

    def __getitem__(self, index: int) -> tuple[int, float]:
        started = time.perf_counter()
        time.sleep(self.times_s[index])
        return index, started


def simulate(times_s: Sequence[float], window: int | None, *, greedy: bool) -> float:
    """Return the seconds from the first start to the last delivery in order, if nothing but the samples took time.

    Events are few enough to be written as recurrences: a batch starts when it may be sent and its worker is free, and
    is taken when it is done and the one before it has been taken. As batches are sent in order, each needs earlier ones
    only.
    """
    free = [0.0] * WORKERS
    taken: list[float] = []
    for number in range(-(-len(times_s) // BATCH)):
        sent = taken[number - window] if window is not None and number >= window else 0.0
        worker = free.index(min(free)) if greedy else number % WORKERS
        free[worker] = max(sent, free[worker]) + sum(times_s[number * BATCH : (number + 1) * BATCH])
        taken.append(max(free[worker], taken[-1] if taken else 0.0))
    return taken[-1]


def sleep_excess_s() -> float:
    """Return how much longer than asked a sleep of 0.5 ms takes here."""
    excess = []
    for _ in range(1000):
        began = time.perf_counter()
        time.sleep(0.0005)
        excess.append(time.perf_counter() - began - 0.0005)
    return statistics.fmean(excess)


def run(make: Callable[[], Any], simulated_s: float, nominal_s: float) -> Run:
    """Run through one loader; the figure is samples a second."""
    loader = make()
    cpu = cpu_seconds()
    began = time.perf_counter()
    first, arrived, order = float("inf"), began, []
    for indices, started in loader:
        arrived = time.perf_counter()
        first = min(first, float(started.min()))
        order.append(indices)
    taken_s = arrived - first
    if not torch.equal(torch.cat(order), torch.arange(len(loader.dataset))):
        raise RuntimeError("samples are missing or out of order")
    return Run(
        len(loader.dataset) / taken_s,
        {
            "simulated": len(loader.dataset) / simulated_s,
            "of simulated": simulated_s / taken_s,
            "of nominal": nominal_s / taken_s,
            "start ms": (first - began) * 1e3,
            "cpu s": cpu_seconds() - cpu,
        },
    )


def compare(bench: Bench, title: str, times_s: Sequence[float], rounds: int, factor: int | None, best: float) -> None:
    """Let torch, ours static and ours dynamic take turns; `factor` None: default options, ours without a bound."""
    excess = sleep_excess_s()
    real_s = [duration + excess for duration in times_s]
    torch_window = WORKERS * (factor or 2)
    window = None if factor is None else torch_window
    ours: dict[str, Any] = {} if factor is None else {"max_buffered_bytes": 0}
    plans: dict[str, tuple[str, int | None, bool, dict[str, Any]]] = {
        "torch": ("torch", torch_window, False, {}),
        "ours, static": ("ours", window, False, ours),
        "ours, dynamic": ("ours", window, True, {**ours, "scheduling": "dynamic"}),
    }
    sides = {}
    for name, (side, bound, greedy, options) in plans.items():
        make = partial(
            bench.loaders[side], Sleeps(times_s), BATCH, num_workers=WORKERS, prefetch_factor=factor, **options
        )
        simulated = (simulate(durations, bound, greedy=greedy) for durations in (real_s, times_s))
        sides[name] = partial(run, make, *simulated)
    targets = {name: Target(">=", best) for name in sides if name != "torch" and best}
    found = bench.compare(title, "samples/s", sides, rounds=rounds, targets=targets)
    for name, runs in found.items():
        if name != "torch":
            share = statistics.median(one.extras["of simulated"] for one in runs)
            bench.check(f"{title}: {name}, share of the simulation", share, Target(">=", 0.92))


def measure(bench: Bench) -> None:
    count, rounds = 3200, 1 if bench.quick else 3
    every_200th = [0.2 if index % 200 == 0 else 0.0005 for index in range(count)]
    log_normal = [float(value) for value in np.random.default_rng(7).lognormal(np.log(0.0005), 1.5, count)]
    bench.note("sleeps of 0.5 ms", excess_ms=sleep_excess_s() * 1e3)
    for title, times_s, best in (("every 200th 200 ms", every_200th, 2.5), ("log-normal", log_normal, 0)):
        compare(bench, f"{title}, default options", times_s, rounds, None, best)
        for factor in (2, 8) if bench.quick else (2, 4, 8, 16):
            compare(bench, f"{title}, prefetch_factor={factor}, no run-ahead", times_s, rounds, factor, 0)


if __name__ == "__main__":
    main(__doc__ or "", measure)
