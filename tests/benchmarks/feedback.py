"""feedback: weights that the training changes: what an update costs, drawing, and states.

Of 10,000,000 samples (1,000,000 with --quick), drawn with replacement:

- an update of 1,000 random samples, with the first sample that is drawn after it: 20 in a row, and one after other
  work, which has taken the caches of the processor;
- drawing, in microseconds a sample: before the first update, after it, and with an update of 1,000 every 1,024 samples,
  these included; beside torch's WeightedRandomSampler, which draws its epoch at once, here of 100,000 samples, and
  begins anew where a weight changes;
- the first update, which makes the tree of sums;
- a state after 1,000 changed weights, and after all were changed: how long it takes, as JSON, and how large it is.

Sides take turns, 15 rounds; medians of CPU seconds. Targets: an update of 1,000 <= 1 ms, drawing <= 2 us a sample.

Found on two cores at 2.5 GHz, beside other work on the machine (load 10), CPU time:

    an update and the sample after it      0.61 ms, after other work 1.2; the first one 270 ms
    drawing                                0.41 us a sample; before any update 0.72, torch 1.31
    with an update every 1,024 samples     1.6 us a sample
    a state of 1,000 changed weights       32 ms, 22 kB; of all weights 0.7 s, 107 MB

Of the 0.6 ms, adding up takes 0.3, the first 64 samples 0.1, and checking and copying what is given 0.02. A state
compares all weights with those at construction.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import deque
from collections.abc import Callable
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import WeightedRandomSampler

from asyncloader.samplers import WeightedSampler
from tests.benchmarks.bench import Bench, Target, main

UPDATED, DRAWN, ROUNDS = 1000, 100_000, 15


def seconds(function: Callable[[], Any]) -> float:
    """Return the CPU seconds of all threads, which other work on the machine makes no longer."""
    began = time.process_time()
    function()
    return time.process_time() - began


def drawing(bench: Bench, count: int) -> WeightedSampler:
    """Measure updates and drawing; return a sampler of which some weights were changed."""
    random = np.random.default_rng(0)
    weights = random.random(count)
    plain, changed = (WeightedSampler(weights, 1 << 40) for _ in range(2))
    plain_samples, samples = iter(plain), iter(changed)
    next(plain_samples), next(samples)
    updates = cycle([(random.integers(0, count, UPDATED), random.random(UPDATED) + 0.01) for _ in range(64)])

    drawn = 1

    def draw(number: int) -> None:
        nonlocal drawn
        drawn += number
        deque(islice(samples, number), 0)

    def update() -> None:
        changed.update(*next(updates), at=drawn)
        draw(1)

    def train() -> None:
        for _ in range(DRAWN // 1024):
            draw(1023)
            update()

    first = seconds(update)
    rows = torch.from_numpy(weights)
    a_sample = 1e6 / DRAWN
    sides: dict[str, tuple[Callable[[], Any], float]] = {
        "torch, us a sample": (lambda: list(WeightedRandomSampler(rows, DRAWN)), a_sample),  # type: ignore[arg-type]
        "an update and the sample after it, the first after other work, ms": (update, 1e3),
        "an update and the sample after it, ms": (lambda: [update() for _ in range(20)], 1e3 / 20),
        "drawing before any update, us a sample": (lambda: [*islice(plain_samples, DRAWN)], a_sample),
        "drawing, us a sample": (lambda: draw(DRAWN), a_sample),
        "with an update every 1,024 samples, us a sample": (train, 1e6 / (DRAWN // 1024 * 1024)),
    }
    found: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(ROUNDS):
        for name, (side, unit) in sides.items():
            found[name].append(seconds(side) * unit)
    medians = {name: statistics.median(figures) for name, figures in found.items()}
    table = [[name, *(f"{each:.2f}" for each in (medians[name], min(own), max(own)))] for name, own in found.items()]
    bench.table(f"{count:,} samples, CPU time", ["", "median", "least", "most"], table)
    for name, bound in (("an update and the sample after it, ms", 1), *((name, 2) for name in sides if "us a" in name)):
        if not name.startswith("torch"):
            bench.check(name, medians[name], Target("<=", bound))
    bench.note("the first update", ms=first * 1e3)
    return changed


def states(bench: Bench, sampler: WeightedSampler, count: int) -> None:
    """Measure states."""
    few = WeightedSampler(np.ones(count))
    few.update(np.arange(UPDATED), np.full(UPDATED, 2.0))
    few.state_dict()
    sampler.update(np.arange(count), np.random.default_rng(1).random(count))
    sampler.set_epoch(1)
    for name, each in ((f"a state of {UPDATED:,} changed weights", few), ("a state of all weights", sampler)):
        times = [seconds(lambda each=each: json.dumps(each.state_dict())) for _ in range(3)]  # type: ignore[misc]
        bench.note(name, ms=statistics.median(times) * 1e3, MB=len(json.dumps(each.state_dict())) / 1e6)


def measure(bench: Bench) -> None:
    count = 1_000_000 if bench.quick else 10_000_000
    states(bench, drawing(bench, count), count)


if __name__ == "__main__":
    main(__doc__ or "", measure)
