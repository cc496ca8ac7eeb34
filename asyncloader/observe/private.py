"""How much memory a worker has to itself, as it tells with each batch.

/proc/self/smaps_rollup ── at most once a second, between two batches ──> PrivateBytes ──> Record

Where the worker has a bound, that is too seldom: a fast leak takes a gigabyte a second. Then the first look comes after
the first batch, and the next ones whenever the worker's anonymous memory has grown by a sixteenth of the bound. That is
read with each batch, since it costs 10 us; but it counts pages that a forked worker shares with the trainer, so only
its growth says something.
"""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

from asyncloader.machine import anonymous_bytes, private_bytes

_LOOK_S = 1.0
_SHARE = 100
"""At most one part in so many of the time goes into looking: the kernel goes through all pages."""
_STEPS = 16
"""A worker that has a bound looks whenever it has grown by one part in so many of that."""


class PrivateBytes:
    """The private memory of the calling process, as of a look that is not much older than a second.

    Args:
        folder: The folder of the process in /proc.
        bound: What the process may have; None if it has no bound.
    """

    def __init__(self, folder: Path = Path("/proc/self"), bound: int | None = None) -> None:
        self._folder = folder
        self._step = None if bound is None else bound // _STEPS
        self._look_at = 0  # anonymous memory at which a process with a bound looks
        self._bytes = 0
        self._due = 0.0

    def take(self, now: float) -> int:
        """Return the bytes.

        Without a bound, 0 in the first second, in which other workers are started and first batches are waited for.

        Args:
            now: On `time.perf_counter`, seconds.
        """
        if self._step is not None and (anonymous := anonymous_bytes(self._folder) or 0) >= self._look_at:
            self._look(now)
            self._look_at = anonymous + self._step
        elif not self._due:
            self._due = now + _LOOK_S
        elif now >= self._due:
            self._look(now)
        return self._bytes

    def _look(self, now: float) -> None:
        self._bytes = private_bytes(self._folder) or 0
        self._due = now + max(_LOOK_S, _SHARE * (perf_counter() - now))
