"""dispatch: what a batch costs that has next to nothing in it.

Measured: batches a second from 2 workers over a dataset whose samples are their own indices, with default
collation. Once with batch_size=1, where nothing but the loader's own work is left, at default options and with
prefetch_factor=4; once with batches of 1024 out of 2,000,000 samples. `for` and `async for` (under asyncio's loop
and under uvloop) beside torch's DataLoader. The clock runs from the first batch on; the time from iter() to it is
the column "start ms". Runs of batch_size=1 last 2 s (0.3 s with --quick) and are then broken off; batches of 1024
run to the end of the data (with --quick: 0.3 s of them).

Targets: at least 8 times torch's batches a second with batch_size=1 at default options, for both faces (with
prefetch_factor=4 more is expected, the bound is the same); at least 4 times with batches of 1024.

Without workers the CPU time of a batch is compared, with batches of 1 and of 32 samples, in runs of 1 s. Target: at
most 1.1 times torch's.

Peak memory is that of a fresh process per side that takes batches of one for 1.5 s.

What profiling found: with torch's window alone almost every batch cost one or two context switches, for consumer, loop
thread and worker waited for one another in turn; reading so many rounds ahead that 2 ms of work are queued took them
from 1.5 to 0.03 a batch. A worker looked into its socket before every ticket, now at most every millisecond. What is
left in the worker: seeding 6 us (random 3, numpy and torch 1 each), collation 2, encoding 3; in the parent: scheduling
5, decoding 3. With batches of 1024 the dataset's own `__getitem__` (25 us), unpickling indices (12), collation (11),
the sampler (10) and pickling (7) are most. On 30 November 2026, CPU time of trainer and workers together: batches of
one 32 us (25 with seeding="worker", for three generators are seeded for each batch; torch 611), of 1024 127 us (torch
914; 195 before indices were pickled where they are read, and numbers were collated by an array). Samples are fetched by
a list comprehension: `map` with `operator.getitem` took 7 us more for 1024, since it calls into Python from C for each.
`__getitem__` was bound once for a while, and is not: static methods, other descriptors and datasets that change their
class were not called as Python does. To collate by `struct.pack` would save 5 us of 1024, and cost ten instructions.

Without workers, on 25 November 2026 (two cores, quiet, torch 2.13, Python 3.11; short runs in turn, the smallest of 25
for each side): 1.21 times torch's CPU time with batches of 1, and 1.05 with batches of 32, 1.22 and 1.07 in the first
quartile. This benchmark, whose runs are longer, shows a little more. A batch runs through 1,465 instructions of Python,
torch's through 370 and more of C++, 3 us of which are its profiler's range: ours is left out unless a profiler runs.
What was of use: figures are kept as they come, and worked out 256 at a time (150 instructions to 110); records whose
rare fields are defaults of the class (a ticket in work, the context of its samples: 110 became 48). What is left, above
torch's: taking a batch so that an interrupt at no place loses it (240), the sampler's state and position (200), the
notes about a batch (60). A second way beside this one, for loaders of which nothing is asked, would come to the target
of 1.1 with batches of 1; it would be a second place for each of these promises, and 2 us a batch are not worth that.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import uvloop
from torch.utils.data import Dataset

from tests.benchmarks.bench import Bench, Target, main
from tests.benchmarks.measure import Run, drain, drain_async


class Ints(Dataset[int]):
    """A range: sample i is the number i."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def faces(bench: Bench, dataset: Ints, seconds: float, **options: Any) -> dict[str, Any]:
    """Return the sides: torch's `for`, our `for`, our `async for` under both loops."""

    def sync_run(name: str) -> Run:
        return drain(bench.loaders[name](dataset, num_workers=2, **options), None, seconds=seconds)

    def async_run(loop_factory: Any) -> Run:
        loader = bench.loaders["ours"](dataset, num_workers=2, **options)
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            return runner.run(drain_async(loader, None, seconds=seconds))

    return {
        "torch for": partial(sync_run, "torch"),
        "ours for": partial(sync_run, "ours"),
        "ours async for, asyncio": partial(async_run, asyncio.new_event_loop),
        "ours async for, uvloop": partial(async_run, uvloop.new_event_loop),
    }


def here(bench: Bench, name: str, seconds: float, **options: Any) -> Run:
    """Return the CPU time of a batch that is made in this process."""
    run = drain(bench.loaders[name](Ints(10**8), **options), None, seconds=seconds)
    return Run(run.extras["cpu us/batch"], {"batches/s": run.value})


def measure(bench: Bench) -> None:
    rounds, seconds = (2, 0.3) if bench.quick else (7, 2.0)
    for batch_size in (1, 32):
        own = {"seconds": seconds / 2, "batch_size": batch_size}
        sides = {f"{name} for": partial(here, bench, name, **own) for name in bench.loaders}
        targets = {"ours for": Target("<=", 1.1)}
        bench.compare(f"no workers, batch_size={batch_size}", "cpu us/batch", sides, rounds=rounds, targets=targets)
    cases: list[tuple[str, int, float, float, dict[str, Any]]] = [
        ("batch_size=1, default options", 10**8, seconds, 8, {}),
        ("batch_size=1, prefetch_factor=4", 10**8, seconds, 8, {"prefetch_factor": 4}),
        ("batch_size=1024 of 2,000,000", 2_000_000, seconds if bench.quick else 60, 4, {"batch_size": 1024}),
    ]
    for title, length, limit_s, bound, options in cases:
        sides = faces(bench, Ints(length), limit_s, **options)
        targets = {name: Target(">=", bound) for name in sides if name != "torch for"}
        bench.compare(title, "batches/s", sides, rounds=rounds, targets=targets)
    for name in bench.loaders:
        said, peak = bench.alone("memory", name)
        bench.note(f"peak memory, {name}", MB=peak / 1e6, **said)


def memory(bench: Bench, name: str) -> dict[str, float]:
    """Take batches for a while in a process of its own, to be watched."""
    run = drain(bench.loaders[name](Ints(10**8), num_workers=2), None, seconds=1.5)
    return {"batches": run.extras["batches"]}


if __name__ == "__main__":
    main(__doc__ or "", measure, memory=memory)
