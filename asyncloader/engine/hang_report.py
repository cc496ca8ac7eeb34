"""Say in the log what a batch waits for that has not come for long.

`HangWatch` decides when a wait is spoken of, without a loop or a clock; `report` speaks. A timer of the engine looks at
the consumers.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from asyncloader.backends.backend import Backend
from asyncloader.engine.arrivals import FIRST_S
from asyncloader.engine.run import Run
from asyncloader.errors import describe_batch

log = logging.getLogger("asyncloader")

LOOK_S = 15.0
"""How often consumers are looked at. Seconds."""

_TIMES = 20
"""Nor is one that is shorter than so many times the work of the slowest batch."""

_FORKED = (
    " The worker was forked: a lock that another thread of this process held then stays locked there for ever, and a "
    "library's threads are not there. If the stack is in such a library, use "
    'DataLoader(..., multiprocessing_context="forkserver").'
)


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
            Once in a wait that has become too long: for how many seconds it has been looked at. Otherwise None.
        """
        unseen_s, self._looked_at = max(0.0, now - self._looked_at - LOOK_S), now
        self._slowest_s = max(self._slowest_s, slowest_s)
        is_same = taken == self._taken
        self._taken = taken
        if not is_waiting:
            self._since = None
        elif self._since is None or not is_same:
            self._since, self._is_reported = now, False
        else:
            self._since += unseen_s
            if not self._is_reported and now - self._since >= self.bound_s:
                self._is_reported = True
                self._reports += 1
                return now - self._since
        return None


def report(run: Run, pool: Backend[Any], waited_s: float) -> None:
    """Say what a run has waited for, and where the worker is that has it. On the loop thread."""
    waited = f"The trainer has waited {waited_s:.0f} s for a batch that has not come."
    ticket = run.scheduler.awaited()
    worker = None if ticket is None else pool.processes.get(ticket.worker)
    if ticket is None or worker is None:
        why = "it waits for a worker, or it is being joined or pinned"
        if not run.awaits_keys or (why := run.plan.why_no_keys(in_vain=True)):
            log.warning("%s No worker has it: %s.", waited, why)
        return
    told = f"{waited} {describe_batch(run.named(ticket).keys, worker.worker_id, worker.pid)}"
    worker.ask_stack(ticket.batch, partial(_tell, told + _FORKED * worker.was_forked))


def _tell(told: str, stack: str) -> None:
    log.warning("%s %s", told, f"It is at:\n{stack}" if stack else "It does not tell where it is.")
