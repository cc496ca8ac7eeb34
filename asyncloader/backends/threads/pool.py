"""Workers in this process: on threads of their own, or one on a loop (num_workers=0, async datasets).

    session ── start, send, add, dismiss, end ──> LocalPool ── one LocalWorker with a LocalTransport per worker id
            <── on_ready, on_outcomes, ... ── (posted to the loop)

The loops over tickets are those of worker processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from asyncloader.backends.backend import Backend, Launch
from asyncloader.backends.threads.worker import LocalWorker, private_copy
from asyncloader.loops import GuardedLoop
from asyncloader.messages.messages import EpochSpec, Kind, WorkerSpec


class LocalPool(Backend[LocalWorker]):
    """Owner of the workers of one iterator that run in this process. Loop thread only.

    Args:
        loop: The portal's.
        spec: The spec of the workers.
        on_threads: Each on a thread; otherwise there is one, on that loop.
    """

    def __init__(self, loop: GuardedLoop, spec: WorkerSpec, *, on_threads: bool) -> None:
        # In the consumer's thread: it may tell the user's dataset another epoch while a worker makes its own copy.
        super().__init__(loop, spec.with_dataset(private_copy(spec.dataset)) if on_threads else spec)
        self._on_threads = on_threads

    def start(self, epoch: EpochSpec, started: Callable[[], None]) -> Iterator[Launch]:
        """Start one worker after the other; `started` is called after each. Nothing is left to launch."""
        self._epoch = epoch
        for worker in range(max(1, self._spec.num_workers)):
            self._start_one(worker, epoch)
            started()
        yield from ()

    def _start_one(self, worker: int, epoch: EpochSpec) -> None:
        started = LocalWorker(worker, self._loop, self, self._on_threads)
        started.start(self._spec, epoch)
        self.processes[worker] = started

    def add(self, worker: int, num_workers: int) -> None:
        """Start a worker under this id: one more, or in the place of one that has ended or was dismissed."""
        epoch = self._epoch_of_newcomer(num_workers if self._on_threads else 0)
        self.processes.pop(worker, None)
        self._start_one(worker, epoch)

    def begin_epoch(self, epoch: EpochSpec) -> None:
        """Begin a new run over the data; tickets of the last one are forgotten."""
        self._epoch = epoch
        for worker in self.processes.values():
            worker.put(Kind.EPOCH, epoch)

    def send(self, worker: int, tickets: Sequence[tuple[int, Any]]) -> Sequence[tuple[int, Exception]]:
        """Give the worker tickets. Nothing is pickled."""
        self.processes[worker].put(Kind.TICKETS, tickets)
        return ()
