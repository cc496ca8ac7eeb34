"""Whether a thread gets the cores that it could use."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

_EVERY_S = 0.1


class Stalls:
    """How long the calling thread was ready to run while its cores were given to others. Linux; elsewhere 0.

    The kernel's figure is read at most every 0.1 s, when nobody waits for the caller: it takes 20 to 100 us.

    Attributes:
        due_at: When it is looked at again; `take` returns 0.0 before. On `time.perf_counter`, seconds.
    """

    def __init__(self) -> None:
        self._file = Path("/proc/thread-self/schedstat")
        self.due_at = perf_counter() + _EVERY_S
        self._total_s = self._read()

    def take(self, now: float) -> float:
        """Return the seconds that came to light since the last call.

        Args:
            now: On `time.perf_counter`, seconds.
        """
        if now < self.due_at:
            return 0.0
        self.due_at = now + _EVERY_S
        before, self._total_s = self._total_s, self._read()
        return self._total_s - before

    def _read(self) -> float:
        try:
            return int(self._file.read_text().split()[1]) * 1e-9
        except (OSError, IndexError, ValueError):
            return 0.0
