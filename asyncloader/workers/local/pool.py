"""Workers in this process: on threads of their own, or one on the portal's loop (num_workers=0, async datasets).

    session ── start, send, replace, end ──> LocalPool ── one LocalWorker with a LocalTransport per worker id
            <── on_ready, on_outcome, ... ── (posted to the loop)

The same servers as in worker processes; nothing is pickled. A thread cannot be killed: one that hangs is left alone,
hung up, and ends when what it is at returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import perf_counter, thread_time
from typing import Any

import torch.utils.data._utils.worker as torch_worker

from asyncloader.errors import could_not_start
from asyncloader.transport.collate import recycling_collate
from asyncloader.workers.backend import STACK_TIMEOUT_S, Launch, Listener, WorkerState
from asyncloader.workers.child import threads
from asyncloader.workers.child.overlap_loop import OverlapLoop, make_loop
from asyncloader.workers.child.serial_loop import SerialLoop
from asyncloader.workers.child.transport import ParentGone
from asyncloader.workers.local.copies import private_copy
from asyncloader.workers.local.sizes import batch_bytes
from asyncloader.workers.local.worker_info import set_worker_info
from asyncloader.workers.protocol.failure import LocalError
from asyncloader.workers.protocol.messages import EpochSpec, Kind, WorkerSpec
from asyncloader.workers.protocol.outcome import Batch, Outcome

_HANDOVER_S = 3.0
"""A worker that takes the place of a hung one on the same loop waits so long for it to close what it has open."""


class LocalTransport:
    """Both ends of the connection: messages in through a queue, outcomes out as calls on the parent's loop.

    Args:
        where: For the words of errors; "" on the portal's loop, where there is no worker in the user's eyes.
        post: Gives a message, kind and contents, to the parent.
        post_outcome: Gives it what has become of a ticket.
    """

    is_remote = False
    cpu_clock = staticmethod(thread_time)

    def __init__(self, where: str, post: Callable[[int, Any], None], post_outcome: Callable[[Outcome], None]) -> None:
        self.where = where
        self._post = post
        self._post_outcome = post_outcome
        self._messages: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._is_hung_up = False
        self._is_muted = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready: Callable[[], None]
        self._context: contextvars.Context
        self._collate: Callable[[Any], Any] | None = None

    # ----------------------------------------------------------------------------------------- the parent's side

    def put(self, kind: int, contents: Any = None) -> None:
        """Send the worker a message."""
        self._messages.put((kind, contents))
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # it has just ended, and so has its loop
                loop.call_soon_threadsafe(self._ready, context=self._context)

    def hang_up(self) -> None:
        """Take nothing from the worker any more, and have it end as soon as it looks."""
        self._is_hung_up = self._is_muted = True
        self.put(Kind.END)

    # ----------------------------------------------------------------------------------------- the worker's side

    def enter(self, worker_id: int, spec: WorkerSpec, open_dataset: Callable[[], Any]) -> None:
        """Become a worker in torch's eyes, in this thread. Its generators are everybody's: they are not seeded."""
        if self.where:
            info = torch_worker.WorkerInfo(
                id=worker_id,
                num_workers=spec.num_workers,
                seed=spec.base_seed + worker_id,
                dataset=open_dataset(),
                worker_method="thread",
            )
            set_worker_info(info)

    def leave(self) -> None:
        """Do nothing: the surroundings end with the thread."""

    def receive(self, *, wait: bool) -> tuple[int, Any] | None:
        """Return the next message."""
        try:
            message = self._messages.get(wait)
        except queue.Empty:
            message = None
        if self._is_hung_up:
            raise ParentGone
        return message

    def listen(self, loop: asyncio.AbstractEventLoop, ready: Callable[[], None]) -> None:
        """Have the parent call ``ready`` on the loop, in the context of this worker."""
        self._ready, self._context = ready, contextvars.copy_context()
        self._loop = loop
        loop.call_soon(ready)  # for what came before

    def unlisten(self) -> None:
        """Have it do so no more."""
        self._loop = None

    def ends(self, error: BaseException) -> bool:
        """Whether the worker cannot go on after this: the user's SystemExit is told instead, to who waits for it."""
        return isinstance(error, ParentGone)

    def capture(self, error: BaseException) -> Any:
        """Hand the exception over as it is."""
        return LocalError(error, self.where)

    def collate(self, collate_fn: Callable[[Any], Any], samples: Any) -> Any:
        """Make a batch, in memory that is used again where torch's default does it."""
        if self._collate is None:
            self._collate = recycling_collate(collate_fn)
        return self._collate(samples)

    def mute(self) -> None:
        """Hand nothing over from now on."""
        self._is_muted = True

    def send(self, kind: int, body: Any = None) -> None:
        """Hand a message over."""
        if not self._is_muted:
            self._post(kind, body)

    def send_outcome(self, held: list[Outcome]) -> None:
        """Hand over what has become of a ticket."""
        outcome = held.pop()
        if type(outcome) is Batch:
            outcome = Batch(outcome.record, outcome.data, batch_bytes(outcome.data), outcome.bad, outcome.snapshot)
        if not self._is_muted:
            self._post_outcome(outcome)


