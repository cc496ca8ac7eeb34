"""The workers of a session: who is there, who is replaced, who comes and who goes.

    session ── died, ready, resize, run begun, actions ──> Staff ──> Backend.add, dismiss, discard
                                                             ├ Controller looks how many are worth it
                                                             ├ Turnover renews those that have made enough
                                                             ├ Recovery decides about those that were lost
                                                             └ Crew decides who comes and goes

What follows for tickets the scheduler decides: the session is given the actions for it.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple, Protocol

from asyncloader.engine.actions import Dismiss, Join, Lose, Part, Postpone, Replace, Start
from asyncloader.engine.controller import Controller
from asyncloader.engine.crew import Crew
from asyncloader.engine.recovery import Policy, Recovery
from asyncloader.engine.run import Run
from asyncloader.engine.turnover import Turnover
from asyncloader.errors import describe_death, last_words
from asyncloader.machine import available_bytes, total_bytes
from asyncloader.observe.memory_watch import LOOK_S, MemoryWatch
from asyncloader.workers.backend import Backend, Elastic, Worker
from asyncloader.workers.child.guarded_loop import GuardedLoop

log = logging.getLogger("asyncloader")

END_GRACE_S = 3.0
"""Workers that were told to end get this long, then they are killed. Seconds."""


_WORKER_BYTES = 256 << 20
"""One more worker is started on its own account only where so much memory is left for it, or what the largest takes."""


class Auto(NamedTuple):
    """A number of workers that looks after itself.

    Attributes:
        controller: Decides.
        tell: Is told of it: how many there are to be on this machine, and on others.
        elastic: The workers, if there may be some on other machines; or None.
    """

    controller: Controller
    tell: Callable[[int, int], None]
    elastic: Elastic | None = None


class Session(Protocol):
    """What the staff needs of it."""

    run: Run

    @property
    def takes_outcomes(self) -> bool:
        """Whether somebody waits for what workers make."""

    @property
    def num_workers(self) -> int:
        """How many workers there are to be."""

    def apply(self, actions: Any) -> None:
        """Carry out what was decided."""

    def flush(self) -> None:
        """Give workers their tickets."""

    def drop(self, worker: int) -> list[int]:
        """Forget the tickets of a worker that were not sent, and return their numbers."""


class Staff:
    """Owner of the places of workers, from run to run. On the loop thread.

    No session is kept: each method is given it, for it would be a cycle.

    Args:
        loop: The portal's.
        pool: The workers.
        policy: What can be done about workers that are lost.
        num_workers: How many there are at the beginning.
        auto: Looks after their number, or None.
        turnover: Renews them, or None.
        first_elsewhere: From this id on workers are on other machines.

    Attributes:
        due: When `look` is worth calling again; on the clock of outcomes.
        is_stream: The dataset is iterable.
    """

    def __init__(
        self,
        loop: GuardedLoop,
        pool: Backend,
        policy: Policy,
        num_workers: int,
        auto: Auto | None = None,
        turnover: Turnover | None = None,
        first_elsewhere: int = sys.maxsize,
    ) -> None:
        self.auto = auto
        self.turnover = turnover
        self.due = 0.0
        self.is_stream = policy.is_stream
        self._stays = policy.stays
        self.recovery = Recovery(policy, num_workers)
        self.crew = Crew(num_workers, first_elsewhere)
        self._loop = loop
        self._pool = pool
        self._to_start: deque[int] = deque()
        self._rests: dict[int, asyncio.TimerHandle] = {}  # of workers that get their next process later
        # Workers whose dataset was put in the middle of its data, and has not read on: the next run would begin there.
        self._unmoved: set[int] = set()
        self._is_put_back = policy.has_initial_state
        self._watch = MemoryWatch()
        self._watch_due = perf_counter() + LOOK_S

    # ---------------------------------------------------------------------------------------------------- events

    def begin(self, session: Session) -> None:
        """A run has begun with workers that are there: fill places, and have those go that are not wanted."""
        unmoved, self._unmoved = self._unmoved, set()
        for worker in unmoved & self._pool.processes.keys():
            self._pool.discard(worker)
        for worker in self._pool.processes:
            self._note_node(session, worker)
        for worker in self.stop() | unmoved:
            if (process := self._pool.processes.get(worker)) is not None:
                session.apply(self.recovery.fill(process, session.run.start_of(worker)))
            elif session.run.scheduler.roster.takes(worker):
                session.apply([Replace(worker)])
        if self.auto is not None:
            self.auto.controller.begin()
        self.due = 0.0
        self.settle(session)
        if self.turnover is not None:
            self.turnover.begin(session)

    def stop(self) -> set[int]:
        """Replace nobody any more in this run; return who has no process."""
        resting = set(self._rests)
        for timer in self._rests.values():
            timer.cancel()
        self._rests.clear()
        return resting | self.recovery.stop()

    def note_start(self, run: Run, worker: int) -> None:
        """Note where a worker begins."""
        if self._is_put_back and run.tracks[worker].start.snapshot is not None:
            self._unmoved.add(worker)

    def moved(self, worker: int) -> None:
        """A worker has read on."""
        self._unmoved.discard(worker)

    def ready(self, session: Session, worker: int) -> None:
        """A worker has opened the dataset."""
        self.recovery.ready()
        self._note_node(session, worker)
        if self.turnover is not None and worker not in session.run.scheduler.active:
            self.turnover.born(worker)  # its id may have been another's
        if session.takes_outcomes:
            session.apply(self.crew.ready(worker, session.run.scheduler.roster))

    def died(self, session: Session, worker: int, process: Worker) -> None:
        """A worker's process ended on its own."""
        run = session.run
        is_active = worker in run.scheduler.active
        if not is_active and self.crew.is_coming(worker):
            self._not_joined(
                session, worker, describe_death(process.pid, process.exitcode) + last_words(process.output)
            )
        else:
            session.apply(self.recovery.died(process, run.start_of(worker), is_active=is_active))

    def left(self, session: Session, worker: int) -> None:
        """A worker wants to go."""
        if self._stays:
            if session.takes_outcomes and worker in session.run.scheduler.active:
                session.apply(self.recovery.leaves(self._pool.processes[worker], session.run.start_of(worker)))
            return
        self.crew.gone(worker)
        if session.takes_outcomes:
            session.apply(self.crew.let_go(worker, session.run.scheduler.roster))

    def lost(self, session: Session, worker: int) -> None:
        """A worker has gone, and nothing that it was at is to blame."""
        self._leaves(session, worker)
        self.crew.gone(worker)
        if (timer := self._rests.pop(worker, None)) is not None:
            timer.cancel()
        session.drop(worker)
        if session.takes_outcomes:
            session.apply(session.run.scheduler.lost(worker))

    def resize(self, session: Session, num_workers: int, elsewhere: int | None = None) -> None:
        """Have so many workers on this machine from now on, and on others.

        Args:
            session: Theirs.
            num_workers: Here.
            elsewhere: On other machines; None for as many as the user says.
        """
        auto = self.auto
        if elsewhere is None:
            self.auto = None  # from now on nobody looks after it
        if auto is not None and auto.elastic is not None:
            auto.elastic.want(elsewhere)
        self.crew.resize(num_workers)
        self.recovery.num_workers = num_workers + (elsewhere or 0)
        self.settle(session)

    def look(self, session: Session, now: float) -> None:
        """See whether memory runs out, and have as many workers as are worth it, if that looks after itself."""
        if now >= self._watch_due:
            self._watch_due = now + LOOK_S
            if words := self._watch.look(session.run.meter.private_bytes()):
                log.warning("%s", words)
        self.due = self._watch_due
        if (auto := self.auto) is not None:
            if now >= auto.controller.due:
                self._look_how_many(session, auto, now)
            self.due = min(self.due, auto.controller.due)

    def _look_how_many(self, session: Session, auto: Auto, now: float) -> None:
        controller, roster = auto.controller, session.run.scheduler.roster
        here, elsewhere = controller.here, controller.elsewhere
        meter = session.run.meter
        controller.observe(meter.load(now, roster.num_takers))
        if (more := controller.here - here) > 0:
            each, room = max([_WORKER_BYTES, *meter.private_bytes().values()]), available_bytes() - total_bytes() // 20
            if room < more * each:
                controller.limit(here + max(0, room // each))
        wanted = controller.here, controller.elsewhere
        if wanted != (here, elsewhere):
            log.info('num_workers="auto": %d in place of %d: %s', sum(wanted), here + elsewhere, controller.reason)
            self.resize(session, *wanted)
            auto.tell(*wanted)

    def settle(self, session: Session) -> None:
        """Have those come and go who should."""
        if session.takes_outcomes:
            session.apply(self.crew.settle(session.run.scheduler.roster, self._pool.processes))

    # --------------------------------------------------------------------------------------------------- actions

    def replace(self, session: Session, action: Replace) -> None:
        """Put another in the place of one that was lost."""
        run, worker = session.run, action.worker
        if not session.takes_outcomes:
            return
        if run.epoch.starts is not None:
            run.epoch.starts[worker] = run.tracks[worker].start
            self.note_start(run, worker)
        if self._launch(session, worker):
            run.faults.replacements += 1

    def _launch(self, session: Session, worker: int) -> bool:
        """Start a process under this id, now or, if the system has no room for it, later; whether it is there."""
        try:
            self._pool.add(worker, len(self.crew.members))
        except Exception as error:
            self._loop.call_soon(self._not_launched, session, worker, error)  # after what else was decided with this
            return False
        self.recovery.launched()
        if self.turnover is not None:
            self.turnover.born(worker)
        return True

    def _not_launched(self, session: Session, worker: int, error: Exception) -> None:
        if not session.takes_outcomes or worker in self._pool.processes:
            return
        roster = session.run.scheduler.roster
        others = any(process.is_alive and roster.takes(other) for other, process in self._pool.processes.items())
        session.apply(self.recovery.not_launched(worker, error, is_needed=worker in roster.active and not others))

    def postpone(self, session: Session, action: Postpone) -> None:
        """Go on without a worker that there is no room for now."""
        worker = action.worker
        if self.turnover is not None:
            self.turnover.lost(worker)
        session.drop(worker)
        session.apply(session.run.scheduler.lost(worker))
        if worker in self.crew.members:
            self.crew.comes_later(worker)
            self._rests[worker] = self._loop.call_later(action.rest_s, self._start_postponed, session, worker)

    def _start_postponed(self, session: Session, worker: int) -> None:
        del self._rests[worker]
        self.start(session, Start(worker))

    def lose(self, session: Session, action: Lose) -> None:
        """Tell the scheduler of a worker that was lost; another comes at once, or later."""
        run, worker = session.run, action.worker
        rests = action.rest_s > 0 and run.scheduler.roster.takes(worker)  # who leaves has no successor
        run.lost(worker)
        unsent = session.drop(worker)  # what was for its successor
        if self.turnover is not None:
            self.turnover.lost(worker)
        if rests:
            self._rests[worker] = self._loop.call_later(action.rest_s, self._end_rest, session, worker)
        facts: dict[str, Any] = {"rests": rests, "unsent": unsent}
        if action.hung:
            run.faults.timeouts += 1
            session.apply(run.scheduler.hung(worker, action.cause, **facts))
        else:
            facts |= {"replaceable": action.replaceable, "was_ready": action.was_ready}
            session.apply(run.scheduler.died(worker, action.cause, **facts))

    def _end_rest(self, session: Session, worker: int) -> None:
        del self._rests[worker]
        session.apply([Replace(worker)])
        session.apply(session.run.scheduler.rested(worker))

    def start(self, session: Session, action: Start) -> None:
        """Start one more worker; one in each turn of the loop, which a fork holds up."""
        self._to_start.append(action.worker)
        if len(self._to_start) == 1:
            self._loop.call_soon(self._start_next, session)

    def _start_next(self, session: Session) -> None:
        worker = self._to_start.popleft()
        # Meanwhile it may not be wanted any more.
        if session.takes_outcomes and worker in self.crew.members and worker not in self._pool.processes:
            self._launch(session, worker)
            session.flush()  # a run may have begun with it
        if self._to_start:
            self._loop.call_soon(self._start_next, session)

    def _not_joined(self, session: Session, worker: int, why: str) -> None:
        """Go on without a worker that was to join: it has nothing that others could not do."""
        log.warning("One more worker could not be had, and the others go on without it: %s", why)
        self.crew.gone(worker)
        self._pool.dismiss(worker, 0.0)
        session.drop(worker)
        session.apply(session.run.scheduler.lost(worker))

    def join(self, session: Session, action: Join) -> None:
        """Have a worker take tickets."""
        self._note_node(session, action.worker)
        session.apply(session.run.scheduler.joined(action.worker))

    def _note_node(self, session: Session, worker: int) -> None:
        """Note for the statistics on which machine a worker is."""
        process = self._pool.processes.get(worker)
        session.run.meter.joined(worker, "" if process is None else process.node)

    def part(self, session: Session, action: Part) -> None:
        """Have a worker leave; one that was not started yet leaves what it was to get."""
        scheduler, worker = session.run.scheduler, action.worker
        self._leaves(session, worker)
        if worker in self._pool.processes:
            session.apply(scheduler.left(worker))
        else:
            session.drop(worker)
            session.apply(scheduler.lost(worker))

    def dismiss(self, session: Session, action: Dismiss) -> None:
        """Let a worker go that has nothing in hand."""
        if (timer := self._rests.pop(action.worker, None)) is not None:
            timer.cancel()
        self._leaves(session, action.worker)
        self._pool.dismiss(action.worker, END_GRACE_S)

    def _leaves(self, session: Session, worker: int) -> None:
        """See that a worker that is to go is not renewed."""
        if self.turnover is not None:
            self.turnover.leaves(session, worker)
