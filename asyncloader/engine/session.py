"""Runs over the data, on the portal's loop: between the consumer and the workers.

    consumer thread                               loop thread
    read the sampler ──> inbox ── wake ────────── planned ──> Scheduler ──> Send ──> Pool ──> worker
    take a batch    <── Handoff <── Deliver ───── Scheduler <── returned, ready <── Pool <── worker

The session carries out what the scheduler decides; it decides nothing about order, window or retries itself. Methods
that begin with ``on_`` are called by the pool on the loop thread, `push`, `request_close` and `wait_closed` by anybody,
the rest runs on the loop thread.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple

from asyncloader.engine.handoff import Handoff
from asyncloader.engine.pinning import Pinner
from asyncloader.engine.portal import Portal
from asyncloader.engine.scheduler import (
    VOID,
    Action,
    Deliver,
    Fail,
    Finish,
    Read,
    Replace,
    Scheduler,
    Send,
    Ticket,
)
from asyncloader.errors import LoaderClosedError, WorkerStartError, describe_death, describe_keys, died
from asyncloader.workers.failure import RemoteError
from asyncloader.workers.messages import EpochSpec, Record
from asyncloader.workers.pool import Pool
from asyncloader.workers.process import WorkerProcess

log = logging.getLogger("asyncloader")

END_GRACE_S = 3.0
"""Workers that were told to end get this long, then they are killed. Seconds."""


class State(enum.Enum):
    """Where a session is in its life."""

    NEW = enum.auto()  # workers are not started
    OPEN = enum.auto()  # batches are made
    CLOSING = enum.auto()  # workers are ending, nothing is handed over any more
    CLOSED = enum.auto()  # nothing is left


class Item(NamedTuple):
    """What the consumer gets: a batch, or an exception in its place.

    ``counts`` is false for an error beside the order, which frees no place in the window.
    """

    batch: Any
    error: BaseException | None = None
    counts: bool = True

    def open(self) -> Any:
        """Return the batch, or raise what came in its place."""
        if self.error is None:
            return self.batch
        try:
            raise self.error
        finally:
            del self  # the traceback refers to this frame


class PlanEnd:
    """In the inbox: the sampler has no more."""


class Run:
    """One run over the data (an epoch): what the consumer and the loop share of it.

    The attributes are written by the loop thread and read by consumers.

    Attributes:
        ended: Everything that was planned has been handed over.
        read_until: A consumer that waits may read the sampler on, until it has read so many batches of keys.
        void_count: Tickets that made no batch; each frees a place in the window.
    """

    def __init__(self, scheduler: Scheduler, epoch: EpochSpec) -> None:
        self.scheduler = scheduler
        self.epoch = epoch
        self.handoff: Handoff[Item] = Handoff()
        self.ended = False
        self.read_until = 0
        self.void_count = 0


class Session:
    """Owner of a pool, for one run over the data or, with persistent workers, for one after the other.

    Args:
        portal: Where it lives.
        pool: The workers, not started yet.
        run: The first run.
        replaceable: Whether another process can take the place of a worker that died; not so with iterable datasets,
            whose workers hold a position in the data.
        pinner: Copies batches into page-locked memory, or None.
    """

    def __init__(
        self, portal: Portal, pool: Pool, run: Run, *, replaceable: bool, pinner: Pinner | None = None
    ) -> None:
        self.portal = portal
        self.pool = pool
        self.state = State.NEW
        self.pid = os.getpid()
        self._run = run
        self._pinner = pinner
        self._replaceable = replaceable
        self._inbox: deque[Any] = deque()
        self._wake_posted = False
        self._closed = threading.Event()
        self._failed_starts = 0
        self.gave_up = False  # no worker can be had any more
        self._outbox: dict[int, list[tuple[int, Any]]] = {}

    def __repr__(self) -> str:
        return f"<Session {self.state.name} {self._run.scheduler!r} {self.pool!r}>"

    # -------------------------------------------------------------------------------------------- any thread

    def push(self, keys: Any) -> None:
        """Take the next batch of keys of the plan, or PlanEnd, or a new Run, to which what follows belongs.

        One wake-up of the loop serves all that is pushed before it gets its turn: that is what coalesces the traffic
        of a consumer that finds its batches ready.
        """
        self._inbox.append(keys)
        if not self._wake_posted:
            try:
                self._wake_posted = True
                self.portal.post(self._read_inbox)
            except BaseException:  # Ctrl-C: the next push must not rely on this wake-up
                self._wake_posted = False
                self.portal.stop_daemon()
                raise

    def request_close(self, grace_s: float = END_GRACE_S) -> None:
        """Begin to close, and return. Finalizers call this: no lock, nothing logged, nothing in a forked child."""
        if self.pid == os.getpid() and self.state is not State.CLOSED:
            with contextlib.suppress(LoaderClosedError):
                self.portal.post(self.close_soon, grace_s)

    def wait_closed(self, timeout_s: float) -> bool:
        """Wait until nothing is left. Not on the loop thread."""
        deadline = time.monotonic() + timeout_s
        return (
            self._closed.wait(timeout_s)
            and self.pool.wait_dead(max(0.0, deadline - time.monotonic()))
            and (self._pinner is None or self._pinner.join(max(0.0, deadline - time.monotonic())))
        )

    # ----------------------------------------------------------------------------------------------- lifecycle

    def start(self) -> None:
        """Start the workers and begin the first run."""
        if self.portal.is_closing:
            self.close_soon(0.0)
            raise LoaderClosedError("the interpreter is exiting, no more batches are made")
        self.portal.residents.add(self)
        self.pool.listener = self
        try:
            self.pool.start(self._run.epoch)
        except BaseException:
            self.close_soon(0.0)
            raise
        self._move(State.OPEN)
        self._read_inbox()

    def close_soon(self, grace_s: float) -> None:
        """Tell the workers to end; wake whoever waits."""
        if self.state is State.CLOSED:
            return
        self._move(State.CLOSING)
        self._run.handoff.ready.clear()
        self._run.handoff.wake_all()
        self._read_inbox()
        if self._pinner is not None:
            self._pinner.stop()
        self.pool.end(grace_s)

    def on_closed(self) -> None:
        """All workers are gone."""
        self._move(State.CLOSED)
        self.portal.residents.discard(self)
        self._closed.set()

    def _move(self, state: State) -> None:
        self.state = state

    # -------------------------------------------------------------------------------------------------- events

    def _read_inbox(self) -> None:
        # Cleared before the inbox is read: a push in between posts one wake-up too many, never one too few.
        self._wake_posted = False
        if self.state is State.NEW:
            return
        inbox = self._inbox
        batches: list[Any] = []
        while inbox:
            keys = inbox.popleft()
            if type(keys) is Run:
                self._begin(keys)
                batches = []
            elif type(keys) is PlanEnd:
                self._plan(batches)
                batches = []
                self._apply(self._run.scheduler.plan_ended())
            else:
                batches.append(keys)
        self._plan(batches)

    def _plan(self, batches: list[Any]) -> None:
        if self.state is State.OPEN and batches:
            self._apply(self._run.scheduler.planned(batches))

    def _begin(self, run: Run) -> None:
        """Begin another run with the same workers. What is left of the last one is dropped."""
        self._run = run
        if self.state is State.OPEN:
            self.pool.begin_epoch(run.epoch)
        else:
            run.handoff.wake_all()

    def on_ready(self, worker: int) -> None:
        """The worker has opened the dataset."""
        self._failed_starts = 0

    def on_batch(self, worker: int, record: Record, batch: Any, nbytes: int) -> None:
        """A batch has come."""
        if not self._takes_outcomes():
            return
        scheduler = self._run.scheduler
        actions = scheduler.returned(worker, record.seq, record.busy_s, record.wait_s)
        if self._pinner is None:
            actions += scheduler.ready(record.seq, Item(batch), nbytes)
        else:
            self._pinner.pin(batch, partial(self._on_pinned, self._run, record.seq, nbytes))
        self._apply(actions)

    def _on_pinned(self, run: Run, seq: int, nbytes: int, batch: Any, error: Exception | None) -> None:
        if run is self._run and self.state is State.OPEN:
            self._apply(run.scheduler.ready(seq, Item(batch, error), nbytes))

    def on_failure(self, worker: int, record: Record, error: RemoteError | Exception) -> None:
        """An exception has come in place of a batch."""
        if not self._takes_outcomes():
            return
        scheduler = self._run.scheduler
        ticket = scheduler.in_flight[worker].get(record.seq)
        keys = ticket.keys if ticket is not None and self._replaceable else None  # a stream has no indices
        if isinstance(error, RemoteError):
            error = error.rebuild(keys)
        actions = scheduler.returned(worker, record.seq, record.busy_s, record.wait_s)
        self._apply(actions + scheduler.ready(record.seq, Item(None, error)))

    def on_exhausted(self, worker: int, record: Record) -> None:
        """The worker's iterable dataset ended before this ticket."""
        if self._takes_outcomes():
            self._apply(self._run.scheduler.exhausted(worker, record.seq))

    def _takes_outcomes(self) -> bool:
        """Whether somebody waits for what workers make: not while they end, nor after they were given up."""
        return self.state is State.OPEN and not self.gave_up

    def on_died(self, worker: int, process: WorkerProcess) -> None:
        """The worker's process ended on its own."""
        if not self._takes_outcomes():
            return
        log.warning("%s", describe_death(process.pid, process.exitcode))
        self._dead = process
        self._failed_starts += not process.is_ready
        if self._failed_starts > self._run.scheduler.num_workers + 2:
            self._give_up(WorkerStartError(self._start_failure(process)))
            return
        self._apply(self._run.scheduler.died(worker, replaceable=self._replaceable, was_ready=process.is_ready))

    def _start_failure(self, process: WorkerProcess) -> str:
        output = f"\nLast words of the worker:\n{process.output.decode(errors='replace')}" if process.output else ""
        return (
            f"Workers end before they can take a batch ({self._failed_starts} in a row); the last one: "
            f"{describe_death(process.pid, process.exitcode)}{output}"
        )

    # ------------------------------------------------------------------------------------------------- actions

    def _apply(self, actions: list[Action]) -> None:
        """Carry out what the scheduler decided, in order; tickets for one worker go in one message."""
        for action in actions:
            self._do[type(action)](self, action)
        if self._outbox:
            outbox, self._outbox = self._outbox, {}
            for worker, tickets in outbox.items():
                self._dispatch(worker, tickets)

    def _dispatch(self, worker: int, tickets: list[tuple[int, Any]]) -> None:
        try:
            self.pool.send(worker, tickets)
        except Exception as error:  # the keys cannot be pickled
            if len(tickets) == 1:
                self._refuse(worker, tickets[0], error)
                return
            for ticket in tickets:
                self._dispatch(worker, [ticket])

    def _refuse(self, worker: int, ticket: tuple[int, Any], error: Exception) -> None:
        seq, keys = ticket
        error.add_note(f"The sampler yielded {describe_keys(keys)}, which cannot be sent to a worker process.")
        scheduler = self._run.scheduler
        self._apply(scheduler.returned(worker, seq) + scheduler.ready(seq, Item(None, error)))

    def _send(self, action: Send) -> None:
        if self.gave_up:
            return
        ticket = action.ticket
        self._outbox.setdefault(action.worker, []).append((ticket.seq, ticket.keys))

    def _deliver(self, action: Deliver) -> None:
        self._run.handoff.put(action.outcome)

    def _read_on(self, action: Read) -> None:
        run = self._run
        run.void_count = run.scheduler.void_count
        run.read_until = max(run.read_until, action.until)
        run.handoff.wake()

    def _replace(self, action: Replace) -> None:
        try:
            self.pool.replace(action.worker)
        except Exception as error:
            self._give_up(error)

    def _fail(self, action: Fail) -> None:
        process, tickets = self._dead, action.tickets
        error = died(
            process.pid,
            process.exitcode,
            [ticket.keys for ticket in tickets],
            tickets[0].tries if tickets else 1,
            process.output.decode(errors="replace"),
        )
        if action.at_once:
            self._run.handoff.ready.appendleft(Item(None, error, counts=False))
            self._run.handoff.wake()
        else:
            self._apply(self._run.scheduler.ready(tickets[0].seq, Item(None, error)))

    def _finish(self, action: Finish) -> None:
        self._run.ended = True
        self._run.handoff.wake_all()

    def _give_up(self, error: Exception) -> None:
        """No worker can be had: one error stands for everything that is not here yet."""
        self.gave_up = True
        self._outbox.clear()
        self._read_inbox()
        scheduler = self._run.scheduler
        lost = scheduler.stopped()
        if lost:
            keys = describe_keys(lost[0].keys)
            error.add_note(f"{len(lost)} batches that were planned are lost; the first has the indices {keys}.")
        self._run.handoff.put(Item(None, error, counts=False))
        self._apply([action for ticket in lost for action in scheduler.ready(ticket.seq, VOID)])
        self._apply(scheduler.plan_ended())

    _do: ClassVar[dict[type, Callable[[Session, Any], None]]] = {
        Send: _send,
        Deliver: _deliver,
        Read: _read_on,
        Replace: _replace,
        Fail: _fail,
        Finish: _finish,
    }

    # ----------------------------------------------------------------------------------------------- diagnosis

    def diagnose(self, tell: Callable[[Ticket | None, WorkerProcess | None, str], None]) -> None:
        """Find out what the awaited batch waits for: its ticket, its worker, the worker's stack."""
        ticket = self._run.scheduler.awaited()
        if ticket is None:
            tell(None, None, "")
            return
        process = self.pool.processes[ticket.worker]
        process.ask_stack(lambda stack: tell(ticket, process, stack))
