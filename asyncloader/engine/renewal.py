"""Decide which worker is renewed, and when: another process takes the place of one that has made enough, or has grown.

    made ─────────> ┌─────────┐ ──> Renew(worker)     start a successor, under the same id
    ready, idle ──> │ Renewal │ ──> Succeed(worker)   the successor is in its place, and gets what has waited
    failed, stop ─> └─────────┘ ──> Abandon(worker)   the successor goes, and everything is as it was

No loop, no clock, no process is touched: events come in as method calls, decisions go out as actions, which the
supervisor carries out. The scheduler does not know of it: a worker id keeps its tickets, its turn and its place, and at
each moment one process has all of the tickets that were sent to it. So one that dies meanwhile is like any other that
dies.

One at a time. With the same number of batches all would be due in the same round; so never more than one process is
there beside the workers, and starting them does not take the cores from those who work. Who became due first is first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from asyncloader.engine.actions import Abandon, Action, Renew, Succeed
from asyncloader.observe.memory_watch import show_bytes

log = logging.getLogger("asyncloader")

_LATE_S = 300.0
"""A successor that has not opened the dataset after this time is not waited for any more. Seconds."""

_FIRST_PATIENCE_S = 1.0
_LONGEST_PATIENCE_S = 300.0
"""After a successor that could not be had, none is started for so long; each time for twice as long."""


class _Life:
    """What one process has done so far under its worker id."""

    __slots__ = ("batches", "bound", "private_bytes")

    def __init__(self) -> None:
        self.batches = 0
        self.private_bytes = 0
        self.bound = 0  # of its memory; 0 until it is known what it takes


class Renewal:
    """Who is renewed. Called from the loop thread only.

    Args:
        max_tasks: Batches after which a worker is renewed; None for any number.
        max_bytes: Bytes that a worker may have to itself; None for any number.

    Attributes:
        worker: Who is being renewed, or None.
        is_holding: Its successor is ready, and it finishes what it has in hand.
    """

    def __init__(self, max_tasks: int | None, max_bytes: int | None) -> None:
        self.worker: int | None = None
        self.is_holding = False
        self._max_tasks = max_tasks
        self._max_bytes = max_bytes
        self._lives: dict[int, _Life] = {}
        self._due: dict[int, None] = {}  # in the order in which they became so
        self._began = 0.0
        self._retry_at = 0.0
        self._patience_s = _FIRST_PATIENCE_S
        self._is_told = False

    def __repr__(self) -> str:
        return f"<Renewal of {self.worker}{' (it finishes)' * self.is_holding}, due: {[*self._due]}>"

    # ------------------------------------------------------------------------------------------------------ events

    def born(self, worker: int) -> None:
        """A worker has a process that has made nothing yet. For whatever reason: a renewal of it is over."""
        self._lives.pop(worker, None)
        self._due.pop(worker, None)
        self._over(worker)

    def lost(self, worker: int) -> None:
        """A worker's process is gone, and another, its successor if there is one, will take its place."""
        self._due.pop(worker, None)
        self._over(worker)

    def made(self, worker: int, private_bytes: int) -> bool:
        """A worker has come to an outcome; return whether there is anything to decide.

        Args:
            worker: Who.
            private_bytes: That it has to itself; 0 if that is not known.
        """
        if (life := self._lives.get(worker)) is None:
            life = self._lives[worker] = _Life()
        life.batches += 1
        life.private_bytes = private_bytes
        if (self._max_tasks is not None and life.batches >= self._max_tasks) or (
            self._max_bytes is not None and private_bytes and self._has_grown(life, self._max_bytes)
        ):
            self._due.setdefault(worker)
        return bool(self._due) or self.worker is not None

    def next(self, now: float, may: Callable[[int], bool]) -> list[Action]:
        """Return what is to be done now, if anything is.

        Args:
            now: Seconds, on any clock.
            may: Tells whether a worker can be renewed now; if not, it is due again when it has made another batch.
        """
        if self.worker is not None:
            is_late = not self.is_holding and now - self._began > _LATE_S
            return self.failed(self.worker, now) if is_late else []
        while self._due and now >= self._retry_at:
            worker = next(iter(self._due))
            del self._due[worker]
            if may(worker):
                self.worker, self._began = worker, now
                life = self._lives[worker]
                taken = f", and has {show_bytes(life.private_bytes)} to itself" * bool(life.private_bytes)
                log.info("worker %d is renewed: it has made %d batches%s", worker, life.batches, taken)
                return [Renew(worker)]
        return []

    def ready(self, worker: int) -> bool:
        """The worker's successor has opened the dataset; return whether what is for the worker is to wait from now on.

        It finishes what it has in hand.
        """
        is_first = worker == self.worker and not self.is_holding
        self.is_holding |= is_first
        return is_first

    def idle(self) -> list[Action]:
        """Who is being renewed has nothing in hand."""
        if (worker := self.worker) is None or not self.is_holding:
            return []
        self.born(worker)
        self._patience_s = _FIRST_PATIENCE_S
        return [Succeed(worker)]

    def failed(self, worker: int, now: float) -> list[Action]:
        """The worker's successor cannot be had: it goes on itself, and is due again later."""
        if worker != self.worker:
            return []
        self._retry_at = now + self._patience_s
        self._patience_s = min(2 * self._patience_s, _LONGEST_PATIENCE_S)
        return self.stop(worker)

    def stop(self, worker: int) -> list[Action]:
        """The worker is not to be renewed, if it is: it leaves."""
        if worker != self.worker:
            return []
        self._over(worker)
        return [Abandon(worker)]

    # --------------------------------------------------------------------------------------------------- decisions

    def _over(self, worker: int) -> None:
        if worker == self.worker:
            self.worker, self.is_holding = None, False

    def _has_grown(self, life: _Life, bound: int) -> bool:
        """Whether a worker has more than it may have. What it needs from the beginning another one would need too."""
        if not life.bound:
            life.bound = bound if life.private_bytes <= bound else 2 * life.private_bytes
            if life.bound > bound and not self._is_told:
                self._is_told = True
                log.warning(
                    "max_worker_memory is %s, and a worker takes %s when it has made %d batches: to renew it then "
                    "might be for nothing. It is renewed when it has come to twice that.",
                    show_bytes(bound),
                    show_bytes(life.private_bytes),
                    life.batches,
                )
        return life.private_bytes > life.bound
