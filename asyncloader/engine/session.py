"""Runs over the data, on the portal's loop: between the consumer and the workers.

    consumer thread                               loop thread
    read the sampler ──> inbox ── wake ────────── planned ──> Scheduler ──> Send ──> Pool ──> worker
    take a batch    <── Handoff <── Deliver ───── Scheduler <── returned, ready <── Pool <── worker

The session carries out what the scheduler decides; it decides nothing about order, window or retries itself. The pool
tells the supervisor of workers and outcomes, and the supervisor gives outcomes to `receive`. Any thread may call the
methods that begin with ``start_``, `push`, `wake`, `post`, `waker`, `close_with`, `request_close`, `wait_closed` and
`report_overdue`; all else runs on the loop thread.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from functools import partial
from time import perf_counter
from typing import Any, ClassVar

from asyncloader.backends.backend import END_GRACE_S, Backend
from asyncloader.backends.processes.launching import carry_out
from asyncloader.engine.actions import (
    Action,
    Deliver,
    Fail,
    GiveUp,
    Send,
    Ticket,
)
from asyncloader.engine.answer import Answer
from asyncloader.engine.finisher import Finisher
from asyncloader.engine.hang_report import HangReporter
from asyncloader.engine.portal import Portal
from asyncloader.engine.run import Run
from asyncloader.engine.supervisor import Supervisor
from asyncloader.engine.taking import Item, failed
from asyncloader.epochs import changed
from asyncloader.errors import BatchTimeoutError, LoaderClosedError, describe_keys, exiting, internal
from asyncloader.messages.failure import another, with_notes
from asyncloader.messages.messages import Kind
from asyncloader.messages.outcome import Outcome
from asyncloader.messages.snapshot import Frozen, WorkerStart
from asyncloader.weak import while_alive
from asyncloader.worker.guarded_loop import GuardedLoop

log = logging.getLogger("asyncloader")

_MOST_ERRORS = 100
"""A session whose end fails so often is abandoned."""

_consumers: dict[Session, weakref.ref[object] | None] = {}
"""The iterators that sessions end with, until they begin to close. In a forked child there are none."""


class State(enum.Enum):
    """Where a session is in its life."""

    NEW = enum.auto()  # workers are not started
    OPEN = enum.auto()  # batches are made
    CLOSING = enum.auto()  # workers are ending, nothing is handed over any more
    CLOSED = enum.auto()  # nothing is left


class Session:
    """Owner of a pool, for one run over the data or, with persistent workers, for one after the other.

    Args:
        portal: Where it lives.
        loop: The portal's, for all that belongs to this session.
        pool: The workers, not started yet.
        run: The first run.
        supervisor: Looks after the workers.
        finisher: Copies batches into page-locked memory; None where that is not asked.

    Attributes:
        error: Why no more batches are made, if that is no consumer's wish; each consumer is told.
    """

    def __init__(
        self,
        portal: Portal,
        loop: GuardedLoop,
        pool: Backend,
        run: Run,
        supervisor: Supervisor,
        finisher: Finisher | None = None,
    ) -> None:
        self.portal = portal
        self._loop = loop
        self.pool = pool
        self.state = State.NEW
        self.pid = os.getpid()
        self.run = run
        self._last: Run | None = None  # the run before, if all of it was made; it may still be taken from
        self._finisher = finisher
        self.supervisor = supervisor
        self._next_runs: deque[Run] = deque()
        self._closed = threading.Event()
        self.error: BaseException | None = None
        self._num_errors = 0
        self._is_applying = False
        self._reports: set[Future[BatchTimeoutError | None]] = set()  # that consumers wait for
        self._outbox = supervisor.outbox
        supervisor.attach(self)
        self._hangs = HangReporter(loop, pool, self)

    def __repr__(self) -> str:
        return f"<Session {self.state.name} {self.run.scheduler!r} {self.pool!r}>"

    # -------------------------------------------------------------------------------------------- any thread

    def push(self, run: Run) -> None:
        """Have another run begin, and what is left of the last one dropped."""
        self._next_runs.append(run)
        self.wake()

    def wake(self) -> None:
        """Have the loop look what has come."""
        try:
            self.post(self._read_inbox)
        except BaseException:
            self.portal.stop_daemon()
            raise

    def post(self, function: Callable[..., object], *args: object) -> None:
        """Have the loop call something of this session.

        Raises:
            LoaderClosedError: if there is no loop any more.
        """
        self.portal.post(self._loop.run, function, *args)

    def waker(self) -> Callable[[], None]:
        """Return `wake` for a run, which must not keep the session alive."""
        return while_alive(self.wake, None)

    def close_with(self, consumer: object) -> None:
        """Begin to close when this is dropped.

        Its last reference may go in any thread, also inside gc. Python runs the handlers of signals where a function
        begins; what they raise out of the callback of a weak reference is printed and forgotten, and workers would stay
        for ever. So there is no function of Python in this callback: uvloop's method is compiled.
        """
        on_dropped = partial(self._loop.loop.call_soon_threadsafe, self._loop.run, self._on_dropped)
        _consumers[self] = weakref.ref(consumer, on_dropped)

    def request_close(self) -> None:
        """Begin to close, and return. An interrupt leaves it undone: to be called again, or the consumer is dropped."""
        if self.pid == os.getpid() and self.state in (State.NEW, State.OPEN):
            with contextlib.suppress(LoaderClosedError):
                self.post(self._close, END_GRACE_S)

    @property
    def is_ending(self) -> bool:
        """Whether it has begun to close."""
        return self.state is State.CLOSING

    def wait_closed(self, timeout_s: float) -> bool:
        """Wait until nothing is left. Not on the loop thread."""
        deadline = time.monotonic() + timeout_s
        return (
            self._closed.wait(timeout_s)
            and self.pool.wait_dead(max(0.0, deadline - time.monotonic()))
            and (self._finisher is None or self._finisher.join(max(0.0, deadline - time.monotonic())))
        )

    # ----------------------------------------------------------------------------------------------- lifecycle

    def start(self) -> None:
        """Start the workers and begin the first run."""
        carry_out(self._steps())

    def start_from_here(self) -> None:
        """Start the workers as `start` does, from the consumer's thread, of which forked workers are copies then.

        They find what belongs to the thread, as workers of torch's loader do: connections to SQLite, thread-locals.
        """
        self.portal.launch_here(self._steps())

    def start_apart(self) -> Future[None]:
        """Start them where that holds up nobody: neither the caller's loop nor, on the portal's, other loaders."""
        return self.portal.launch_apart(self._steps())

    def _steps(self) -> Generator[Callable[[], None], None, None]:
        """Start; what is yielded launches a worker, and is to be called before the next step."""
        try:
            if self.portal.is_closing:
                raise exiting()
            if self.portal.has_ended:
                raise LoaderClosedError("asyncloader.shutdown() was called")
            self.pool.listener = self.supervisor
            self.portal.sessions.add(self)  # until the pool tells of its end
            self._loop.on_error = self._on_error
            self._move(State.OPEN)
            self._hangs.start()
            self._read_inbox()  # workers find their tickets waiting, and work while the next ones are started
            yield from self.pool.start(self.run.epoch, self.flush)
        except BaseException as error:
            if not isinstance(error, GeneratorExit):  # whoever launched them was interrupted, and has no iterator
                self._stop(error)
            self.close_soon(0.0)
            raise

    def close_soon(self, grace_s: float) -> None:
        """Tell the workers to end; wake whoever waits."""
        self._loop.run(self._close, grace_s)

    def _on_dropped(self, consumer: weakref.ref[object]) -> None:
        self._close(END_GRACE_S)

    def _close(self, grace_s: float) -> None:
        _consumers.pop(self, None)
        if self.state is State.CLOSED:
            return
        self._move(State.CLOSING)
        with contextlib.ExitStack() as steps:  # from the last one up, and each whatever others raise
            steps.callback(self.pool.end, grace_s)
            if self._finisher is not None:
                steps.callback(self._finisher.stop)
            steps.callback(self.run.meter.write_trace)
            steps.callback(self.supervisor.stop)
            steps.callback(self._hangs.stop)
            steps.callback(self._read_inbox)
            steps.callback(self.run.close)
            if self._last is not None:
                steps.callback(self._last.close)

    def on_closed(self) -> None:
        """All workers are gone."""
        self.portal.sessions.discard(self)
        self._loop.on_error = None
        self._closed.set()
        self._move(State.CLOSED)

    def _stop(self, error: BaseException) -> None:
        """Have every consumer raise this once what is ready is taken: no more batches are made."""
        # A copy, without the frames of whoever starts workers: through them it would keep the iterator alive.
        self.error = kept = another(error).with_traceback(None)
        for run in (self.run, *self._next_runs):
            run.stop(kept)
        for report in tuple(self._reports):
            self._answer(report, None)

    def _on_error(self, error: BaseException) -> None:
        """Something in here, or in what belongs to it, has failed: end with it, whatever else fails."""
        self._num_errors += 1
        is_first = self.error is None and self.state is State.OPEN
        try:
            with contextlib.ExitStack() as steps:
                steps.callback(self._close, END_GRACE_S if is_first else 0.0)
                if is_first:
                    steps.callback(self._stop, internal(error))
                else:  # nobody waits for anything any more
                    words = "asyncloader has failed while it ended workers: please report this"
                    steps.callback(log.error, words, exc_info=error)
        except BaseException:
            self._num_errors = _MOST_ERRORS
        if self._num_errors >= _MOST_ERRORS:
            self._abandon()

    def _abandon(self) -> None:
        """Leave alone what cannot be ended."""
        self._loop.close()
        for worker in self.pool.processes.values():
            with contextlib.suppress(BaseException):
                worker.kill()
        self.on_closed()

    def _move(self, state: State) -> None:
        self.state = state

    # -------------------------------------------------------------------------------------------------- events

    def _read_inbox(self) -> None:
        if self.state is State.NEW:
            return
        while self._next_runs:
            self._begin_run(self._next_runs.popleft())
        batches, plan_ended = self.run.read_inbox()
        if not self.takes_outcomes:
            return
        if batches:
            self.apply(self.run.scheduler.planned(batches))
        if plan_ended:
            self.run.scheduler.plan_ended()
            self.apply(())

    def _begin_run(self, run: Run) -> None:
        """Begin another run with the same workers. Batches of the last one that are not made yet are dropped."""
        last, self.run = self.run, run
        self._last = last if last.ended else None
        last.handoff.wake_all()
        self._outbox.clear()  # of workers that are not started yet, for the last run
        if self.state is State.OPEN:
            self._carry_over(last)
            self.pool.begin_epoch(run.epoch)
            self.supervisor.begin_run()
            return
        if self.error is not None:
            run.stop(self.error)
        run.close()

    def _carry_over(self, last: Run) -> None:
        """Note where workers are at the beginning of another run: their datasets are those of the last one."""
        self.supervisor.recovery.is_first_run = False
        if not self.run.is_stream:
            self.run.begin_at({worker: track.start for worker, track in last.tracks.items()})
        elif last.ends:
            news = changed(self.run.epoch.epochs, last.epoch.epochs)
            ends = {worker: WorkerStart(0, state, epochs=news) for worker, state in last.ends.items()}
            self.run.begin_at({**(self.run.epoch.starts or {}), **ends})

    def receive(self, worker: int, outcome: Outcome, arrived_at: float) -> None:
        """Take the outcome of a ticket, which began to be read at this time."""
        if outcome.kind == Kind.EXHAUSTED:
            if isinstance(outcome.snapshot, Frozen):
                self.run.ends[worker] = outcome.snapshot
            self.apply(self.run.scheduler.exhausted(worker))
        elif outcome.kind == Kind.REFUSED:
            self._refuse(worker, outcome.record.ticket, outcome.error.rebuild(None), "cannot be unpickled in")
        else:
            self._made(worker, outcome, arrived_at)

    def _made(self, worker: int, outcome: Outcome, arrived_at: float) -> None:
        """Take what a worker has made of a ticket."""
        run, record, scheduler = self.run, outcome.record, self.run.scheduler
        ticket = scheduler.in_flight[worker][record.ticket]
        times: Any = None
        if outcome.kind == Kind.BATCH:
            times = run.meter.made(worker, record, ticket.sent_at, arrived_at, max(outcome.nbytes, 0), ticket.batch)
        elif outcome.kind == Kind.FAILURE and not isinstance(outcome.error, BaseException):
            keys = None if run.is_stream else run.named(ticket).keys  # a stream has no indices
            outcome = outcome._replace(error=outcome.error.rebuild(keys))
        actions = scheduler.returned(worker, record.ticket, record.busy_s, record.wait_s)
        item = Item(outcome, ticket.batch, worker, times)
        if run.tracks:
            item = run.answered(item, ticket)
        self.apply(actions + self._came(ticket, item))

    def _came(self, ticket: Ticket, item: Item) -> list[Action]:
        """Return what an outcome leads to: the batch is handed over, or pinned first."""
        run, outcome = self.run, item.outcome
        if outcome.kind != Kind.BATCH:
            if outcome.kind == Kind.LEFT_OUT:
                run.faults.left_out.append(run.named(ticket).keys)
            return run.scheduler.ready(item.batch, item)
        if self._finisher is None:
            return run.scheduler.ready(item.batch, item, outcome.nbytes)
        emptied = item._replace(outcome=outcome._replace(data=None))
        self._finisher.finish([outcome], partial(self._on_finished, run, emptied))
        return []

    def _on_finished(
        self, run: Run, item: Item, outcome: Outcome | None, error: BaseException | None, seconds: float
    ) -> None:
        """Take a batch that was pinned beside the loop; ``item`` is without its data."""
        if run is not self.run or self.state is not State.OPEN:
            return
        run.meter.pinned(item.times, seconds)
        if outcome is None:
            outcome = item.outcome._replace(kind=Kind.FAILURE, error=error)
        self.apply(run.scheduler.ready(item.batch, item._replace(outcome=outcome), outcome.nbytes))

    @property
    def takes_outcomes(self) -> bool:
        """Whether somebody waits for what workers make: not while they end, nor after they were given up."""
        return self.state is State.OPEN and self.error is None

    def report_overdue(self, timeout_s: float) -> Future[BatchTimeoutError | None]:
        """Find out what the awaited batch waits for, and do about it what ``on_timeout`` says. In any thread.

        Returns:
            The error to raise, or None if the batch, or its error, will come after all.
        """
        report = Answer[BatchTimeoutError | None]()
        self._reports.add(report)
        self.post(self.supervisor.overdue, timeout_s, partial(self._answer, report))
        return report

    def _answer(self, report: Future[BatchTimeoutError | None], error: BatchTimeoutError | None) -> None:
        self._reports.discard(report)
        if not report.done():
            report.set_result(error)

    # ------------------------------------------------------------------------------------------------- actions

    def apply(self, actions: Sequence[Action]) -> None:
        """Carry out actions in order, and let consumers see how far they may read; one message for each worker."""
        is_within, self._is_applying = self._is_applying, True
        try:
            for action in actions:
                if (do := self._do.get(type(action))) is not None:
                    do(self, action)
                else:
                    self.supervisor.do(action)
        finally:
            self._is_applying = is_within
        # Within other actions the scheduler may have decided to deliver what is still to be handed over.
        self.run.follow(may_be_over=not is_within)
        self.flush()

    def flush(self) -> None:
        """Give workers their tickets; what is for one that is not started yet waits."""
        self._outbox.flush(self._refuse, self.run.scheduler.in_flight)

    def _refuse(self, worker: int, number: int, error: Exception, why: str = "cannot be sent to") -> None:
        """Hand over why the keys of a ticket have not reached the worker, in its place. No dataset has seen them."""
        scheduler = self.run.scheduler
        ticket = scheduler.in_flight[worker][number]
        names = describe_keys(self.run.named(ticket).keys)
        with_notes(error, [f"The sampler yielded {names}, which {why} a worker process."])
        self.apply(scheduler.returned(worker, number) + self._came(ticket, failed(error, ticket.batch)))

    def _fail(self, action: Fail) -> None:
        """Make one error of tickets that are given up, and hand it over, or leave the batch out."""
        named = {ticket.batch: self.run.named(ticket) for ticket in action.tickets}
        error = action.cause(list(named.values()))
        if action.at_once:
            self.run.raise_first(error)
            return
        (ticket,) = action.tickets
        item = failed(error, ticket.batch)
        if action.leave_out:
            log.warning("The batch with the indices %s is left out: %s", describe_keys(named[ticket.batch].keys), error)
            item = Item(Outcome(Kind.LEFT_OUT), ticket.batch)
        self.apply(self._came(ticket, item))

    def _send(self, action: Send) -> None:
        if self.error is not None:
            return
        ticket = action.ticket
        ticket.sent_at = perf_counter()
        self.run.given(action.worker, ticket)
        self._outbox.put(action.worker, ticket.batch, self.run.contents(ticket))

    def _deliver(self, action: Deliver) -> None:
        if (times := action.item.times) is not None:
            times.ready_at = perf_counter()
        self.run.handoff.put(action.item)

    def _give_up(self, action: GiveUp) -> None:
        error = action.error
        self._read_inbox()
        if lost := self.run.scheduler.stopped():
            count, keys = len({ticket.batch for ticket in lost}), describe_keys(self.run.named(lost[0]).keys)
            error.add_note(f"{count} batches that were planned are lost; the first has the indices {keys}.")
        self._stop(error)
        self._loop.call_soon(self._close, END_GRACE_S)

    _do: ClassVar[dict[type, Callable[[Session, Any], None]]] = {
        Send: _send,
        Deliver: _deliver,
        Fail: _fail,
        GiveUp: _give_up,
    }


def _forget_consumers() -> None:
    """In a forked child: what is dropped here closes nothing, and sessions, which are the parent's, stay."""
    for session in _consumers:
        _consumers[session] = None


os.register_at_fork(after_in_child=_forget_consumers)
