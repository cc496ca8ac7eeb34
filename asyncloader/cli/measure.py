"""Run a loader for a while, and see what it does."""

from __future__ import annotations

import contextlib
import gc
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import psutil

from asyncloader.observe.stats import LoaderStats

LONGEST_WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Run:
    """A measured run of a loader.

    Attributes:
        batches: Batches after the first.
        seconds: From the first to the last.
        first_s: From ``iter()`` to the first batch.
        waited_s: The part of `seconds` that was spent waiting for batches.
        cpu_s: CPU seconds of this process and its workers.
        stats: Our loader's own figures; None for torch's.
    """

    batches: int
    seconds: float
    first_s: float
    waited_s: float
    cpu_s: float
    stats: LoaderStats | None

    @property
    def rate(self) -> float:
        """Batches a second, from the first batch on."""
        return self.batches / self.seconds if self.seconds else 0.0


class Patience:
    """Raises where the main thread waits, when no batch has come for a minute: a feed's producers may be silent."""

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGALRM, _give_up)
        self._due = 0.0
        self.note(time.perf_counter())
        return self

    def __exit__(self, *exc: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)

    def note(self, now: float) -> None:
        """A batch has come; a system call a second is enough to know that."""
        if now >= self._due:
            signal.setitimer(signal.ITIMER_REAL, LONGEST_WAIT_S)
            self._due = now + min(1.0, LONGEST_WAIT_S / 10)


def _give_up(number: int, frame: Any) -> None:
    raise RuntimeError(f"no batch came for {LONGEST_WAIT_S:g} s: does anybody make samples for this loader?")


def run(loader: Any, step: Callable[[Any], object] | None, *, seconds: float, batches: int = 0) -> Run:
    """Take batches for so many seconds, but at least three; or so many. Further epochs follow if one is short.

    Raises:
        RuntimeError: if no batch comes for a minute.
    """
    with Patience() as patience:
        return _run(loader, step, patience, seconds, batches)


def _run(loader: Any, step: Callable[[Any], object] | None, patience: Patience, seconds: float, batches: int) -> Run:
    cpu_before = _cpu_s()
    asked = began = time.perf_counter()
    first = waited = 0.0
    count = -1
    until = float("inf")
    stats = None
    done = False
    while not done:
        before = count
        iterator = iter(loader)
        try:
            for batch in iterator:
                now = time.perf_counter()
                patience.note(now)
                count += 1
                if count == 0:
                    first, until = now, now + seconds
                else:
                    waited += now - asked
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
    gc.collect()
    return Run(count, last - first, first - began, waited, _cpu_s() - cpu_before, stats)


def _cpu_s() -> float:
    """CPU seconds of this process, of children that have ended, and of descendants that live: workers may be kept."""
    own, total = psutil.Process(), 0.0
    for process in (own, *own.children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            total += sum(process.cpu_times()[:4])
    return total
