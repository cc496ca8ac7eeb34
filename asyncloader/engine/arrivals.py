"""Whether the next keys of a plan are there, or are waited for: asked by whoever reads it, with workers and without.

A run is told in whichever thread brings the keys, perhaps before the question is answered. So that it waits is noted
before it asks, and looked at again afterwards.
"""

from __future__ import annotations

from typing import Any

from asyncloader.weak import while_alive


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
        self.are_awaited = False
        self.plan = plan if getattr(plan, "arrives", False) else None
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
