"""Whether the next keys of a plan are there, or are waited for: asked by whoever reads it, with workers and without.

A run is told in whichever thread brings the keys, perhaps before the question is answered. So that it waits is noted
before it asks, and looked at again afterwards.
"""

from __future__ import annotations

import math
from time import monotonic
from typing import Any

from asyncloader.errors import timed_out
from asyncloader.log import log
from asyncloader.weak import while_alive

FIRST_S = 60.0
"""A shorter wait is never spoken of. Seconds."""


class Arrivals:
    """The keys that one run waits for. With the lock of its progress held.

    Args:
        run: Its `keys_came` is called when they have come. Not kept alive by that.
        plan: An iterator over keys; a `Plan` says whether its keys arrive as time goes by.

    Attributes:
        plan: Whose keys arrive; None if they are always there.
        are_awaited: The run has asked, and was not told yet; it sets this back when it is.
    """

    def __init__(self, run: Any, plan: Any) -> None:
        self.are_awaited: bool = False
        self.plan: Any | None = plan if getattr(plan, "arrives", False) else None
        self._tell = while_alive(run.keys_came, None)

    def leave(self) -> None:
        """Ask for no more keys. In any thread."""
        if self.plan is not None:
            self.plan.leave()

    def must_wait(self) -> bool:
        """Whether the next keys are still to arrive. Then the run is told of them: perhaps in here already."""
        while self.plan is not None and not self.are_awaited:
            has_come = self.are_awaited = True
            try:
                has_come = not self.plan.awaits(self._tell)
            finally:
                if has_come:
                    self.are_awaited = False
            if has_come:
                return False
        return self.are_awaited


class KeyWait:
    """How long a run without workers waits for its next keys. With workers the engine looks after that.

    Args:
        plan: Its keys are waited for.
        timeout_s: A longer wait is an error; 0 for no limit. Seconds.

    Attributes:
        deadline: When it has to be looked at, on the clock of `time.monotonic`. Seconds.
    """

    deadline: float

    def __init__(self, plan: Any, timeout_s: float) -> None:
        self._plan, self._timeout_s = plan, timeout_s
        self._silent_s = FIRST_S
        self.begin()

    def begin(self) -> None:
        """Note that a wait begins."""
        self._began = monotonic()
        self._ends_at = self._began + (self._timeout_s or math.inf)
        self._tells_at = self._began + self._silent_s
        self.deadline = min(self._ends_at, self._tells_at)

    def look(self) -> None:
        """Raise at the limit; otherwise tell the log, in longer and longer intervals, of a wait that may be in vain.

        Raises:
            BatchTimeoutError: at the limit. The next call waits for the same keys.
        """
        now = monotonic()
        if now >= self._ends_at:
            raise timed_out(self._timeout_s, why=late_keys(self._plan))
        if why := self._plan.why_no_keys(in_vain=True):
            self._silent_s *= 2
            log.warning("The trainer has waited %.0f s for a batch that has not come: %s.", now - self._began, why)
        self._tells_at = now + self._silent_s
        self.deadline = min(self._ends_at, self._tells_at)


def late_keys(plan: Any) -> str:
    """Say that the keys of a plan have not arrived, and what they wait for, if that is known."""
    return ": ".join(filter(None, ("its keys have not arrived", plan.why_no_keys(in_vain=False))))
