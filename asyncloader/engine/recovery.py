"""What becomes of workers that died or hung, and of the batches that they had.

    pool ── died ──> ┌──────────┐ ── died, hung ──> Scheduler ──> Fail ──> fail: an error, or a batch left out
    consumer         │ Recovery │ ── replace, discard ──> pool
      ── overdue ──> └──────────┘ ── rest ──> Backoff ── over ──> replace

The scheduler decides which tickets are run again and which are given up; here is found out whether another worker can
take the place, when, and what the error says. On the loop thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from asyncloader.engine.actions import Action, Fail, Replace, Ticket
from asyncloader.engine.backoff import Backoff, explain_death, explain_failed_starts, explain_no_start
from asyncloader.engine.portal import Portal
from asyncloader.engine.run import Item, Run, failed
from asyncloader.errors import BatchTimeoutError, describe_death, describe_keys, timed_out
from asyncloader.settings import OnTimeout
from asyncloader.workers.backend import Backend, Worker
from asyncloader.workers.protocol.outcome import NO_RECORD, LeftOut
from asyncloader.workers.protocol.snapshot import Start

log = logging.getLogger("asyncloader")

_STARTING_S = 60.0
"""A worker that has not opened the dataset is not taken for hung before this time. Seconds."""

_MOST_PAST = 10
"""So many runs without a state told are read again to replace a worker."""

_NOT_REPLACED = (
    "The worker was not replaced: no batch has told where it was in its iterable dataset. Give the dataset "
    "state_dict() and load_state_dict(); or, if it yields the same samples each time it is iterated over, the "
    "attribute deterministic = True."
)

_NOT_REPLACEABLE = (
    'The worker was not replaced: with "skip" a batch would be left out, and nobody knows where another worker would '
    'then have to begin in the iterable dataset. "retry" makes the batch again.'
)


class Policy(NamedTuple):
    """What can be done about workers that are lost.

    Attributes:
        replaceable: Whether another process can always take the place of a worker that died: not so with iterable
            datasets, whose workers hold a position in the data, unless they can be read again.
        is_stream: The dataset is iterable.
        tells_place: A worker of a stream can be replaced as soon as it has told a state.
        has_initial_state: The dataset provides a state, and the parent still holds the one that the first run's workers
            started from: so another worker can be taken through what they had been through.
        on_timeout: What to do about a batch that does not come in time.
    """

    replaceable: bool
    is_stream: bool = False
    tells_place: bool = False
    has_initial_state: bool = False
    on_timeout: OnTimeout = "raise"


class Patient(Protocol):
    """What is asked of the session that is mended."""

    portal: Portal
    run: Run
    pool: Backend

    @property
    def takes_outcomes(self) -> bool:
        """Whether somebody waits for what workers make."""

    def apply(self, actions: list[Action]) -> None:
        """Carry out what the scheduler decided."""

    def lost(self, worker: int) -> None:
        """Forget what a worker that is gone had told and had been given."""

    def give_up(self, error: Exception) -> None:
        """No worker can be had: one error stands for everything that is not here yet."""


class Recovery:
    """Mends the session that it belongs to."""

    def __init__(self, session: Patient, policy: Policy) -> None:
        self._session = session
        self._policy = policy
        self.has_lost = False  # a worker that was not replaced
        self._vacant: set[int] = set()  # workers that died at the end of their data, and have no process
        self._failed_starts = 0
        self._is_replaced = True  # the worker that was lost last
        self._backoff = Backoff(session.portal.loop, session.run.scheduler.num_workers, self._end_rest)
        self._explain: Callable[[list[Ticket]], Exception]  # makes the error for tickets that are given up

    # ------------------------------------------------------------------------------------------------- all is well

    def ready(self) -> None:
        """A worker has opened the dataset."""
        self._failed_starts = 0

    def reset(self) -> None:
        """A worker has come to an outcome."""
        self._backoff.reset()

    def stop(self) -> set[int]:
        """Replace nobody any more in this run; return who has no process."""
        missing, self._vacant = self._vacant.union(self._backoff.stop()), set()
        return missing

    def begin(self, missing: set[int]) -> None:
        """Another run has begun: give workers that have no process one, as far as they can be replaced in it."""
        session = self._session
        for worker in missing:
            self._is_replaced = self._can_replace(worker)
            self.has_lost |= not self._is_replaced
            if self._is_replaced:
                session.apply([Replace(worker)])
            else:
                self._explain = partial(explain_death, session.pool.processes[worker])
                session.apply(session.run.scheduler.died(worker, replaceable=False))

    # ------------------------------------------------------------------------------------------------------ deaths

    def died(self, worker: int, process: Worker) -> None:
        """The worker's process ended on its own."""
        session = self._session
        if process.was_set_up:
            log.warning("%s", describe_death(process.pid, process.exitcode))
        self._explain = partial(explain_death, process)
        self._failed_starts += not process.is_ready
        scheduler = session.run.scheduler
        session.lost(worker)
        if worker not in scheduler.active:  # it had come to the end of its data, and only a later run needs another
            self._vacant.add(worker)
            self.has_lost |= not (self._policy.replaceable or self._policy.has_initial_state)
            return
        if not process.was_set_up:
            session.give_up(explain_no_start(process))
            return
        if self._failed_starts > scheduler.num_workers + 2:
            session.give_up(explain_failed_starts(process, self._failed_starts))
            return
        self._is_replaced = self._can_replace(worker)
        self.has_lost |= not self._is_replaced
        rests = self._is_replaced and self._backoff.begin(worker)
        session.apply(scheduler.died(worker, replaceable=self._is_replaced, was_ready=process.is_ready, rests=rests))

    def _can_replace(self, worker: int) -> bool:
        """Whether another process can begin where this one was: not if nobody knows where that is in a stream."""
        policy, run = self._policy, self._session.run
        if policy.replaceable or not policy.tells_place:
            return policy.replaceable
        start = run.tracks[worker].start
        return start.snapshot is not None or (policy.has_initial_state and len(start.past) <= _MOST_PAST)

    def past(self, last: Run) -> dict[int, Sequence[Start]]:
        """Return, by worker, what another one would have to be taken through that took its place after this run."""
        if self._policy.replaceable or not self._policy.has_initial_state:
            return {}
        active = last.scheduler.active
        return {worker: track.past(ended=worker not in active) for worker, track in last.tracks.items()}

    def _end_rest(self, worker: int) -> None:
        self._session.apply([Replace(worker)])
        self._session.apply(self._session.run.scheduler.rested(worker))

    def fail(self, action: Fail) -> None:
        """Make one error of tickets that are given up, and hand it over, or leave the batch out."""
        session, error = self._session, self._explain(action.tickets)
        run = session.run
        if action.at_once:
            if not self._is_replaced:
                error.add_note(_NOT_REPLACED if self._policy.tells_place else _NOT_REPLACEABLE)
            run.handoff.ready.appendleft(failed(error, counts=False))
            run.handoff.wake()
            return
        (ticket,) = action.tickets
        item = failed(error, ticket.seq)
        if action.leave_out:
            log.warning("The batch with the indices %s is left out: %s", describe_keys(ticket.keys), error)
            run.faults.left_out.append(ticket.keys)
            item = Item(LeftOut(NO_RECORD), ticket.seq)
        session.apply(run.scheduler.ready(ticket.seq, item))

    # ------------------------------------------------------------------------------------------------------- hangs

    def overdue(self, timeout_s: float, tell: Callable[[BatchTimeoutError | None], None]) -> None:
        """Find out what the awaited batch waits for, and do about it what ``on_timeout`` says.

        ``tell`` gets the error to raise, or None if the batch, or its error, will come after all.
        """
        scheduler = self._session.run.scheduler
        ticket = scheduler.awaited()
        if ticket is None:  # it waits for a worker that rests, or it is being pinned
            tell(None if scheduler.resting else timed_out(timeout_s))
            return
        process = self._session.pool.processes[ticket.worker]
        process.ask_stack(ticket.seq, lambda stack: tell(self._overdue_at(timeout_s, ticket, process, stack)))

    def _overdue_at(self, timeout_s: float, ticket: Ticket, process: Worker, stack: str) -> BatchTimeoutError | None:
        session = self._session
        why = "The worker did not answer when asked where it is." if process.is_telling else "It has not come up yet."
        explain = partial(timed_out, timeout_s, ticket.keys, process.worker_id, process.pid, stack, why)
        if self._policy.on_timeout == "raise" or not session.takes_outcomes:
            return explain()
        would_skip = self._policy.is_stream and self._policy.on_timeout == "skip"
        if would_skip or not self._can_replace(ticket.worker):
            error = explain()
            error.add_note(_NOT_REPLACED if self._policy.tells_place and not would_skip else _NOT_REPLACEABLE)
            return error
        if not process.is_ready and time.monotonic() - process.started_at < max(timeout_s, _STARTING_S):
            return None  # killed for being slow to start, the next one would be as slow
        held = session.run.scheduler.in_flight[ticket.worker]
        if session.pool.processes[ticket.worker] is process and held.get(ticket.seq) is ticket:
            self._replace_hung(process, explain)
        return None  # otherwise it has come, or somebody else has waited too long for it

    def _replace_hung(self, process: Worker, explain: Callable[..., BatchTimeoutError]) -> None:
        session, error = self._session, explain()
        log.warning("%s It is killed and replaced.", error)
        session.run.faults.timeouts += 1
        self._explain = lambda tickets: explain(tries=tickets[0].tries)
        session.lost(process.worker_id)
        session.pool.discard(process.worker_id)
        rests = self._backoff.begin(process.worker_id)
        session.apply(session.run.scheduler.hung(process.worker_id, rests=rests))
