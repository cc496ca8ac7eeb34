"""What a worker uses, from one batch to the next: as it tells with each of them."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from asyncloader.observe.private import PrivateBytes
from asyncloader.observe.stalls import stalled_s

_STALLS_EVERY_S = 0.1  # to ask takes up to 100 us


class Usage:
    """The use that a worker makes of the machine. For the thread that makes its batches.

    Args:
        cpu_clock: Tells the CPU seconds of the worker.
        memory: Tells its private memory; None for a worker that shares its memory.
    """

    def __init__(self, cpu_clock: Callable[[], float], memory: PrivateBytes | None) -> None:
        self._cpu_clock = cpu_clock
        self._memory = memory
        self._cpu_s = cpu_clock()
        self._stalled_s, self._stalls_due_at = stalled_s(), perf_counter() + _STALLS_EVERY_S

    def since_last(self, now: float) -> tuple[float, float, int]:
        """Return the CPU time since the last call, the time without a core, and the private memory (0 if not known).

        Args:
            now: On `time.perf_counter`, seconds.
        """
        cpu_before, self._cpu_s = self._cpu_s, self._cpu_clock()
        stalled = 0.0
        if now >= self._stalls_due_at:
            before, self._stalled_s, self._stalls_due_at = self._stalled_s, stalled_s(), now + _STALLS_EVERY_S
            stalled = self._stalled_s - before
        return self._cpu_s - cpu_before, stalled, 0 if self._memory is None else self._memory.take(now)
