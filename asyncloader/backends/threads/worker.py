"""A worker in the trainer's process: a thread, or a task on the portal's loop (num_workers=0, async datasets).

    NEW ── start ──> RUNNING ── end ──> ENDING ── it has ended, or was abandoned ──> DEAD
                        └────────── it has ended by itself, or was abandoned ─────────^

A thread cannot be killed: one that hangs is left alone, hung up, and ends when what it is at returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import sys
import threading
import time
from functools import partial
from time import perf_counter
from typing import Any

from torch.utils.data import ChainDataset, ConcatDataset, StackDataset, Subset

from asyncloader import threads
from asyncloader.backends.backend import Backend
from asyncloader.backends.threads.transport import LocalTransport
from asyncloader.backends.worker import Worker, WorkerState
from asyncloader.errors import could_not_start
from asyncloader.loops import GuardedLoop
from asyncloader.messages.messages import EpochSpec, Kind, WorkerSpec
from asyncloader.messages.outcome import OUTCOMES
from asyncloader.stack_text import stack_of
from asyncloader.worker.overlap_loop import OverlapLoop, make_loop
from asyncloader.worker.serial_loop import SerialLoop
from asyncloader.worker.transport import ParentGone

_HANDOVER_S = 3.0
"""A worker waits so long for others on the same loop to close what the same dataset has open."""

_closing: dict[asyncio.Task[None], Any] = {}
"""By worker on the portal's loop that was told to finish, or cancelled, its dataset: others wait until it is closed."""


def _closed(task: asyncio.Task[None]) -> None:
    _closing.pop(task, None)