class LocalWorker:
    """A worker in this process. Belongs to the loop thread, but for what `WorkerProcess` too allows to others."""

    is_telling = True
    was_set_up = True

    def __init__(
        self,
        worker_id: int,
        loop: asyncio.AbstractEventLoop,
        pool: LocalPool,
        on_thread: bool,
        before: LocalWorker | None = None,
    ) -> None:
        self.worker_id = worker_id
        self.state = WorkerState.NEW
        self.pid = os.getpid()
        self.exitcode: int | None = None
        self.output = bytearray()
        self.is_ready = False
        self.started_at = 0.0
        self._loop = loop
        self._pool = pool
        self._before = before
        where = f"in DataLoader worker thread {worker_id}" if on_thread else ""
        self._transport = LocalTransport(where, self._post, self._post_outcome)
        self._answering: SerialLoop | OverlapLoop | None = None
        self._thread: threading.Thread | None = None
        self._task: asyncio.Task[None] | None = None
        self._on_thread = on_thread
        self._timer: asyncio.TimerHandle | None = None
        self._dead = threading.Event()
        self._stack_waiters: list[Callable[[str], None]] = []
        self._quiet_timer: asyncio.TimerHandle

    def __repr__(self) -> str:
        return f"<LocalWorker {self.worker_id} {self.state.name}>"

    @property
    def is_alive(self) -> bool:
        """Whether it is at work, or ending."""
        return self.state in (WorkerState.RUNNING, WorkerState.ENDING)

    # -------------------------------------------------------------------------------------------------- lifecycle

    def start(self, spec: WorkerSpec, epoch: EpochSpec) -> None:
        """Start the thread, or the task."""
        if self._on_thread:
            name = f"asyncloader worker {self.worker_id}"
            try:
                self._thread = threads.start(partial(self._run, spec, epoch), name)
            except RuntimeError as error:
                raise could_not_start(OSError(11, str(error))) from error
        else:
            self._task = self._loop.create_task(self._serve(spec, epoch))
        self.state = WorkerState.RUNNING
        self.started_at = time.monotonic()

    def _run(self, spec: WorkerSpec, epoch: EpochSpec) -> None:
        if spec.origin is not None:
            spec.origin.adopt()
        try:
            answering = self._make_loop(spec, epoch)
            with answering.modes():
                answering.open()
                answering.run()
                answering.close()
        except ParentGone:
            pass
        except BaseException as error:
            self._report(error)
        finally:
            with contextlib.suppress(RuntimeError):  # at interpreter exit the loop is closed
                self._loop.call_soon_threadsafe(self._on_end)

    async def _serve(self, spec: WorkerSpec, epoch: EpochSpec) -> None:
        """Work on the portal's loop, where another worker may still be closing what the same dataset has open."""
        if (before := self._before) is not None and before._task is not None:
            self._before = None
            await asyncio.wait({before._task}, timeout=_HANDOVER_S)
        try:
            answering = self._make_loop(spec, epoch)
            answering.open()
            assert isinstance(answering, OverlapLoop)
            await answering.serve()
            answering.close()
        except (ParentGone, asyncio.CancelledError):
            pass
        except BaseException as error:
            self._report(error)
        finally:
            self._on_end()

    def _make_loop(self, spec: WorkerSpec, epoch: EpochSpec) -> SerialLoop | OverlapLoop:
        if self._on_thread:
            spec = spec.with_dataset(private_copy(spec.dataset))
        self._answering = answering = make_loop(self.worker_id, self._transport, epoch, spec)
        return answering

    def _report(self, error: BaseException) -> None:
        """Write down what the user's code raised while it was closed, where nobody waits for anything."""
        if threads.is_ending:
            return
        context = {"message": f"A DataLoader worker ended with an exception ({self!r})", "exception": error}
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._loop.call_exception_handler, context)

    def end(self, grace_s: float) -> None:
        """Tell the worker to finish; abandon it after ``grace_s`` seconds."""
        if not self.is_alive:
            return
        self.state = WorkerState.ENDING
        self._transport.put(Kind.END)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(max(grace_s, 0.0), self.kill)

    def kill(self) -> None:
        """Hang up, and cancel what can be cancelled."""
        if not self.is_alive:
            return
        self._transport.hang_up()
        if self._task is not None:
            self._task.cancel()
        self._on_end(is_abandoned=True)

    def _on_end(self, *, is_abandoned: bool = False) -> None:
        if self.state is WorkerState.DEAD:
            return
        expected = is_abandoned or self.state is WorkerState.ENDING
        self.state = WorkerState.DEAD
        self.on_awaits("")
        if self._timer is not None:
            self._timer.cancel()
        if is_abandoned:
            self._thread = None
        self._dead.set()
        self._pool.on_exit(self, expected)

    def wait_dead(self, timeout_s: float | None) -> bool:
        """Wait until it has ended, or was abandoned. Not on the loop thread."""
        began = time.monotonic()
        if not self._dead.wait(timeout_s):
            return False
        if (thread := self._thread) is not None:
            thread.join(None if timeout_s is None else max(0.0, timeout_s - (time.monotonic() - began)))
        return True

    # --------------------------------------------------------------------------------------------------- messages

    def put(self, kind: int, contents: Any) -> None:
        """Send it a message."""
        self._transport.put(kind, contents)

    def _post(self, kind: int, body: Any) -> None:
        with contextlib.suppress(RuntimeError):  # at interpreter exit the loop is closed
            self._loop.call_soon_threadsafe(self._pool.on_message, self, kind, body)

    def _post_outcome(self, outcome: Outcome) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._pool.on_outcome, self, outcome, perf_counter())

    # ---------------------------------------------------------------------------------------------------- stacks

    def ask_stack(self, seq: int, tell: Callable[[str], None]) -> None:
        """Tell where the thread is, and at which awaits the samples of the ticket are.

        It is asked when somebody has waited too long, and disturbs nothing. The tasks of a loop can only be looked at
        safely from its own thread: on the portal we are there; a loop on a thread answers itself, if it turns.
        """
        answering = self._answering
        if not isinstance(answering, OverlapLoop):
            tell(self._thread_stack())
        elif self._task is not None:
            tell(answering.where(seq))
        else:
            self._stack_waiters.append(tell)
            if len(self._stack_waiters) == 1:
                self._quiet_timer = self._loop.call_later(STACK_TIMEOUT_S, self.on_awaits, "")
                self._transport.put(Kind.WHERE, seq)

    def on_awaits(self, awaits: str) -> None:
        """The worker's loop has answered where the samples of the ticket are, or did not in time."""
        waiters, self._stack_waiters = self._stack_waiters, []
        if waiters:
            self._quiet_timer.cancel()
            text = awaits + self._thread_stack()
            for tell in waiters:
                tell(text)

    def _thread_stack(self) -> str:
        thread = self._thread
        frame = sys._current_frames().get(thread.ident or 0) if thread is not None else None
        return f"The thread is at:\n{''.join(traceback.format_stack(frame))}" if frame is not None else ""


