"""How much memory a worker has to itself, as it tells with each batch.

/proc/self/smaps_rollup ── at most once a second, between two batches ──> PrivateBytes ──> Record
"""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

from asyncloader.machine import private_bytes

_LOOK_S = 1.0
_SHARE = 100
"""At most one part in so many of the time goes into looking: the kernel goes through all pages."""


class PrivateBytes:
    """The private memory of the calling process, as of a look that is not much older than a second.

    Args:
        folder: The folder of the process in /proc.
    """

    def __init__(self, folder: Path = Path("/proc/self")) -> None:
        self._folder = folder
        self._bytes = 0
        self._due = 0.0

    def take(self, now: float) -> int:
        """Return the bytes; 0 in the first second, in which other workers are started and first batches are waited for.

        Args:
            now: On `time.perf_counter`, seconds.
        """
        if not self._due:
            self._due = now + _LOOK_S
        elif now >= self._due:
            self._bytes = private_bytes(self._folder) or 0
            self._due = now + max(_LOOK_S, _SHARE * (perf_counter() - now))
        return self._bytes
