"""The workers of an iterator and the runs that they are at: on the portal's loop, between consumers and a backend.

    consumer thread                               loop thread
    read the sampler ──> inbox ── wake ────────── planned ──> Scheduler ──> outbox ──> Backend ──> worker
    take a batch    <── Handoff <── delivered <── Scheduler <── returned, ready <── on_outcomes <── worker

Three deciders without I/O say what is done: `Scheduler` about tickets and order, of one run; `Workforce` which workers
come, go and are renewed; `Recovery` what becomes of those that died or hang. Under "auto", `Controller` says how many
workers are worth it. The engine tells them what has happened, and carries out what they decide.

Outcomes that come in one turn of the loop are told one by one, and settled together, in its next turn: tickets are
given out, batches handed over, consumers woken and messages sent once for all of them.

Any thread may call the methods of the first section; all else runs on the loop thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from operator import attrgetter
from time import monotonic, perf_counter
from typing import Any

from asyncloader.backends.backend import END_GRACE_S, Backend, Came
from asyncloader.backends.worker import Worker
from asyncloader.engine import hang_report
from asyncloader.engine.actions import Action, Fail, Ticket, Vacate
from asyncloader.engine.controller import Controller
from asyncloader.engine.finisher import Finisher
from asyncloader.engine.hang_report import HangWatch
from asyncloader.engine.item import Item, failed
from asyncloader.engine.portal import Portal
from asyncloader.engine.recovery import Overdue, Recovery
from asyncloader.engine.run import Run
from asyncloader.engine.workforce import Workforce
from asyncloader.errors import BatchTimeoutError, LoaderClosedError, describe_keys, exiting, internal, timed_out
from asyncloader.log import log
from asyncloader.loops import GuardedLoop
from asyncloader.machine import available_bytes, total_bytes
from asyncloader.messages.failure import another, with_notes
from asyncloader.messages.messages import Kind
from asyncloader.messages.outcome import Outcome
from asyncloader.messages.snapshot import Frozen, WorkerStart
from asyncloader.observe.record import Record
from asyncloader.observe.timing import show_bytes
from asyncloader.options import Options
from asyncloader.weak import while_alive

_MOST_ERRORS = 100
"""An engine whose end fails so often is abandoned."""

_WORKER_BYTES = 256 << 20
"""One more worker is started on its own account only where so much memory is left for it, or what the largest takes."""

_consumers: dict[Engine, weakref.ref[object] | None] = {}
"""The iterators that engines end with, until they begin to close. In a forked child there are none."""

_BATCH = Kind.BATCH
_number = attrgetter("ticket")
_new = tuple.__new__  # a NamedTuple's own `__new__` is written in Python, and takes three times as long


class State(enum.Enum):
    """Where an engine is in its life."""

    NEW = enum.auto()  # workers are not started
    OPEN = enum.auto()  # batches are made
    CLOSING = enum.auto()  # workers are ending, nothing is handed over any more
    CLOSED = enum.auto()  # nothing is left


class Engine:
    """Owner of a pool of workers, for one run over the data or, with persistent workers, for one after the other.

    Args:
        portal: Where it lives.
        loop: The portal's, for all that belongs to this engine.
        pool: The workers, not started yet.
        run: The first run.
        options: The options that the workers are started with.
        finisher: Copies batches into page-locked memory; None where that is not asked.
        controller: Decides how many workers there are to be; None where the user does.
        tell: Is told of each number that the controller decides on.

    Attributes:
        error: Why no more batches are made, if that is no consumer's wish; each consumer is told.
    """

    def __init__(
        self,
        portal: Portal,
        loop: GuardedLoop,
        pool: Backend[Any],
        run: Run,
        options: Options,
        finisher: Finisher | None = None,
        controller: Controller | None = None,
        tell: Callable[[int], object] = bool,
    ) -> None:
        self.portal = portal
        self._loop = loop
        self.pool = pool
        self.state: State = State.NEW
        self.pid: int = os.getpid()
        self.run: Run = run
        self._finisher = finisher
        self.recovery: Recovery = Recovery(options)
        self.workforce: Workforce = Workforce(options)
        self._controller = controller
        self._tell = tell
        self._due = 0.0  # when it is worth looking at the number of workers again; on the clock of outcomes
        self._next_runs: deque[Run] = deque()
        self._closed = threading.Event()
        self.error: BaseException | None = None
        self._num_errors = 0
        self._is_settling = False  # the loop is about to call `_settle`
        self._is_started = False  # all workers of the first run were launched
        self._heard_at = perf_counter()  # when the last outcome of a worker came, or another worker was started
        self._hangs = HangWatch()
        self._watch: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Engine {self.state.name} {self.run.scheduler!r} {self.pool!r}>"

    # -------------------------------------------------------------------------------------------- any thread

    def push(self, run: Run) -> None:
        """Have another run begin, and what is left of the last one dropped."""
        # Appended before the loop thread is woken: it is there when that looks, or when that looks next.
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
        """Have the loop call something of this engine.

        Raises:
            LoaderClosedError: if there is no loop any more.
        """
        self.portal.post(self._loop.run, function, *args)

    def close_with(self, consumer: object) -> None:
        """Begin to close when this is dropped.

        Its last reference may go in any thread, also inside gc. Python runs the handlers of signals where a function
        begins; what they raise out of the callback of a weak reference is printed and forgotten, and workers would stay
        for ever. So there is no function of Python in this callback: uvloop's method is compiled.
        """
        on_dropped = partial(self._loop.loop.call_soon_threadsafe, self._loop.run, lambda _: self._close(END_GRACE_S))
        _consumers[self] = weakref.ref(consumer, on_dropped)

    def request_close(self) -> None:
        """Begin to close, and return. An interrupt leaves it undone: to be called again, or the consumer is dropped."""
        # The loop thread may move the state meanwhile: then it closes already, and `_close` is called once more.
        if self.pid == os.getpid() and self.state in (State.NEW, State.OPEN):
            with contextlib.suppress(LoaderClosedError):
                self.post(self._close, END_GRACE_S)

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
        """Start the workers and begin the first run. Not on the loop thread: forked workers are copies of the caller.

        They find what belongs to a consumer's thread, as workers of torch's loader do: connections to SQLite,
        thread-locals.
        """
        self.portal.launch(self._steps())

    def _steps(self) -> Generator[Callable[[], None], None, None]:
        """Start; what is yielded launches a worker, and is to be called before the next step."""
        try:
            if self.portal.is_closing:
                raise exiting()
            self.pool.listener = self
            self.portal.sessions.add(self)  # until the pool tells of its end
            self._loop.on_error = self._on_error
            self.state = State.OPEN
            self._watch_consumers()
            self._read_inbox()  # workers find their tickets waiting, and work while the next ones are started
            yield from self.pool.start(self.run.epoch, self._settle)
            self._is_started = True
        except BaseException as error:
            if not isinstance(error, GeneratorExit):  # whoever launched them was interrupted, and has no iterator
                self._stop(error)
            self.close_soon(0.0)
            raise

    def close_soon(self, grace_s: float) -> None:
        """Tell the workers to end; wake whoever waits."""
        self._loop.run(self._close, grace_s)

    def _close(self, grace_s: float) -> None:
        _consumers.pop(self, None)
        if self.state is State.CLOSED:
            return
        self.state = State.CLOSING
        with contextlib.ExitStack() as steps:  # from the last one up, and each whatever others raise
            steps.callback(self.pool.end, grace_s)
            if self._finisher is not None:
                steps.callback(self._finisher.stop)
            steps.callback(self.run.meter.write_trace)
            if self._watch is not None:
                steps.callback(self._watch.cancel)
            steps.callback(self._read_inbox)
            steps.callback(self.run.close)

    def on_closed(self) -> None:
        """All workers are gone."""
        self.portal.sessions.discard(self)
        self._loop.on_error = None
        self._closed.set()
        self.state = State.CLOSED

    def _stop(self, error: BaseException) -> None:
        """End the run with this error: consumers first take the batches that are ready, then each raises it once."""
        # A copy, without the frames of whoever starts workers: through them it would keep the iterator alive.
        self.error = kept = another(error).with_traceback(None)
        self.run.hand_over()  # batches that have come in this turn of the loop come before the error
        for run in (self.run, *self._next_runs):
            run.stop(kept)

    def _on_error(self, error: BaseException) -> None:
        """Something in here, or in what belongs to it, has failed: end with it, whatever else fails."""
        self._num_errors += 1
        is_first = self.error is None and self.state is State.OPEN
        try:
            with contextlib.ExitStack() as steps:
                steps.callback(self._close, END_GRACE_S if is_first else 0.0)
                if is_first:
                    steps.callback(self._stop, internal(error, self.run.meter.last_events()))
                else:  # nobody waits for anything any more
                    words = "asyncloader has failed while it ended workers: please report this"
                    steps.callback(log.error, words, exc_info=error)
        except BaseException:
            self._num_errors = _MOST_ERRORS
        if self._num_errors >= _MOST_ERRORS:
            self._abandon()

    def _abandon(self) -> None:
        """Abandon what cannot be ended: kill its workers, and wait for nothing more."""
        self._loop.close()
        for worker in self.pool.processes.values():
            with contextlib.suppress(BaseException):
                worker.kill()
        self.on_closed()

    @property
    def _is_at_work(self) -> bool:
        """Whether somebody waits for what workers make: not while they end, nor after they were given up."""
        return self.state is State.OPEN and self.error is None

    # ------------------------------------------------------------------------------------------- runs and tickets

    def _read_inbox(self) -> None:
        if self.state is State.NEW:
            return
        while self._next_runs:
            self._begin_run(self._next_runs.popleft())
        batches, plan_ended = self.run.read_inbox()
        if not self._is_at_work:
            return
        if batches:
            self.run.meter.story.append(("planned", len(batches)))
            self.run.scheduler.planned(batches)
        if plan_ended:
            self._tell_scheduler("plan_ended")
        if not self._is_settling:
            self._settle()

    def _begin_run(self, run: Run) -> None:
        """Begin another run with the same workers. Batches of the last one that are not made yet are dropped."""
        last, self.run = self.run, run
        if self.state is not State.OPEN:
            if self.error is not None:
                run.stop(self.error)
            run.close()
            return
        self._carry_over(last)
        self.pool.begin_epoch(run.epoch)
        if self._is_at_work:
            self._fill_places()

    def _carry_over(self, last: Run) -> None:
        """Note where workers are at the beginning of another run: their datasets are those of the last one."""
        self.recovery.is_first_run = False
        news = self.run.epoch.notice.since(last.epoch.notice)
        if not self.run.is_stream:
            self.run.begin_at({worker: track.start.told(news) for worker, track in last.tracks.items()})
        elif last.ends:
            ends = {worker: WorkerStart(0, state, epochs=news) for worker, state in last.ends.items()}
            self.run.begin_at({**(self.run.epoch.starts or {}), **ends})

    def _fill_places(self) -> None:
        """Have workers that have no process get one, and those go that are not wanted: a run has begun."""
        run, processes = self.run, self.pool.processes
        for worker in sorted(self.workforce.wanted):
            if (process := processes.get(worker)) is not None:
                if not process.is_alive:
                    self._carry_out(self.recovery.fill(process, run.start_of(worker)))
            elif worker in run.scheduler.takers and self._is_started:  # otherwise it is about to be launched
                self._start(worker, 0.0)
        if self._controller is not None:
            self._controller.begin_run()
        self._due = 0.0
        self._carry_out(self.workforce.settle(run.scheduler, processes))
        self._look_who_is_up()
        self._renew_grown()

    def _look_who_is_up(self) -> None:
        """Note whether all workers have opened the dataset. Those that come later, or again, are not waited for."""
        scheduler, processes = self.run.scheduler, self.pool.processes
        scheduler.are_up |= all(each in processes and processes[each].is_ready for each in scheduler.takers)

    def on_outcomes(self, worker: int, came: Sequence[Came]) -> None:
        """Outcomes of tickets of this worker have come, with one read of its channel."""
        if not self._is_at_work:
            return
        run, scheduler, finisher = self.run, self.run.scheduler, self._finisher
        records, numbers, has_tracks = list[Record](), list[int](), bool(run.tracks)
        event: list[Any] = ["made", worker, numbers]
        run.meter.story.append(event)
        for outcome, arrived_at, read_at in came:
            record = outcome.record
            if outcome.kind != _BATCH:
                self._on_no_batch(worker, outcome)
                continue
            records.append(record)
            number = record.ticket
            ticket = scheduler.returned(worker, number)
            row = [*record, *(worker, number, outcome.nbytes, ticket.sent_at, arrived_at, read_at, 0.0, read_at)]
            item = _new(Item, (outcome, number, worker, row, -1, None, True))
            if has_tracks:
                item = run.answered(item, ticket)
            if finisher is None:
                scheduler.ready(number, item, outcome.nbytes)
            else:
                finisher.finish(item, partial(self._on_finished, run))
        if records:
            numbers += map(_number, records)
            run.meter.made(worker, records)
            last = records[-1]
            event += outcome.nbytes, last.busy_s, last.wait_s
            scheduler.measured(worker, ticket, last, outcome.nbytes)
        if self.workforce.most_in_hand is not None:
            has_grown = self.workforce.has_grown(worker, record.private_bytes)
            if has_grown and scheduler.has_more:  # otherwise the next run is soon enough for a new process
                self._renew_grown()
        if not self._is_settling:  # it is the first read of this turn of the loop
            self._heard_at = arrived_at
            self.recovery.reset()
            if arrived_at >= self._due:
                self._look_how_many(arrived_at)
            self._settle_soon()

    def _on_no_batch(self, worker: int, outcome: Outcome) -> None:
        """A worker has made no batch of a ticket, or its data have ended, or its keys have not come out of a pickle."""
        run, number = self.run, outcome.record.ticket
        if outcome.kind == Kind.REFUSED:
            self._refuse(worker, number, outcome.error.rebuild(None), "cannot be unpickled in")
        elif outcome.kind == Kind.EXHAUSTED:
            if isinstance(outcome.snapshot, Frozen):
                run.ends[worker] = outcome.snapshot
            self._tell_scheduler("exhausted", worker)
        else:
            ticket = self._tell_scheduler("returned", worker, number)
            item = Item(run.rebuilt(outcome, ticket), number, worker)
            self._came(ticket, run.answered(item, ticket) if run.tracks else item)

    def _came(self, ticket: Ticket, item: Item) -> None:
        """Have what stands in the place of a batch handed over when its turn has come."""
        run = self.run
        if item.outcome.kind == Kind.LEFT_OUT:
            run.faults.left_out.append(run.named(ticket).keys)
        run.meter.story.append(("ready", item.batch))
        run.scheduler.ready(item.batch, item)

    def _tell_scheduler(self, event: str, *facts: Any) -> Any:
        """Tell the scheduler of an event that is not one of many, and note it for the story of the run."""
        self.run.meter.story.append((event, *facts))
        return getattr(self.run.scheduler, event)(*facts)

    def _on_finished(self, run: Run, item: Item) -> None:
        """Take a batch that was pinned beside the loop, or the error in its place."""
        if run is self.run and self.state is State.OPEN:
            run.meter.story.append(("ready", item.batch))
            run.scheduler.ready(item.batch, item, item.outcome.nbytes)
            self._settle_soon()

    def _refuse(self, worker: int, number: int, error: Exception, why: str = "cannot be sent to") -> None:
        """Hand over why the keys of a ticket have not reached the worker, in its place. No dataset has seen them."""
        ticket = self._tell_scheduler("returned", worker, number)
        names = describe_keys(self.run.named(ticket).keys)
        with_notes(error, [f"The sampler yielded {names}, which {why} a worker process."])
        self._came(ticket, failed(error, ticket.batch))

    def _settle_soon(self) -> None:
        """Settle in the loop's next turn: what else comes in this one is settled with it."""
        if not self._is_settling:
            self._is_settling = True
            self._loop.call_soon(self._settle)

    def _settle(self) -> None:
        """Have tickets given out and sent, and batches handed over, for all that has happened since the last time."""
        self._is_settling = False
        run = self.run
        run.meter.story.append(("assign",))
        while actions := run.scheduler.assign():
            self._carry_out(actions)
        if run.scheduler.delivered:
            run.hand_over()
        run.follow()
        if run.scheduler.outbox and self.error is None:
            self._send()

    def _send(self) -> None:
        """Give workers their tickets, one message for each; what is for one that is not started yet waits."""
        run, most = self.run, self.workforce.most_in_hand
        outbox, in_flight, now = run.scheduler.outbox, run.scheduler.in_flight, perf_counter()
        for worker, tickets in tuple(outbox.items()):
            if not self._is_there(worker):
                room = 0
            elif most is None:
                room = len(tickets)
            else:
                room = max(0, most - (len(in_flight[worker]) - len(tickets)))
            if room < len(tickets):
                outbox[worker] = tickets[room:]
                for ticket in outbox[worker]:
                    ticket.sent_at = ticket.sent_at or now  # from now on nothing but the worker is waited for
            else:
                del outbox[worker]
            if room:
                for number, error in self.pool.send(worker, run.given(worker, tickets[:room], now)):
                    self._refuse(worker, number, error)
                    self._settle_soon()

    # ----------------------------------------------------------------------------------------------- their workers

    def on_ready(self, worker: int) -> None:
        """A worker has opened the dataset."""
        self.recovery.ready(worker)
        if self._is_at_work:
            self._carry_out(self.workforce.ready(worker, self.run.scheduler))
            self._look_who_is_up()
            self._settle()

    def on_room(self) -> None:
        """Start one more of the workers that take tickets, which wait for it."""
        if missing := self.run.scheduler.in_flight.keys() - self.pool.processes.keys():
            self._launch(min(missing))

    def on_died(self, worker: int, process: Worker) -> None:
        """A worker's process ended on its own."""
        if self._is_at_work:
            decided = self.recovery.died(
                process,
                self.run.start_of(worker),
                is_active=worker in self.run.scheduler.in_flight,
                is_coming=worker in self.workforce.coming,
                is_alone=self._is_alone(),
            )
            self._carry_out(decided)
            self._settle()

    def on_away(self, worker: int) -> None:
        """A worker is not there for now, through no fault of its tickets: others do these."""
        if self._is_at_work:
            self._tell_scheduler("lost", worker)
            if worker in self.workforce.wanted:
                self.workforce.coming.add(worker)
            self._settle_soon()

    def resize(self, num_workers: int) -> None:
        """Have so many workers from now on: nobody looks after their number any more."""
        self._controller = None
        self._want(num_workers)

    def _want(self, num_workers: int) -> None:
        self.workforce.want(num_workers)
        self.recovery.num_workers = num_workers
        if self._is_at_work:
            self._carry_out(self.workforce.settle(self.run.scheduler, self.pool.processes))
            self._settle()

    def _look_how_many(self, now: float) -> None:
        """Have as many workers as are worth it, if that looks after itself."""
        if (controller := self._controller) is None:
            self._due = math.inf
            return
        run, here = self.run, len(self.workforce.wanted)
        stats = run.meter.stats()
        controller.observe(now, len(run.scheduler.takers), stats)
        if controller.num_workers > here:
            each = max([_WORKER_BYTES, *(worker.private_bytes for worker in stats.workers.each)])
            room = (available_bytes() - total_bytes() // 20) // each
            controller.num_workers = min(controller.num_workers, here + max(0, room))
        if (wanted := controller.num_workers) != here:
            log.info('num_workers="auto": %d in place of %d: %s', wanted, here, controller.reason)
            self._want(wanted)
            self._tell(wanted)
        self._due = controller.due

    def _renew_grown(self) -> None:
        """Have workers leave that have grown too large: others take their places."""
        scheduler = self.run.scheduler
        for worker, private_bytes in self.workforce.grown.items():
            if worker in scheduler.takers:
                log.info("worker %d is renewed: it has %s to itself", worker, show_bytes(private_bytes))
                self._tell_scheduler("leaving", worker)

    # --------------------------------------------------------------------------------------------------- actions

    def _carry_out(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Fail():
                    self._fail(action)
                case Vacate():
                    self._vacate(action)
                case "start", worker, rest_s:
                    self._start(worker, rest_s)
                case "join", worker:
                    self._tell_scheduler("joined", worker)
                case "leave", worker:  # one that was not started yet leaves what it was to get
                    self._tell_scheduler("leaving" if self._is_there(worker) else "lost", worker)
                case "dismiss", worker:
                    self._dismiss(worker)
                case "replace", worker, rest_s:
                    self.run.faults.replacements += 1
                    self._start(worker, rest_s)
                case "discard", worker:
                    self.pool.dismiss(worker, 0.0)
                case "give up", error:
                    self._give_up(error)
                case _:
                    raise AssertionError(action)

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
        self._came(ticket, item)

    def _vacate(self, action: Vacate) -> None:
        """Tell the scheduler of a worker that was lost."""
        run, worker = self.run, action.worker
        run.forget_given(worker)
        run.faults.timeouts += action.hung
        facts = action.replaceable, action.was_ready, action.hung, action.rest_s
        run.meter.story.append(("vacated", worker, *facts))
        self._carry_out(run.scheduler.vacated(action))

    def _give_up(self, error: Exception) -> None:
        self._read_inbox()
        if lost := self._tell_scheduler("stopped"):
            count, keys = len({ticket.batch for ticket in lost}), describe_keys(self.run.named(lost[0]).keys)
            error.add_note(f"{count} batches that were planned are lost; the first has the indices {keys}.")
        self._stop(error)
        self._loop.call_soon(self._close, END_GRACE_S)

    def _dismiss(self, worker: int) -> None:
        """Let a worker go that has nothing in hand. If it is wanted, it was too large: another takes its place."""
        self.pool.dismiss(worker, END_GRACE_S)
        if worker in self.workforce.wanted:
            self.run.meter.renewed(worker)
            self._start(worker, 0.0)

    def _start(self, worker: int, rest_s: float) -> None:
        """Start a process under this id in a later turn of the loop, after a rest. Nobody waits for one that joins."""
        if worker not in self.run.scheduler.takers:
            self.workforce.coming.add(worker)
        self._loop.call_later(rest_s, while_alive(self._launch, None), worker)

    def _launch(self, worker: int) -> None:
        """Start a process under this id, unless it is there, or is not to be any more; without room for it, later."""
        run, is_taker = self.run, worker in self.run.scheduler.takers
        if not self._is_at_work or self._is_there(worker) or not (is_taker or worker in self.workforce.wanted):
            return
        if run.epoch.starts is not None and worker in run.tracks:
            run.epoch.starts[worker] = run.tracks[worker].start
        try:
            self.pool.add(worker, len(self.workforce.wanted))
        except Exception as error:
            self._carry_out(self.recovery.not_launched(worker, error, is_active=is_taker, is_alone=self._is_alone()))
        else:
            self.workforce.reset(worker)
            self._heard_at = perf_counter()
            run.meter.story.append(("started", worker))
        self._settle()  # what has waited for the worker is sent, or given to others

    def _is_there(self, worker: int) -> bool:
        """Whether a worker has a process that lives."""
        process = self.pool.processes.get(worker)
        return process is not None and process.is_alive

    def _is_alone(self) -> bool:
        """Whether no worker is there that takes tickets."""
        return not any(map(self._is_there, self.run.scheduler.takers))

    # ----------------------------------------------------------------------------------------- waits that are long

    def _watch_consumers(self) -> None:
        """Look every so often whether a consumer waits for too long."""
        self._watch = self._loop.call_later(hang_report.LOOK_S, self._watch_consumers)
        run, is_waiting = self.run, self.run.handoff.is_awaited
        slowest_s = run.meter.stats().stages.work.longest_s if is_waiting else 0.0
        waited_s = self._hangs.look(monotonic(), run.taken, is_waiting=is_waiting, slowest_s=slowest_s)
        if waited_s is not None:
            hang_report.report(run, self.pool, waited_s, self._loop.call_later)

    def look_for_overdue(self, run: Run, timeout_s: float) -> None:
        """Find out what the awaited batch waits for, and do about it what ``on_timeout`` says. Tell the run of it.

        Args:
            run: The run that a consumer waits for.
            timeout_s: How long it was waited for. Seconds.
        """
        ticket = run.scheduler.awaited()
        if ticket is None or not self._is_there(ticket.worker):  # that comes after a rest; or it is being pinned
            self._kill_late_starts(timeout_s)
            silent_s = perf_counter() - self._heard_at
            waits_on = ticket is not None or self.recovery.waits_on(timeout_s, silent_s)
            why = run.plan.why_late() if run.plan.are_awaited else ""
            run.answer(None if waits_on else timed_out(timeout_s, why=why))
            return
        process = self.pool.processes[ticket.worker]
        process.ask_stack(ticket.batch, lambda stack: run.answer(self._on_stack(timeout_s, ticket, process, stack)))

    def _kill_late_starts(self, timeout_s: float) -> None:
        """Kill workers that should have joined by now: they have no tickets, so nobody else waits for one of them."""
        for worker in self.workforce.coming & self.pool.processes.keys():
            process = self.pool.processes[worker]
            if self.recovery.starts_too_long(process, timeout_s, monotonic() - process.started_at):
                log.warning("Worker %d has not opened the dataset for too long. It is killed and replaced.", worker)
                process.kill()
                self._heard_at = perf_counter()  # the next one is started when the death of this one has been seen

    def _on_stack(self, timeout_s: float, ticket: Ticket, process: Worker, stack: str) -> BatchTimeoutError | None:
        run, worker = self.run, ticket.worker
        has_ticket = run.scheduler.in_flight.get(worker, {}).get(ticket.batch) is ticket
        is_held, age_s = has_ticket and self.pool.processes.get(worker) is process, monotonic() - process.started_at
        found = Overdue(timeout_s, run.named(ticket), process, stack, age_s, is_held, self._is_at_work)
        decided = self.recovery.overdue(found, run.start_of(worker))
        if isinstance(decided, BatchTimeoutError):
            return decided
        self._carry_out(decided)
        self._settle()
        return None


def _forget_consumers() -> None:
    """In a forked child: what is dropped here closes nothing, and engines, which are the parent's, stay."""
    for engine in _consumers:
        _consumers[engine] = None


os.register_at_fork(after_in_child=_forget_consumers)
