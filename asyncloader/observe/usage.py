"""What a worker uses, from one batch to the next: as it tells with each of them."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from asyncloader.observe.private import PrivateBytes
from asyncloader.observe.stalls import stalled_s

_LOOK_EVERY_S = 0.001  # to ask for the CPU time is a call of the kernel: 0.5 us
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
        self._cpu_s, self._private_bytes, self._due_at = cpu_clock(), 0, 0.0
        self._stalled_s, self._stalls_due_at = stalled_s(), perf_counter() + _STALLS_EVERY_S

    def since_last(self, now: float) -> tuple[float, float, int]:
        """Return the CPU time since it was told last, the time without a core, and the private memory (0 if not known).

        Args:
            now: On `time.perf_counter`, seconds.
        """
        if now < self._due_at:
            return 0.0, 0.0, self._private_bytes
        cpu_before, self._cpu_s, self._due_at = self._cpu_s, self._cpu_clock(), now + _LOOK_EVERY_S
        stalled = 0.0
        if now >= self._stalls_due_at:
            before, self._stalled_s, self._stalls_due_at = self._stalled_s, stalled_s(), now + _STALLS_EVERY_S
            stalled = self._stalled_s - before
        if self._memory is not None:
            self._private_bytes = self._memory.take(now)
        return self._cpu_s - cpu_before, stalled, self._private_bytes
