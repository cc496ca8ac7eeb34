"""Run a loader for a while, and see what it does."""

from __future__ import annotations

import gc
import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncloader.observe.stats import LoaderStats


@dataclass(frozen=True, slots=True)
class Run:
    """A measured run of a loader.

    Attributes:
        batches: Batches after the first.
        seconds: From the first to the last.
        first_s: From ``iter()`` to the first batch.
        waited_s: The part of `seconds` that was spent waiting for batches.
        cpu_s: CPU seconds of this process and its workers.
        memory_bytes: The most that this process and its workers took, pages they share counted once.
        stats: Our loader's own figures; None for torch's.
    """

    batches: int
    seconds: float
    first_s: float
    waited_s: float
    cpu_s: float
    memory_bytes: int
    stats: LoaderStats | None

    @property
    def rate(self) -> float:
        """Batches a second, from the first batch on."""
        return self.batches / self.seconds if self.seconds else 0.0


def run(loader: Any, step: Callable[[Any], object] | None, *, seconds: float, batches: int = 0) -> Run:
    """Take batches for so many seconds, but at least three; or so many. Further epochs follow if one is short."""
    cpu_before = _cpu_s()
    asked = began = time.perf_counter()
    first = waited = 0.0
    count, memory = -1, 0
    until = float("inf")
    stats = None
    done = False
    while not done:
        before = count
        iterator = iter(loader)
        try:
            for batch in iterator:
                now = time.perf_counter()
                count += 1
                if count == 0:
                    first, until = now, now + seconds
                else:
                    waited += now - asked
                    if count in (4, 16, 64):
                        memory = max(memory, tree_bytes())
                if step is not None:
                    step(batch)
                del batch
                asked = time.perf_counter()
                done = count >= batches if batches else asked > until and count >= 3
                if done:
                    break
        finally:
            if hasattr(loader, "stats") and (count - before > 3 or stats is None):
                stats = loader.stats()
            if hasattr(iterator, "close"):
                iterator.close()
            del iterator
        if count == before:
            raise ValueError("the loader has no batches")
    last = time.perf_counter()
    memory = max(memory, tree_bytes())
    gc.collect()
    return Run(count, last - first, first - began, waited, _cpu_s() - cpu_before, memory, stats)


def _cpu_s() -> float:
    """CPU seconds of this process and of those children that have ended."""
    usages = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def tree_bytes(pid: int | None = None) -> int:
    """Return what a process and its descendants take, shared pages in proportion; 0 where that cannot be told."""
    pid = os.getpid() if pid is None else pid
    total = 0
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
        for thread in Path(f"/proc/{pid}/task").iterdir():
            total += sum(tree_bytes(int(child)) for child in (thread / "children").read_text().split())
    except OSError:  # it has ended meanwhile, or this is no Linux
        pass
    return total
