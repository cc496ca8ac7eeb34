"""The workers of a session: hears of them, and starts, replaces, renews and ends them, as others decide.

    Backend ── on_ready, on_outcome, on_died, ... ──> ┌────────────┐ ── add, dismiss, discard ──> Backend
    session ── actions, begin ──────────────────────> │ Supervisor │ ── receive, apply ─────────> session
    consumer ─ resize, overdue ─────────────────────> └────────────┘
                                                           ├ Workforce decides which come, go, and are renewed
                                                           ├ Recovery decides about those that died or hang
                                                           └ Controller decides how many are worth it

The scheduler decides about tickets, and the session is given the actions for it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic, perf_counter
from typing import NamedTuple, Protocol

from asyncloader.backends.backend import END_GRACE_S, Backend
from asyncloader.backends.worker import Worker
from asyncloader.engine.actions import (
    Action,
    Discard,
    Dismiss,
    GiveUp,
    Join,
    Leave,
    Postpone,
    Replace,
    Start,
    Ticket,
    Vacate,
)
from asyncloader.engine.controller import Controller
from asyncloader.engine.outbox import Outbox
from asyncloader.engine.recovery import Overdue, Recovery
from asyncloader.engine.run import Run
from asyncloader.engine.workforce import Workforce
from asyncloader.errors import BatchTimeoutError, WorkerStartError, describe_death, last_words, timed_out
from asyncloader.machine import available_bytes, total_bytes
from asyncloader.messages.outcome import Outcome
from asyncloader.options import Options
from asyncloader.worker.guarded_loop import GuardedLoop

log = logging.getLogger("asyncloader")

_LATE_S = 300.0
"""A process that has not opened the dataset after this time takes the place of no other. Seconds."""

_WORKER_BYTES = 256 << 20
"""One more worker is started on its own account only where so much memory is left for it, or what the largest takes."""


class Auto(NamedTuple):
    """A number of workers that looks after itself.

    Attributes:
        controller: Decides how many there are to be.
        tell: Is told how many there are to be.
    """

    controller: Controller
    tell: Callable[[int], None]


class CarriesOut(Protocol):
    """The session, as its supervisor sees it: it carries out what is decided for the run that is going on."""

    run: Run
    error: BaseException | None

    @property
    def takes_outcomes(self) -> bool:
        """Whether somebody waits for what workers make."""

    def receive(self, worker: int, outcome: Outcome, arrived_at: float) -> None:
        """Take the outcome of a ticket, which began to be read at this time."""

    def apply(self, actions: Sequence[Action]) -> None:
        """Carry out what was decided."""

    def flush(self) -> None:
        """Give workers their tickets."""

    def on_closed(self) -> None:
        """All workers are gone."""


class Supervisor:
    """Owner of the places of workers, from run to run, and listener of their backend. On the loop thread.

    Args:
        loop: The portal's.
        pool: The workers.
        options: The options of the workers.
        auto: Looks after their number, or None.

    Attributes:
        due: When it is worth looking at the workers again; on the clock of outcomes.
        outbox: Tickets on their way to workers.
    """

    def __init__(
        self,
        loop: GuardedLoop,
        pool: Backend,
        options: Options,
        auto: Auto | None = None,
    ) -> None:
        self.auto = auto
        self.due = 0.0
        self.recovery = Recovery(options)
        self.workforce = Workforce(options)
        self.outbox = Outbox(pool, self.workforce)
        self._loop = loop
        self._pool = pool
        self._spare: Worker | None = None  # for the place of the worker that is to be renewed
        self._to_start: deque[int] = deque()
        self._rests: dict[int, asyncio.TimerHandle] = {}  # of workers that get their next process later
        self._heard_at = perf_counter()  # when the last outcome of a worker came

    def attach(self, session: CarriesOut) -> None:
        """Look after the workers of this session."""
        self._session = weakref.ref(session)  # which has the supervisor

    @property
    def session(self) -> CarriesOut:
        """The session, which is there as long as its workers are."""
        session = self._session()
        assert session is not None
        return session

    @property
    def _is_at_work(self) -> bool:
        """Whether somebody waits for what workers make."""
        session = self._session()
        return session is not None and session.takes_outcomes

    # ---------------------------------------------------------------------------------------------------- events

    def begin_run(self) -> None:
        """A run has begun with workers that are there: fill places, and have those go that are not wanted."""
        run, processes = self.session.run, self._pool.processes
        without_process = {*self._rests, *self.recovery.take_vacant()}
        self.stop()
        for worker in without_process:
            if (process := processes.get(worker)) is not None:
                self.session.apply(self.recovery.fill(process, run.start_of(worker)))
            elif run.scheduler.roster.takes(worker):
                self.session.apply([Replace(worker)])
            elif self.workforce.is_coming(worker):
                self._start(worker)  # there was no room for it: it is not waited for any longer
        if self.auto is not None:
            self.auto.controller.begin_run()
        self.due = 0.0
        self._settle()
        self.look_at_renewal(perf_counter(), begins=True)

    def stop(self) -> None:
        """Replace nobody any more in this run."""
        for worker in tuple(self._rests):
            self._cancel_rest(worker)

    def on_outcome(self, worker: int, outcome: Outcome, arrived_at: float) -> None:
        """The outcome of a ticket has come, and began to be read at this time."""
        if not self._is_at_work:
            return
        self._heard_at = arrived_at
        self.recovery.reset()
        self.session.receive(worker, outcome, arrived_at)
        if self.workforce.made(worker, outcome.record.private_bytes):
            self.look_at_renewal(arrived_at)
        if arrived_at >= self.due:
            self._look(arrived_at)

    def on_ready(self, worker: int) -> None:
        """A worker has opened the dataset."""
        session, scheduler = self.session, self.session.run.scheduler
        self.recovery.ready()
        if worker not in scheduler.active:
            self.workforce.reset(worker)  # its id may have been another's
        if self._is_at_work:
            session.apply(self.workforce.ready(worker, scheduler.roster))

    def on_died(self, worker: int, process: Worker) -> None:
        """A worker's process ended on its own."""
        if not self._is_at_work:
            return
        run = self.session.run
        is_active = worker in run.scheduler.active
        if is_active or process.is_lost or not self.workforce.is_coming(worker):
            self.session.apply(self.recovery.died(process, run.start_of(worker), is_active=is_active))
            return
        why = describe_death(process.pid, process.exitcode) + last_words(process.output)
        log.warning("One more worker could not be had, and the others go on without it: %s", why)
        self.workforce.lose(worker)
        self._pool.dismiss(worker, 0.0)
        self._have_others_do(worker)
        if not self.workforce.members:  # a run that began without workers never gets one
            self.session.apply([GiveUp(WorkerStartError(f"No worker could be started. {why}"))])

    def on_prepared(self, worker: int) -> None:
        """The process that was prepared for the place of this worker has opened the dataset, or has ended."""
        if self._is_at_work:
            self.look_at_renewal(perf_counter())

    def on_failed(self, error: Exception) -> None:
        """No worker can be had any more."""
        if self._is_at_work:
            self.session.apply([GiveUp(error)])

    def on_closed(self) -> None:
        """All workers are gone."""
        self.session.on_closed()

    def overdue(self, timeout_s: float, tell: Callable[[BatchTimeoutError | None], None]) -> None:
        """Find out what the awaited batch waits for, and do about it what ``on_timeout`` says.

        Args:
            timeout_s: How long it was waited for. Seconds.
            tell: Is given the error to raise, or None if the batch, or its error, will come after all.
        """
        session, processes = self.session, self._pool.processes
        if session.error is not None:
            tell(None)
            return
        ticket = session.run.scheduler.awaited()
        process = None if ticket is None else processes.get(ticket.worker)
        if ticket is None or process is None:  # it waits for a worker that rests or comes, or is being pinned
            is_anybody_there = any(each.is_alive for each in processes.values())
            silent_s = perf_counter() - self._heard_at
            waits_on = bool(session.run.scheduler.resting) or self.recovery.waits_on(
                timeout_s, silent_s, is_anybody_there=is_anybody_there
            )
            why = "its keys have not arrived" if session.run.awaits_keys else ""
            tell(None if waits_on else timed_out(timeout_s, why=why))
            return
        process.ask_stack(ticket.batch, lambda stack: tell(self._on_stack(timeout_s, ticket, process, stack)))

    def _on_stack(self, timeout_s: float, ticket: Ticket, process: Worker, stack: str) -> BatchTimeoutError | None:
        run, worker = self.session.run, ticket.worker
        has_ticket = run.scheduler.in_flight.get(worker, {}).get(ticket.batch) is ticket
        is_there, age_s = self._pool.processes.get(worker) is process, monotonic() - process.started_at
        is_held = has_ticket and is_there
        found = Overdue(timeout_s, run.named(ticket), process, stack, age_s, is_held, self._is_at_work)
        decided = self.recovery.overdue(found, run.start_of(worker))
        if isinstance(decided, BatchTimeoutError):
            return decided
        self.session.apply(decided)
        return None

    def resize(self, num_workers: int) -> None:
        """Have so many workers from now on: nobody looks after their number any more."""
        self.auto = None
        self._want(num_workers)

    def _want(self, num_workers: int) -> None:
        self.workforce.want(num_workers)
        self.recovery.num_workers = num_workers
        self._settle()

    def _settle(self) -> None:
        if self._is_at_work:
            self.session.apply(self.workforce.settle(self.session.run.scheduler.roster, self._pool.processes))

    # ------------------------------------------------------------------------------------------- looking after them

    def _look(self, now: float) -> None:
        """Have as many workers as are worth it, if that looks after itself."""
        if (auto := self.auto) is None:
            self.due = math.inf
            return
        if now >= auto.controller.due:
            self._look_how_many(auto, now)
        self.due = auto.controller.due

    def _look_how_many(self, auto: Auto, now: float) -> None:
        controller, run, here = auto.controller, self.session.run, len(self.workforce.wanted)
        before = controller.num_workers
        stats = run.meter.stats()
        controller.observe(now, run.scheduler.roster.num_takers, stats)
        if (more := controller.num_workers - here) > 0:
            each = max([_WORKER_BYTES, *(worker.private_bytes for worker in stats.workers.each)])
            room = available_bytes() - total_bytes() // 20
            if room < more * each:
                controller.limit(here + max(0, room // each))
        if (wanted := controller.num_workers) != before:
            log.info('num_workers="auto": %d in place of %d: %s', wanted, before, controller.reason)
            self._want(wanted)
            auto.tell(wanted)

    def look_at_renewal(self, now: float, *, begins: bool = False) -> None:
        """See whether a worker is to be renewed, and how far that is.

        Args:
            now: Seconds.
            begins: A run has begun. Otherwise, what is left when the plan has ended is not worth a new process.
        """
        workforce, run = self.workforce, self.session.run
        if workforce.renewing is None:
            if begins or not run.plan_ended:
                workforce.choose(now, run.scheduler.roster, self._pool.processes)
            if (worker := workforce.renewing) is not None:
                self._spare = None
                self._loop.call_soon(self._prepare, worker)  # a fork holds up the loop: what has just come goes on
            return
        if (spare := self._spare) is not None and not workforce.is_finishing:
            if not spare.is_alive:
                self._not_renewed(describe_death(spare.pid, spare.exitcode) + last_words(spare.output))
            elif spare.is_ready:
                workforce.is_finishing = True
        if workforce.is_finishing and self._is_idle(workforce.renewing):
            self._loop.call_soon(self._renew, workforce.renewing)

    def _prepare(self, worker: int) -> None:
        """Start what is to take the place of a worker; some backends can do so only when the worker is idle."""
        workforce = self.workforce
        if worker != workforce.renewing:
            return
        if not self._is_at_work:
            workforce.cancel_renewal(worker)  # in the next run, the worker is due again with its next batch
            return
        try:
            self._spare = spare = self._pool.prepare(worker, len(workforce.members))
        except Exception as error:
            self._not_renewed(str(error))
        else:
            workforce.is_finishing = spare is None
            if spare is not None:  # the worker may have nothing to do, and no outcome would remind anybody
                self._loop.call_later(_LATE_S, _end_late, weakref.ref(spare))
            self.look_at_renewal(perf_counter())  # it may be idle, and would not be heard of again

    def _not_renewed(self, why: str) -> None:
        log.warning("Worker %d could not be renewed, and goes on: %s", self.workforce.renewing, why)
        self.workforce.not_renewed(perf_counter())
        self.session.flush()

    def _is_idle(self, worker: int) -> bool:
        """Whether a worker has answered all tickets that it was sent."""
        return len(self.session.run.scheduler.in_flight.get(worker, ())) == self.outbox.count(worker)

    def _renew(self, worker: int) -> None:
        """Put another process in the place of a worker, which finishes; if none can be had, the worker goes on."""
        workforce = self.workforce
        if worker != workforce.renewing or not (workforce.is_finishing and self._is_at_work and self._is_idle(worker)):
            return
        try:
            self._pool.add(worker, len(workforce.members))
        except Exception as error:
            self._not_renewed(str(error))
            return
        log.info("worker %d is renewed: %s", worker, workforce.has_made(worker))
        workforce.reset(worker)
        self.session.run.meter.renewed(worker)
        self.look_at_renewal(perf_counter())  # before the next one that waits for its turn is sent tickets
        self.session.flush()

    # --------------------------------------------------------------------------------------------------- actions

    def do(self, action: Action) -> None:
        """Carry out what was decided about a worker."""
        match action:
            case Start(worker):
                self._start(worker)
            case Join(worker):
                self.session.apply(self.session.run.scheduler.joined(worker))
            case Leave(worker):
                self._leave(worker)
            case Dismiss(worker):
                self._cancel_rest(worker)
                self._pool.dismiss(worker, END_GRACE_S)
            case Discard(worker):
                self._pool.discard(worker)
            case Replace(worker):
                self._replace(worker)
            case Vacate():
                self._vacate(action)
            case Postpone():
                self._postpone(action)

    def _start(self, worker: int) -> None:
        """Start one more worker; one in each turn of the loop, which a fork holds up."""
        self._to_start.append(worker)
        if len(self._to_start) == 1:
            self._loop.call_soon(self._start_next)

    def _start_next(self) -> None:
        worker = self._to_start.popleft()
        # Meanwhile it may not be wanted any more.
        if self._is_at_work and worker in self.workforce.members and worker not in self._pool.processes:
            self._launch(worker)
            self.session.flush()  # a run may have begun with it
        if self._to_start:
            self._loop.call_soon(self._start_next)

    def _leave(self, worker: int) -> None:
        """Have a worker leave; one that was not started yet leaves what it was to get."""
        if worker in self._pool.processes:
            self.session.apply(self.session.run.scheduler.leaving(worker))
        else:
            self._have_others_do(worker)

    def _replace(self, worker: int) -> None:
        """Put another in the place of a worker that was lost."""
        run = self.session.run
        if not self._is_at_work:
            return
        if run.epoch.starts is not None:
            run.epoch.starts[worker] = run.tracks[worker].start
        if self._launch(worker):
            run.faults.replacements += 1

    def _launch(self, worker: int) -> bool:
        """Start a process under this id, now or, if the system has no room for it, later; whether it is there."""
        try:
            self._pool.add(worker, len(self.workforce.members))
        except Exception as error:
            self._loop.call_soon(self._not_launched, worker, error)  # after what else was decided with this
            return False
        self.recovery.launched()
        self.workforce.reset(worker)
        return True

    def _not_launched(self, worker: int, error: Exception) -> None:
        process = self._pool.processes.get(worker)  # the one that died, if the launch failed before all else
        if not self._is_at_work or (process is not None and process.is_alive):
            return
        roster = self.session.run.scheduler.roster
        others = any(process.is_alive and roster.takes(other) for other, process in self._pool.processes.items())
        is_needed = worker in roster.active and not others
        self.session.apply(self.recovery.not_launched(worker, error, is_needed=is_needed))

    def _postpone(self, action: Postpone) -> None:
        """Go on without a worker that there is no room for now, or that may find none."""
        worker = action.worker
        self.workforce.cancel_renewal(worker)
        self._cancel_rest(worker)
        self._pool.dismiss(worker, 0.0)
        self._have_others_do(worker)
        if worker in self.workforce.members:
            self.workforce.comes_later(worker)
            self._rests[worker] = self._loop.call_later(action.rest_s, self._end_rest, worker)

    def _vacate(self, action: Vacate) -> None:
        """Tell the scheduler of a worker that was lost; another comes at once, or later."""
        run, worker = self.session.run, action.worker
        run.forget_given(worker)
        self.workforce.cancel_renewal(worker)
        actions = run.scheduler.vacated(action, self.outbox.drop(worker))  # it was to be renewed, or is not there yet
        if worker in run.scheduler.resting:
            self._rests[worker] = self._loop.call_later(action.rest_s, self._end_rest, worker)
        run.faults.timeouts += action.hung
        self.session.apply(actions)

    def _end_rest(self, worker: int) -> None:
        del self._rests[worker]
        if self.workforce.is_coming(worker):
            self._start(worker)
        else:
            self._replace(worker)
            self.session.apply(self.session.run.scheduler.rested(worker))

    def _cancel_rest(self, worker: int) -> None:
        """Wait no longer with the next process of a worker."""
        if (timer := self._rests.pop(worker, None)) is not None:
            timer.cancel()

    def _have_others_do(self, worker: int) -> None:
        """Have others do what a worker had that is not there."""
        self.outbox.drop(worker)
        if self._is_at_work:
            self.session.apply(self.session.run.scheduler.lost(worker))


def _end_late(started: weakref.ref[Worker]) -> None:
    """Kill a process that has not opened the dataset in time; the pool tells of its end."""
    if (spare := started()) is not None and not spare.is_ready:
        spare.kill()
