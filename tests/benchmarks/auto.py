"""auto: ``num_workers="auto"`` beside every fixed number from 1 to 8.

Phases, each in one epoch, the later ones without a pause after the one before:

- samples that sleep, a trainer that does nothing;
- samples that compute (a decode, played by a loop of a fixed number of hashes), a trainer that does nothing;
- samples that sleep, a slow trainer; and then one that is five times as fast;
- samples that compute, and then samples that sleep.

Measured is the rate of batches over the last half of each phase. Targets: at least 0.9 of the best fixed number's; with
the slow trainer, which never waits, at most one worker more than are needed; the last change at most 5 s after the
beginning of a phase.
"""

from __future__ import annotations

import hashlib
import math
import time
from functools import partial
from typing import Any

import torch
from torch.utils.data import Dataset

from asyncloader import DataLoader
from tests.benchmarks.bench import Bench, Target, main
from tests.benchmarks.measure import Run

BATCH = 4
SLEEP_S = 0.005
TRAIN_S = 0.05
COUNTS = range(1, 9)
SETTLED_S = 5.0


class Phases(Dataset[int]):
    """Samples that sleep or compute, as a number says that all processes share.

    Args:
        kind: 0 to sleep, 1 to compute.
    """

    def __init__(self) -> None:
        self.kind = torch.zeros((), dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return 10**7

    def __getitem__(self, index: int) -> int:
        if self.kind.item():
            data = bytes(1 << 16)
            for _ in range(40):
                data = hashlib.sha256(data).digest() + data[32:]
        else:
            time.sleep(SLEEP_S)
        return index


PHASES: dict[str, list[tuple[int, float]]] = {
    "sleeping samples": [(0, 0.0)],
    "computing samples": [(1, 0.0)],
    "a slow trainer, then one 5 times as fast": [(0, TRAIN_S), (0, TRAIN_S / 5)],
    "computing, then sleeping samples": [(1, 0.0), (0, 0.0)],
}


def play(num_workers: Any, phases: list[tuple[int, float]], seconds: float) -> list[dict[str, float]]:
    """Run the phases one after the other; return of each its rate, how many workers it came to, when it was settled."""
    dataset = Phases()
    loader: Any = DataLoader(dataset, BATCH, num_workers=num_workers, persistent_workers=True)
    iterator = iter(loader)
    next(iterator)
    began = time.perf_counter()
    found = []
    for kind, train_s in phases:
        dataset.kind.fill_(kind)
        start = time.perf_counter()
        half, count = 0.0, 0
        while (now := time.perf_counter()) < start + seconds:
            next(iterator)
            time.sleep(train_s)
            if now > start + seconds / 2:
                half = half or time.perf_counter()
                count += 1
        changes = [change.at_s for change in loader.stats().changes if change.at_s > start - began]
        settled_s = max(changes, default=start - began) - (start - began)
        rate = count / (time.perf_counter() - half)
        found.append({"rate": rate, "workers": float(loader.num_workers), "settled s": settled_s})
    loader.close()
    return found


def measure(bench: Bench) -> None:
    """Play everything with every number, and with none that is fixed."""
    seconds = 8.0 if bench.quick else 20.0
    for title, phases in PHASES.items():
        seen = {str(count): play(count, phases, seconds) for count in COUNTS}
        seen["auto"] = play("auto", phases, seconds)
        for number, (kind, train_s) in enumerate(phases):
            name = f"{title}, phase {number + 1}"
            rates = {count: own[number]["rate"] for count, own in seen.items()}
            sides = {count: partial(Run, rate) for count, rate in rates.items()}
            bench.compare(name, "batches/s", sides, rounds=1, workers_stay=True)
            best = max(rate for count, rate in rates.items() if count != "auto")
            auto = seen["auto"][number]
            bench.check(f"{name}: of the best fixed rate", auto["rate"] / best, Target(">=", 0.9))
            bench.note(f"{name}: auto", **auto)
            if train_s == TRAIN_S and not kind:
                needed = math.ceil(BATCH * SLEEP_S / train_s)
                bench.check(f"{name}: workers beyond what is needed", auto["workers"] - needed, Target("<=", 1))
            bench.check(f"{name}: settled after s", auto["settled s"], Target("<=", SETTLED_S))


if __name__ == "__main__":
    main(__doc__ or "", measure)