class LocalPool:
    """Owner of the workers of one iterator that run in this process; see `Pool` for the methods. Loop thread only.

    Args:
        loop: The portal's loop.
        spec: What the workers work with.
        on_threads: Each on a thread; otherwise there is one, on the loop itself.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, spec: WorkerSpec, *, on_threads: bool) -> None:
        self.processes: list[LocalWorker] = []
        self.listener: Listener | None = None
        self._loop = loop
        self._spec = spec
        self._on_threads = on_threads
        self._epoch: EpochSpec
        self._closing = False

    def __repr__(self) -> str:
        return f"<LocalPool {self.processes!r}>"

    @property
    def forks(self) -> bool:
        """Whether its workers are copies of the thread that launches them."""
        return False

    def start(self, epoch: EpochSpec, started: Callable[[], None]) -> Iterator[Launch]:
        """Start one worker after the other; `started` is called after each. There is nothing to launch."""
        self._epoch = epoch
        for worker in range(max(1, self._spec.num_workers)):
            self.processes.append(self._start_one(worker))
            started()
        yield from ()

    def _start_one(self, worker: int, before: LocalWorker | None = None) -> LocalWorker:
        started = LocalWorker(worker, self._loop, self, self._on_threads, before)
        started.start(self._spec, self._epoch)
        return started

    def discard(self, worker: int) -> None:
        """Abandon this worker, whose end then is nobody's concern: another will take its place."""
        self.processes[worker].kill()

    def replace(self, worker: int) -> None:
        """Start a new worker under this id, whose last one has ended or was discarded."""
        self.processes[worker] = self._start_one(worker, self.processes[worker])

    def begin_epoch(self, epoch: EpochSpec) -> None:
        """Begin a new run over the data; tickets of the last one are forgotten."""
        self._epoch = epoch
        for worker in self.processes:
            worker.put(Kind.EPOCH, epoch)

    def end(self, grace_s: float) -> None:
        """Tell all workers to finish; abandon what is left after ``grace_s`` seconds."""
        self._closing = True
        for worker in self.processes:
            worker.end(grace_s)
        self._maybe_closed()

    def wait_dead(self, timeout_s: float) -> bool:
        """Wait until all workers are gone. In any thread but the loop's."""
        deadline = time.monotonic() + timeout_s
        waits = [worker.wait_dead(max(0.0, deadline - time.monotonic())) for worker in tuple(self.processes)]
        return all(waits)

    def send(self, worker: int, tickets: Sequence[tuple[int, Any]]) -> None:
        """Give the worker tickets."""
        self.processes[worker].put(Kind.TICKETS, tickets)

    # ------------------------------------------------------------------------------------------------- receiving

    def on_message(self, worker: LocalWorker, kind: int, body: Any) -> None:
        """Take a message from a worker."""
        if (listener := self._listener_of(worker)) is None:
            return
        if kind == Kind.READY:
            worker.is_ready = True
            listener.on_ready(worker.worker_id)
        elif kind == Kind.AWAITS:
            worker.on_awaits(body)
        elif kind == Kind.ENDING:
            worker.put(Kind.CONFIRM, body)

    def on_outcome(self, worker: LocalWorker, outcome: Outcome, arrived_at: float) -> None:
        """Take what has become of a ticket."""
        if (listener := self._listener_of(worker)) is not None and outcome.record.epoch == self._epoch.number:
            listener.on_outcome(worker.worker_id, outcome, arrived_at)

    def _listener_of(self, worker: LocalWorker) -> Listener | None:
        """Return who listens to this worker; None if nobody does any more."""
        return self.listener if worker.is_alive and self.processes[worker.worker_id] is worker else None

    def on_exit(self, worker: LocalWorker, expected: bool) -> None:
        """A worker has ended, or was abandoned."""
        if not (expected or self._closing) and self.listener is not None:
            self.listener.on_died(worker.worker_id, worker)
        self._maybe_closed()

    def _maybe_closed(self) -> None:
        if self._closing and not any(worker.is_alive for worker in self.processes):
            listener, self.listener = self.listener, None
            if listener is not None:
                listener.on_closed()
