"""auto: ``num_workers="auto"`` beside every fixed number from 1 to 8.

Phases, each in one epoch, the later ones without a pause after the one before:

- samples that sleep, a trainer that does nothing;
- samples that compute (a decode, played by a loop of a fixed number of hashes), a trainer that does nothing;
- samples that sleep, a slow trainer; and then one that is five times as fast;
- samples that compute, and then samples that sleep.

Measured is the rate of batches over the last half of each phase. Every fixed number is played once; the best of each
phase and "auto" take turns then, for the best of eight looks is also the luckiest. Targets: at least 0.9 of that
number's rate; with the slow trainer, which never waits, at most one worker more than are needed; the last change at
most 5 s after the beginning of a phase.

Found: in one phase of three that followed another one more workers seemed not to help, and were taken away for the ten
seconds of a trial's patience: 0.25 of the best rate. Two reasons, each of which is mended. On a shared host cores stand
still for some tenths of a second now and then; two windows have to agree now. And the trainer gets no more than before
until it has what the few workers had been given before the others came, up to 250 batches here, for 1.3 s: what workers
make counts now, as what the trainer gets.
"""

from __future__ import annotations

import hashlib
import math
import statistics
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
        changes = [at_s for at_s in loader.stats().workers.changes if at_s > start - began]
        settled_s = max(changes, default=start - began) - (start - began)
        rate = count / (time.perf_counter() - half)
        found.append({"rate": rate, "workers": float(loader.num_workers), "settled s": settled_s})
    loader.close()
    return found


def measure(bench: Bench) -> None:
    """Look for the best number of each phase; then play that and none that is fixed, in turns."""
    seconds, rounds = (8.0, 2) if bench.quick else (20.0, 5)
    for title, phases in PHASES.items():
        looks = {count: [phase["rate"] for phase in play(count, phases, seconds)] for count in COUNTS}
        best = [max(COUNTS, key=lambda count, number=number: looks[count][number]) for number in range(len(phases))]
        sides = [*dict.fromkeys(best), "auto"]
        seen = [{side: play(side, phases, seconds) for side in sides} for _ in range(rounds)]
        for number, (kind, train_s) in enumerate(phases):
            name = f"{title}, phase {number + 1}"
            _compare(bench, name, best[number], [{side: own[side][number] for side in sides} for own in seen])
            at_a_look = {str(count): look[number] for count, look in looks.items()}
            bench.note(f"{name}: batches/s at a look, by workers", **at_a_look)
            workers, settled_s = (_median(seen, number, what) for what in ("workers", "settled s"))
            if train_s == TRAIN_S and not kind:
                needed = math.ceil(BATCH * SLEEP_S / train_s)
                bench.check(f"{name}: workers beyond what is needed", workers - needed, Target("<=", 1))
            bench.check(f"{name}: settled after s", settled_s, Target("<=", SETTLED_S))


def _compare(bench: Bench, name: str, best: int, seen: list[dict[Any, dict[str, float]]]) -> None:
    """Print what was played already: the best fixed number, and none that is fixed."""
    played = {side: iter([Run(own[side].pop("rate"), own[side]) for own in seen]) for side in (best, "auto")}
    sides = {"auto" if side == "auto" else f"{side} workers": partial(next, runs) for side, runs in played.items()}
    bench.compare(name, "batches/s", sides, rounds=len(seen), targets={"auto": Target(">=", 0.9)}, workers_stay=True)


def _median(seen: list[dict[Any, list[dict[str, float]]]], number: int, what: str) -> float:
    return statistics.median(own["auto"][number][what] for own in seen)


if __name__ == "__main__":
    main(__doc__ or "", measure)
