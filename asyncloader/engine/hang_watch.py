"""Decide when a consumer has waited so long for one batch that something is to be said of it.

No loop and no clock: whoever looks every `LOOK_S` tells the time. A batch costs nothing here.
"""

from __future__ import annotations

LOOK_S = 15.0
"""How often consumers are looked at. Seconds."""

FIRST_S = 60.0
"""A shorter wait is never spoken of. Seconds."""

_TIMES = 20
"""Nor is one that is shorter than so many times the work of the slowest batch."""


class HangWatch:
    """The wait of consumers for the next batch, from look to look.

    A wait that was spoken of doubles the bound for the next one: a loader whose batches take long to arrive, and always
    did, is not spoken of at each of them.
    """

    def __init__(self) -> None:
        self._taken = -1
        self._since: float | None = None
        self._looked_at = 0.0
        self._slowest_s = 0.0
        self._reports = 0
        self._is_reported = False

    @property
    def bound_s(self) -> float:
        """A wait as long as this is to be spoken of. Seconds."""
        return float(max(FIRST_S, _TIMES * self._slowest_s) * 2**self._reports)

    def look(self, now: float, taken: int, *, is_waiting: bool, slowest_s: float) -> float | None:
        """Look at the consumers.

        Time in which nobody looked does not count: this process was stopped, and its workers with it perhaps.

        Args:
            now: Seconds, of any clock.
            taken: Batches that consumers have taken.
            is_waiting: Some consumer waits at this moment.
            slowest_s: The work of the slowest batch so far. Seconds.

        Returns:
            How long the present wait has been looked at, in seconds: 0.0 at the first look. None if nobody waits.
        """
        unseen_s, self._looked_at = max(0.0, now - self._looked_at - LOOK_S), now
        self._slowest_s = max(self._slowest_s, slowest_s)
        is_same = taken == self._taken
        self._taken = taken
        if not is_waiting:
            self._since = None
            return None
        if self._since is None or not is_same:
            self._since, self._is_reported = now, False
        else:
            self._since += unseen_s
        return now - self._since

    def is_due(self, waited_s: float) -> bool:
        """Return, once in a wait, that it has become too long.

        Args:
            waited_s: What `look` has returned.
        """
        if self._is_reported or waited_s < self.bound_s:
            return False
        self._is_reported = True
        self._reports += 1
        return True
