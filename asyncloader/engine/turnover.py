"""Carry out the renewal of workers: start successors, have what is for a worker wait, put others in places.

    staff ── made, begin, lost, leaves ──> Turnover ── events ──> Renewal decides
    pool ─── successor: ready, or gone ──────┘  └──> Renewable.renew, succeed, abandon; held

A worker that is held is sent nothing; the session's outbox keeps what is for it.
"""

from __future__ import annotations

import logging
from functools import partial
from time import perf_counter
from typing import Any, Protocol

from asyncloader.engine.actions import Abandon, Action, Hold, Renew, Succeed
from asyncloader.engine.renewal import Renewal
from asyncloader.engine.run import Run
from asyncloader.errors import describe_death, last_words
from asyncloader.workers.backend import Renewable, Worker
from asyncloader.workers.child.guarded_loop import GuardedLoop

log = logging.getLogger("asyncloader")


class Session(Protocol):
    """What a turnover needs of it."""

    run: Run

    @property
    def takes_outcomes(self) -> bool:
        """Whether somebody waits for what workers make."""

    @property
    def num_workers(self) -> int:
        """How many workers there are to be."""

    def flush(self) -> None:
        """Give workers their tickets."""


class Turnover:
    """Owner of what is between a worker and its successor. On the loop thread.

    No session is kept: each method is given it, for it would be a cycle.

    Args:
        loop: The portal's.
        pool: The workers.
        renewal: Decides.
        grace_s: A process whose place was taken is killed after so many seconds.

    Attributes:
        held: Workers whose tickets are not sent now.
    """

    def __init__(self, loop: GuardedLoop, pool: Renewable, renewal: Renewal, *, grace_s: float) -> None:
        self.held: set[int] = set()
        self._loop = loop
        self._pool = pool
        self._renewal = renewal
        self._grace_s = grace_s

    def made(self, session: Session, worker: int, private_bytes: int, now: float) -> None:
        """A worker has come to an outcome."""
        if self._renewal.made(worker, private_bytes):
            self._look(session, now)

    def begin(self, session: Session) -> None:
        """A run has begun: nobody has anything in hand."""
        self._look(session, perf_counter(), begins=True)

    def born(self, worker: int) -> None:
        """A worker has another process."""
        self._renewal.born(worker)

    def lost(self, worker: int) -> None:
        """A worker's process is gone. What it had is given anew; what was not sent yet as well."""
        self._renewal.lost(worker)
        self.held.discard(worker)

    def leaves(self, session: Session, worker: int) -> None:
        """A worker is to leave."""
        self._do(session, self._renewal.stop(worker))

    def on_successor(self, session: Session, worker: int, successor: Worker) -> None:
        """The successor of a worker has opened the dataset, or ended; or the worker has nothing in hand."""
        if not successor.is_alive:
            self._failed(
                session, worker, describe_death(successor.pid, successor.exitcode) + last_words(successor.output)
            )
        elif successor.is_ready:
            self._do(session, self._renewal.ready(worker))
            self._look(session, perf_counter())

    def _failed(self, session: Session, worker: int, why: str) -> None:
        log.warning("Worker %d could not be renewed, and goes on: %s", worker, why)
        self._do(session, self._renewal.failed(worker, perf_counter()))

    # -------------------------------------------------------------------------------------------------- carrying out

    def _look(self, session: Session, now: float, *, begins: bool = False) -> None:
        renewal, run = self._renewal, session.run
        if renewal.is_holding and renewal.worker is not None and self._pool.is_idle(renewal.worker):
            self._do(session, renewal.idle())
        if begins or renewal.worker is not None or not run.plan_ended:  # for what is left now nobody is started
            self._do(session, renewal.next(now, partial(self._may, session)))

    def _may(self, session: Session, worker: int) -> bool:
        """Whether a worker is there that will get tickets, and nobody is just being started."""
        roster, places = session.run.scheduler.roster, self._pool.processes
        is_there = roster.takes(worker) and not roster.is_held(worker) and worker in places
        return is_there and len(places) >= session.num_workers and all(place.is_ready for place in places.values())

    def _do(self, session: Session, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Renew(worker):
                    self._loop.call_soon(self._start, session, worker)  # a fork holds up the loop
                case Hold(worker):
                    self.held.add(worker)
                case Succeed(worker):
                    self._pool.succeed(worker, self._grace_s)
                    session.run.meter.renewed(worker)
                    self._release(session, worker)
                case Abandon(worker):
                    self._pool.abandon(worker, self._grace_s)
                    self._release(session, worker)

    def _release(self, session: Session, worker: int) -> None:
        self.held.discard(worker)
        session.flush()

    def _start(self, session: Any, worker: int) -> None:
        if not session.takes_outcomes or self._renewal.worker != worker:  # it has left meanwhile, or died
            return
        try:
            self._pool.renew(worker, session.num_workers)
        except Exception as error:
            self._failed(session, worker, str(error))
