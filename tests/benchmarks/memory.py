"""memory: a list of a million dicts with 2 workers.

Measured: a dataset that is a Python list of 1,000,000 dicts (a path, a label, a box), 2 forked workers, one epoch in
batches of 1,000, whatever is fetched is collated and dropped; memory is the proportional set size of the process tree
(see measure.Memory) before the loader, after the first batch and at its most; a fresh process for each side. Workers
that only read a list write to it all the same, for every reference that is counted touches the page its object is in,
and pages that are written are copied. With --quick 200,000 dicts.

Target: no more than torch's at the end of the epoch, to within 5 %.

Why it grows at all: CPython counts references in the objects themselves, so no loader in Python can avoid the copies; a
dataset that keeps its index in arrays, or in an Arrow table, can. Not profiled yet.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset

from tests.benchmarks.bench import Bench, Target, main
from tests.benchmarks.measure import Memory

BATCH = 1000


class Dicts(Dataset[dict[str, Any]]):
    """What a list of annotations looks like."""

    def __init__(self, count: int) -> None:
        self.rows = [
            {"path": f"images/{number:08}.jpg", "label": number % 1000, "box": [number, 0.5, 2.0, 3.0]}
            for number in range(count)
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


def epoch(bench: Bench, name: str) -> dict[str, float]:
    """Run through one epoch, and look at the memory a few times."""
    dataset = Dicts(count(bench))
    memory = Memory()
    before = memory.bytes()
    loader = bench.loaders[name](dataset, BATCH, num_workers=2)
    first = most = 0
    for number, _ in enumerate(loader):
        if number % 50 == 0 or number >= len(loader) - 3:
            most = max(most, memory.bytes())
            first = first or most
    return {"before MB": before / 1e6, "first batch MB": first / 1e6, "most MB": most / 1e6}


def count(bench: Bench) -> int:
    """Return how many dicts there are."""
    return 200_000 if bench.quick else 1_000_000


def measure(bench: Bench) -> None:
    most = {}
    for name in bench.loaders:
        said, _ = bench.alone("epoch", name, watch=False)
        bench.note(f"{count(bench):,} dicts, {name}", **said)
        most[name] = said["most MB"]
    bench.check("ours, of torch's", most["ours"] / most["torch"], Target("<=", 1.05))


if __name__ == "__main__":
    main(__doc__ or "", measure, epoch=epoch)
