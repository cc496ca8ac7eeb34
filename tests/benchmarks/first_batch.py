"""first_batch: how long it takes from iter() to the first batch.

Measured: `next(iter(loader))` with 2 workers over a dataset of ints at default options, for the start methods fork,
forkserver and spawn, in interleaved pairs; the loader itself is made before the clock starts, and the end of the
workers comes after it has stopped. With "warm" the process has started workers before (one start per side is thrown
away: it starts multiprocessing's forkserver, and whatever else a process needs once). With "cold" every run has an
interpreter of its own that has imported torch and the loader, and where nothing has run yet: once-only costs are
inside. 20 pairs each; with --quick 20 for warm forks, 1 for the others.

Target: the median at most 1.05 of torch's, for every start method.

Our package is compiled to bytecode first, as torch was when it was installed: where Python is told not to write any
(PYTHONDONTWRITEBYTECODE), every spawned worker would compile 40 modules, 30 ms.

What profiling found: under fork the forks themselves are most (6 to 8 ms each for a process that has imported torch).
numpy imports its `random` late: every worker did it for itself, 9 to 30 ms, until the parent did it once. A worker that
was to be given its task by the executor's queue waited 4 ms for threads of the parent, which was forking the next one;
it begins by itself now, and finds its tickets waiting. `torch.manual_seed` reads source files for a stack that it notes
down: 2 ms. Under spawn the imports are all: 950 ms of torch's, 80 of ours until the engine was left out, 12 now; and a
full garbage collection over what torch has brought, 60 ms, came in ours or just after the first batch of torch's.
"""

from __future__ import annotations

import compileall
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import asyncloader
from tests.benchmarks.bench import Bench, Target, main
from tests.benchmarks.dispatch import Ints
from tests.benchmarks.measure import Run, cpu_seconds, settle

AT_MOST = Target("<=", 1.05)


def first_batch(bench: Bench, name: str, method: str) -> dict[str, float]:
    """Time one start."""
    loader = bench.loaders[name](Ints(1000), num_workers=2, multiprocessing_context=method)
    cpu = cpu_seconds()
    began = time.perf_counter()
    iterator = iter(loader)
    began_workers = time.perf_counter()
    next(iterator)
    ended = time.perf_counter()
    return {
        "ms": (ended - began) * 1e3,
        "cpu ms": (cpu_seconds() - cpu) * 1e3,
        "in iter() ms": (began_workers - began) * 1e3,
    }


def warm(bench: Bench, name: str, method: str) -> Run:
    found = first_batch(bench, name, method)
    began = time.perf_counter()
    settle()  # the iterator is dropped by now
    return Run(found.pop("ms"), {**found, "end ms": (time.perf_counter() - began) * 1e3})


def cold(bench: Bench, name: str, method: str) -> Run:
    found, _ = bench.alone("first_batch", name, method, watch=False)
    return Run(found.pop("ms"), found)


def measure(bench: Bench) -> None:
    compileall.compile_dir(str(Path(asyncloader.__file__).parent), quiet=2)

    def pairs(side: Callable[[Bench, str, str], Run], method: str) -> dict[str, Callable[[], Run]]:
        return {name: partial(side, bench, name, method) for name in bench.loaders}

    for method in ("fork", "forkserver", "spawn"):
        sides = pairs(warm, method)
        for once in sides.values():
            once()
        rounds = 1 if bench.quick and method != "fork" else 20
        bench.compare(f"warm, {method}", "ms", sides, rounds=rounds, targets={"ours": AT_MOST})
    rounds = 1 if bench.quick else 20
    bench.compare("cold, fork", "ms", pairs(cold, "fork"), rounds=rounds, targets={"ours": AT_MOST})


if __name__ == "__main__":
    main(__doc__ or "", measure, first_batch=first_batch)
