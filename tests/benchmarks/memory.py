"""memory: a million dicts that workers read, in a list and in a SharedList.

Measured, each in a fresh process: a dataset that holds 1,000,000 dicts (a path, a label, a box), one epoch in a random
order, in batches of 1,000; whatever is fetched is collated and dropped. Growth is what the process tree takes at its
most during the epoch beyond what it took before the loader: anonymous and file pages by proportional set size (see
measure.Memory), without batches in shared memory and without the rows of a SharedList, whose size stands beside it and
does not grow. Workers are 2 and 8, forked, and started by a fork server that has imported `asyncloader.preload`, for
both loaders. "no rows" is the same loader over numbers: what workers, and the fork server, take by themselves. With
--quick 200,000 dicts and 2 workers.

Then what rows cost in a SharedList: rows a second when it is made, time to read one (least of five rounds, 20,000
random rows each).

Targets: growth with a SharedList <= 10 % of torch's with a list, beyond what workers take by themselves (the share with
that stands beside it), where workers are forked or ours; >= 500,000 rows/s; <= 10 us an item; with a list no more than
torch's, within 5 %. Workers of torch's loader that are not forked have a copy each, ours one in all.

What workers of a fork server take by themselves: with torch alone imported beforehand, each had 49 MB of its own when
it began, of which 30 were pages that its garbage collector had written to while the main module was imported;
`asyncloader.preload` freezes the collector in the fork server, and it is 14. What is left of the growth there is the
fork server's own torch, 140 MB, once, and the workers' interpreters: with 2 workers 206 MB with a SharedList and 214
with no rows at all, where torch's loader takes 1,381 with a list. So raw it is 15 % there, and of the rows nothing.

Why a list grows: CPython counts references in the objects themselves, so a worker that only reads writes to their
pages, which are copied; a worker that is not forked has a copy from the beginning. No loader can avoid that; a dataset
that keeps its rows as bytes does.
"""

from __future__ import annotations

import gc
import multiprocessing
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import Dataset

from asyncloader.datasets import SharedList
from tests.benchmarks.bench import Bench, Target, main
from tests.benchmarks.measure import Memory

BATCH = 1000
SIDES = ("torch, list", "ours, list", "torch, SharedList", "ours, SharedList", "torch, no rows", "ours, no rows")


def row(number: int) -> dict[str, Any]:
    """Make what a list of annotations has many of."""
    return {"path": f"images/{number:08}.jpg", "label": number % 1000, "box": [number, 0.5, 2.0, 3.0]}


class Rows(Dataset[Any]):
    """A dataset of what is in memory already."""

    def __init__(self, rows: Sequence[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


class Dicts(Rows):
    """What a list of annotations looks like."""

    def __init__(self, count: int) -> None:
        super().__init__([row(number) for number in range(count)])


DATASETS: dict[str, Callable[[int], Rows]] = {
    "list": Dicts,
    "SharedList": lambda count: Rows(SharedList(map(row, range(count)))),
    "no rows": lambda count: Rows(range(count)),
}


def epoch(bench: Bench, side: str, num_workers: str, method: str) -> dict[str, float]:
    """Run through one epoch, and look at the memory a few times."""
    multiprocessing.set_forkserver_preload(["asyncloader.preload"])
    name, kind = side.split(", ")
    dataset = DATASETS[kind](count(bench))
    gc.collect()
    memory = Memory()
    before = memory.private_bytes()
    options: dict[str, Any] = {"num_workers": int(num_workers), "multiprocessing_context": method}
    loader = bench.loaders[name](dataset, BATCH, shuffle=True, **options)
    most = 0
    began = time.perf_counter()
    for number, _ in enumerate(loader):
        if number % 50 == 0 or number >= len(loader) - 3:
            most = max(most, memory.private_bytes())
    shared = dataset.rows.nbytes if isinstance(dataset.rows, SharedList) else 0
    took = time.perf_counter() - began
    return {"before MB": before / 1e6, "growth MB": (most - before) / 1e6, "shared MB": shared / 1e6, "s": took}


def items(bench: Bench) -> dict[str, float]:
    """Make a SharedList of a list, and read some of its rows."""
    rows = [row(number) for number in range(count(bench))]
    gc.collect()
    gc.freeze()  # a collection over millions of dicts is the list's cost, not the SharedList's
    cpu, began = time.process_time(), time.perf_counter()
    shared = SharedList(rows)
    cpu, made = time.process_time() - cpu, time.perf_counter() - began
    order = [random.randrange(len(rows)) for _ in range(20_000)]
    times = []
    for _ in range(5):
        began = time.perf_counter()
        for index in order:
            shared[index]
        times.append(time.perf_counter() - began)
    return {
        "rows/s": len(rows) / made,
        "rows/CPU s": len(rows) / cpu,
        "us an item": min(times) / len(order) * 1e6,
        "MB": shared.nbytes / 1e6,
    }


def count(bench: Bench) -> int:
    """Return how many dicts there are."""
    return 200_000 if bench.quick else 1_000_000


def measure(bench: Bench) -> None:
    for method in ("fork", "forkserver"):
        for num_workers in (2,) if bench.quick else (2, 8):
            title = f"{count(bench):,} dicts, {num_workers} workers, {method}"
            growth = {}
            for side in SIDES:
                said, _ = bench.alone("epoch", side, str(num_workers), method, watch=False)
                bench.note(f"{title}: {side}", **said)
                growth[side] = said["growth MB"]
            for name in ("torch", "ours"):
                of_list = growth["torch, list"] - growth["torch, no rows"]
                of_shared = growth[f"{name}, SharedList"] - growth[f"{name}, no rows"]
                bench.note(f"{title}: {name}", share_of_all=growth[f"{name}, SharedList"] / growth["torch, list"])
                what = f"{title}: {name} with a SharedList, of torch's with a list, beyond what workers take"
                if (name, method) != ("torch", "forkserver"):
                    bench.check(what, of_shared / of_list, Target("<=", 0.1))
            bench.save()
            bench.check(f"{title}: ours, of torch's", growth["ours, list"] / growth["torch, list"], Target("<=", 1.05))
    said, _ = bench.alone("items", watch=False)
    bench.note("a SharedList", **said)
    bench.check("rows/s when it is made", said["rows/s"], Target(">=", 500_000))
    bench.check("us an item", said["us an item"], Target("<=", 10))


if __name__ == "__main__":
    main(__doc__ or "", measure, epoch=epoch, items=items)
