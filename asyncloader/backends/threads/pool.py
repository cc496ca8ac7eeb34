"""Workers in this process: on threads of their own, or one on a loop (num_workers=0, async datasets).

    session ── start, send, add, dismiss, end ──> LocalPool ── one LocalWorker with a LocalTransport per worker id
            <── on_ready, on_outcome, ... ── (posted to the loop)

The loops over tickets are those of worker processes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from asyncloader.backends.backend import Launch, Listener
from asyncloader.backends.threads.worker import LocalWorker, private_copy
from asyncloader.epochs import listeners
from asyncloader.errors import LoaderClosedError
from asyncloader.messages.copied_dataset import CopiedDataset
from asyncloader.messages.messages import EpochSpec, Kind, WorkerSpec
from asyncloader.messages.outcome import Outcome
from asyncloader.worker.guarded_loop import GuardedLoop

_NO_HOME = (
    "the event loop that the dataset ran on, for it holds objects of that loop, has ended or cancelled it: no more "
    "batches are made; call aiter(loader) on a loop that runs"
)


class LocalPool:
    """Owner of the workers of one iterator that run in this process; see `Pool` for the methods. Loop thread only.

    Args:
        loop: The portal's.
        spec: The spec of the workers.
        on_threads: Each on a thread; otherwise there is one, on a loop.
        home: The loop of the user's that it is on; None for the portal's.
        copied: The dataset in the spec, if it may change while workers are made of it. One that hears of epochs is
            copied here, in the consumer's thread: copies that are made later, of this one, have not heard of others.
    """

    has_processes = takes_long = False  # threads start at once

    def __init__(
        self,
        loop: GuardedLoop,
        spec: WorkerSpec,
        *,
        on_threads: bool,
        home: asyncio.AbstractEventLoop | None = None,
        copied: CopiedDataset | None = None,
    ) -> None:
        self.processes: dict[int, LocalWorker] = {}
        self.listener: Listener | None = None
        self._loop = loop
        is_copied = on_threads and any(True for _ in listeners(spec.dataset))
        self._spec = spec.with_dataset(private_copy(spec.dataset)) if is_copied else spec
        self._copied = copied
        self._on_threads = on_threads
        self._home = home
        self._epoch: EpochSpec
        self._leaving: set[LocalWorker] = set()
        self._closing = False

    def __repr__(self) -> str:
        return f"<LocalPool {list(self.processes.values())!r}>"

    def start(self, epoch: EpochSpec, started: Callable[[], None]) -> Iterator[Launch]:
        """Start one worker after the other; `started` is called after each. There is nothing to launch."""
        self._epoch = epoch
        for worker in range(max(1, self._spec.num_workers)):
            self.processes[worker] = self._start_one(worker, epoch)
            started()
        yield from ()

    def _start_one(self, worker: int, epoch: EpochSpec, before: LocalWorker | None = None) -> LocalWorker:
        started = LocalWorker(worker, self._loop, self, self._on_threads, before, self._home)
        started.start(self._spec, epoch)
        return started

    def discard(self, worker: int) -> None:
        """Abandon this worker, whose end then is nobody's concern: another will take its place."""
        self.processes[worker].kill()

    def dismiss(self, worker: int, grace_s: float) -> None:
        """Let this worker finish, if it is there: it has no tickets. Its place is free."""
        leaving = self.processes.pop(worker, None)
        if leaving is not None and leaving.is_alive:
            self._leaving.add(leaving)
            leaving.end(grace_s)

    def add(self, worker: int, num_workers: int) -> None:
        """Start a worker under this id: one more, or in the place of one that has ended or was discarded."""
        epoch = self._epoch if self._copied is None else self._copied.run_of_newcomer(self._epoch)
        epoch = epoch._replace(num_workers=num_workers if self._on_threads else 0)
        before = self.processes.pop(worker, None)
        self.processes[worker] = self._start_one(worker, epoch, before)

    def prepare(self, worker: int, num_workers: int) -> None:
        """Start nothing beforehand: threads start at once."""

    def begin_epoch(self, epoch: EpochSpec) -> None:
        """Begin a new run over the data; tickets of the last one are forgotten."""
        self._epoch = epoch
        for worker in self.processes.values():
            worker.put(Kind.EPOCH, epoch)

    def end(self, grace_s: float) -> None:
        """Tell all workers to finish; abandon what is left after ``grace_s`` seconds."""
        self._closing = True
        for worker in self._everyone():
            worker.end(grace_s)
        self._maybe_closed()

    def wait_dead(self, timeout_s: float) -> bool:
        """Wait until all workers are gone. In any thread but the loop's."""
        deadline = time.monotonic() + timeout_s
        waits = [worker.wait_dead(max(0.0, deadline - time.monotonic())) for worker in self._everyone()]
        return all(waits)

    def send(self, worker: int, tickets: Sequence[tuple[int, Any]]) -> Sequence[tuple[int, Exception]]:
        """Give the worker tickets. Nothing is pickled."""
        self.processes[worker].put(Kind.TICKETS, tickets)
        return ()

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
        return self.listener if worker.is_alive and self.processes.get(worker.worker_id) is worker else None

    def on_exit(self, worker: LocalWorker, expected: bool) -> None:
        """A worker has ended, or was abandoned."""
        self._leaving.discard(worker)
        if not (expected or self._closing) and self.listener is not None:
            if self._home is None:
                self.listener.on_died(worker.worker_id, worker)
            else:  # no other worker could have that loop
                self.listener.on_failed(LoaderClosedError(_NO_HOME))
        self._maybe_closed()

    def _maybe_closed(self) -> None:
        is_over = self._closing and not any(worker.is_alive for worker in self._everyone())
        if is_over and self.listener is not None:
            self.listener.on_closed()
            self.listener = None

    def _everyone(self) -> tuple[LocalWorker, ...]:
        return (*self.processes.values(), *self._leaving)