class LocalWorker(Worker):
    """A worker in this process. Belongs to the loop thread, but for what `WorkerProcess` too allows to others.

    Args:
        worker_id: From 0.
        loop: The portal's.
        owner: Is told what the worker makes, and of its end.
        on_thread: The worker has a thread of its own; otherwise it works on the portal's loop.
    """

    def __init__(
        self,
        worker_id: int,
        loop: GuardedLoop,
        owner: Backend[LocalWorker],
        on_thread: bool,
    ) -> None:
        super().__init__(worker_id, loop)
        self.pid: int = os.getpid()
        self._owner: Backend[LocalWorker] | None = owner  # until the end
        where = f"in DataLoader worker thread {worker_id}" if on_thread else ""
        self._transport = LocalTransport(where, self._post)
        self._answering: SerialLoop | None = None
        self._thread: threading.Thread | None = None
        self._task: asyncio.Task[None] | None = None
        self._dataset: Any = None
        self._on_thread = on_thread
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<LocalWorker {self.worker_id} {self.state.name}>"

    # -------------------------------------------------------------------------------------------------- lifecycle

    def start(self, spec: WorkerSpec, epoch: EpochSpec) -> None:
        """Start the thread, or the task."""
        name = f"asyncloader worker {self.worker_id} of {type(spec.dataset).__name__}"
        if self._on_thread:
            try:
                self._thread = threads.start(partial(self._run, spec, epoch), name)
            except RuntimeError as error:
                raise could_not_start(OSError(11, str(error))) from error
        else:
            self._dataset = spec.dataset
            self._task = self._loop.loop.create_task(self._serve(spec, epoch), name=name)
            # Also if it was cancelled before its first step, with all others of the loop.
            self._task.add_done_callback(lambda _: self._loop.run(self._on_end))
        self.state: WorkerState = WorkerState.RUNNING
        self.started_at: float = time.monotonic()

    def _run(self, spec: WorkerSpec, epoch: EpochSpec) -> None:
        try:
            self._make_loop(spec, epoch).work()
        except ParentGone:
            pass
        except BaseException as error:
            self._report(error)
        finally:
            with contextlib.suppress(RuntimeError):  # at interpreter exit the loop is closed
                self._loop.call_soon_threadsafe(self._on_end)

    async def _serve(self, spec: WorkerSpec, epoch: EpochSpec) -> None:
        """Work on the portal's loop, where others may still be closing what the same dataset has open."""
        if self.state is WorkerState.ENDING:  # nothing was opened; `_closing` has this very task, too
            return
        here = asyncio.get_running_loop()
        others = {task for task, of in _closing.items() if of is spec.dataset and task.get_loop() is here}
        if others:
            await asyncio.wait(others, timeout=_HANDOVER_S)
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

    def _make_loop(self, spec: WorkerSpec, epoch: EpochSpec) -> SerialLoop:
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
            self._loop.call_soon_threadsafe(self._loop.loop.call_exception_handler, context)

    def end(self, grace_s: float) -> None:
        """Tell the worker to finish; abandon it after ``grace_s`` seconds."""
        if not self.is_alive:
            return
        self.state = WorkerState.ENDING
        self._note_closing()
        self._transport.put(Kind.END)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(max(grace_s, 0.0), self.kill)

    def _note_closing(self) -> None:
        if self._task is not None and not self._task.done():
            _closing[self._task] = self._dataset
            self._task.add_done_callback(_closed)

    def kill(self) -> None:
        """Hang up, and cancel what can be cancelled."""
        if not self.is_alive:
            return
        self._transport.hang_up()
        self._note_closing()
        if self._task is not None:
            self._task.cancel()
        self._on_end(is_abandoned=True)

    def _on_end(self, *, is_abandoned: bool = False) -> None:
        if self.state is WorkerState.DEAD:
            return
        expected = is_abandoned or self.state is WorkerState.ENDING
        if self._timer is not None:
            self._timer.cancel()
        if is_abandoned:
            self._thread = None
        self.state = WorkerState.DEAD
        self._dead.set()
        self._tell_stack()
        # The pool, and what answers, refer to this worker as well: in a cycle, the user's dataset and what it has open
        # would be there until a garbage collection, long after the loader was dropped.
        owner, self._owner = self._owner, None
        self._answering = self._dataset = None
        if owner is not None:
            owner.on_exit(self, expected)

    def wait_dead(self, timeout_s: float | None) -> bool:
        """Wait until it has ended, or was abandoned. Not on the loop thread."""
        began = time.monotonic()
        if not super().wait_dead(timeout_s):
            return False
        if (thread := self._thread) is not None:
            thread.join(None if timeout_s is None else max(0.0, timeout_s - (time.monotonic() - began)))
        return True

    # --------------------------------------------------------------------------------------------------- messages

    def put(self, kind: int, contents: Any) -> None:
        """Send it a message."""
        self._transport.put(kind, contents)

    def _post(self, kind: int, body: Any) -> None:
        if kind in OUTCOMES and self._task is not None and self._task.cancelling():
            return  # a loop that ends cancels samples and worker alike: that is no failure of a sample
        with contextlib.suppress(RuntimeError):  # at interpreter exit the loop is closed
            self._loop.call_soon_threadsafe(self._on_message, kind, body, perf_counter())

    def _on_message(self, kind: int, body: Any, arrived_at: float) -> None:
        if self._owner is not None:
            self._owner.on_message(self, kind, body, arrived_at)

    # ---------------------------------------------------------------------------------------------------- stacks

    def _ask(self, ticket: int) -> None:
        """Ask the worker's loop, if it has one: its tasks can be looked at safely only from the thread of the loop."""
        if isinstance(self._answering, OverlapLoop):
            self._transport.put(Kind.WHERE, ticket)
        else:
            self._tell_stack()

    def _stack(self, awaits: str) -> str:
        thread = self._thread
        frame = sys._current_frames().get(thread.ident or 0) if thread is not None else None
        return awaits if frame is None else f"{awaits}The thread is at:\n{stack_of(frame)}"


def private_copy(dataset: Any) -> Any:
    """Copy the dataset, and those inside torch's wrappers, but share what they hold.

    So what one worker sets on it (a session that belongs to its loop, a file that is opened at first use, what
    ``worker_init_fn`` changes) is not seen by others, and the data themselves are there once. Objects that cannot be
    copied are shared.
    """
    try:
        copied = copy.copy(dataset)
    except Exception:
        return dataset
    if isinstance(copied, Subset):
        copied.dataset = private_copy(copied.dataset)
    elif isinstance(copied, StackDataset):
        inner = copied.datasets
        if isinstance(inner, dict):
            copied.datasets = {name: private_copy(member) for name, member in inner.items()}
        else:
            copied.datasets = tuple(map(private_copy, inner))
    elif isinstance(copied, (ConcatDataset, ChainDataset)) and isinstance(copied.datasets, (list, tuple)):
        copied.datasets = [private_copy(member) for member in copied.datasets]
    return copied
