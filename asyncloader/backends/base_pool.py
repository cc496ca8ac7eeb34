"""The base of the pools of processes and of threads: places, workers that leave, and the end."""

from __future__ import annotations

import time
from time import perf_counter
from typing import Any, Generic, TypeVar

from asyncloader.backends.backend import Listener
from asyncloader.backends.worker import Worker
from asyncloader.messages.messages import EpochSpec, Kind, WorkerSpec
from asyncloader.messages.outcome import OUTCOMES
from asyncloader.worker.guarded_loop import GuardedLoop

AnyWorker = TypeVar("AnyWorker", bound=Worker)


class BasePool(Generic[AnyWorker]):
    """Owner of the workers of one iterator, on the loop thread; see `Backend` for the methods.

    Args:
        loop: The portal's.
        spec: The dataset and functions that the workers work with.
    """

    def __init__(self, loop: GuardedLoop, spec: WorkerSpec) -> None:
        self.processes: dict[int, AnyWorker] = {}
        self.listener: Listener | None = None
        self._loop = loop
        self._spec = spec
        self._epoch: EpochSpec
        self._leaving: set[AnyWorker] = set()  # without a place; nothing is told of them
        self._closing = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {list(self.processes.values())!r}>"

    def _epoch_of_newcomer(self, num_workers: int) -> EpochSpec:
        """Return the current run for a worker that starts in its middle, one of so many."""
        return self._epoch._replace(num_workers=num_workers)

    def dismiss(self, worker: int, grace_s: float) -> None:
        """Let this worker finish, if it is there: it has no tickets. Its place is free."""
        self._let_go(self.processes.pop(worker, None), grace_s)

    def _let_go(self, worker: AnyWorker | None, grace_s: float) -> None:
        if worker is not None and worker.is_alive:
            self._leaving.add(worker)
            worker.end(grace_s)

    def end(self, grace_s: float) -> None:
        """Tell all workers to finish; kill or abandon what is left after ``grace_s`` seconds."""
        self._closing = True
        for worker in self._everyone():
            worker.end(grace_s)
        self._maybe_closed()

    def wait_dead(self, timeout_s: float) -> bool:
        """Wait until all workers are gone, replaced ones too. In any thread but the loop's."""
        deadline = time.monotonic() + timeout_s
        waits = [worker.wait_dead(max(0.0, deadline - time.monotonic())) for worker in self._everyone()]
        return all(waits)

    def on_message(self, worker: AnyWorker, kind: int, contents: Any, arrived_at: float = 0.0) -> None:
        """Take a message from a worker; of one that nobody listens to any more it is dropped.

        Args:
            worker: The worker.
            kind: What the message is.
            contents: Of the message.
            arrived_at: When an outcome came.
        """
        listener = self.listener
        if listener is None or not worker.is_alive or self.processes.get(worker.worker_id) is not worker:
            return
        if kind in OUTCOMES:
            if contents.record.epoch == self._epoch.number:
                listener.on_outcomes(worker.worker_id, [(contents, arrived_at, perf_counter())])
        elif kind == Kind.READY:
            worker.is_ready = True
            listener.on_ready(worker.worker_id)
        elif kind == Kind.AWAITS:
            worker.on_awaits(contents)
        elif kind == Kind.ENDING:
            worker.put(Kind.CONFIRM, contents)

    def on_exit(self, worker: AnyWorker, expected: bool) -> None:
        """A worker is gone, or was abandoned. Its messages have been given to `on_message` before."""
        if worker in self._leaving:
            self._leaving.discard(worker)
        elif not (expected or self._closing) and self.listener is not None:
            self.listener.on_died(worker.worker_id, worker)
        self._maybe_closed()

    def _maybe_closed(self) -> None:
        if self._closing and not any(worker.is_alive for worker in self._everyone()):
            self._close()

    def _close(self) -> None:
        """Let go of what is left, and tell the end: all workers are gone, and no others come."""
        if self.listener is not None:
            self.listener.on_closed()
            self.listener = None

    def _everyone(self) -> tuple[AnyWorker, ...]:
        return (*self.processes.values(), *self._leaving)
