"""The workers of one iterator: start them, give them tickets, replace the dead, end them.

    session ── start, send, add, dismiss, end ──> Pool ── one WorkerProcess and its heap of slabs per worker id
            <── on_ready, on_outcomes, on_died, on_closed

A worker id keeps its place when its process is replaced, or renewed. With persistent workers a pool outlives
the runs of its session; frames of an earlier run are dropped here, after their slabs were given back.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from multiprocessing.context import BaseContext
from time import perf_counter
from typing import Any

from asyncloader.backends.backend import Backend, Came, Launch
from asyncloader.backends.processes import executors, fork_server
from asyncloader.backends.processes.process import WorkerProcess, launch_all
from asyncloader.errors import could_not_start
from asyncloader.loops import GuardedLoop
from asyncloader.machine import usable_cores
from asyncloader.messages.failure import with_notes
from asyncloader.messages.frames import BadFrame
from asyncloader.messages.messages import (
    EpochSpec,
    Kind,
    WorkerSpec,
)
from asyncloader.messages.outcome import OUTCOMES, unpack
from asyncloader.messages.pickle_paths import say_unpicklable
from asyncloader.messages.pickled_spec import PickledSpec
from asyncloader.messages.tickets import pack_tickets, pickle_tickets
from asyncloader.observe.notices import warn
from asyncloader.transport.slab import slab_pool
from asyncloader.transport.worker_heap import WorkerHeap, heap_for_a_worker

_AT_ONCE = 8
"""So many workers are launched before the first of them are given tickets: each of these steps costs the next fork."""


class Pool(Backend[WorkerProcess]):
    """Owner of the worker processes of one iterator, on the loop thread.

    Args:
        loop: The portal's.
        context: How processes are started.
        spec: The dataset and functions that the workers work with.
    """

    def __init__(self, loop: GuardedLoop, context: BaseContext, spec: WorkerSpec) -> None:
        super().__init__(loop, spec)
        self._context = context
        self._source: WorkerSpec | PickledSpec = spec
        self._slabs = slab_pool()
        self._slabs.loop = loop.loop
        self._heaps: dict[WorkerProcess, WorkerHeap] = {}
        self._managers: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # threads of executors: these have pipes
        self._is_starting = False  # somebody may be launching one more

    # ---------------------------------------------------------------------------------------------- lifecycle

    def pack(self) -> None:
        """Pickle what the workers need, unless they inherit it. In the caller's thread: the dataset is the user's.

        Raises:
            Exception: as the pickling of the dataset or a function raises it, after a warning in torch's words.
        """
        method = self._context.get_start_method()
        if method == "fork":
            return
        if method == "forkserver":
            with contextlib.suppress(OSError):  # whoever launches a worker will tell
                fork_server.start()  # it imports what it is to import while this pickles
        try:
            self._source = PickledSpec(self._spec)
        except Exception as error:
            with_notes(error, [say_unpicklable(self._spec)])
            warn(
                "Got pickle error when attempting to start a worker Process. This might be because the worker Process "
                f'arguments are not picklable. The current multiprocessing start method is {method!r}; with "fork" '
                "nothing is pickled. See https://docs.python.org/3/library/multiprocessing.html#the-spawn-and-"
                "forkserver-start-methods"
            )
            raise

    def start(self, epoch: EpochSpec, started: Callable[[], None]) -> Iterator[Launch]:
        """Start the processes, some at a time; `started` is called each time. On failure all of them are ended.

        Yields:
            A function that launches the next ones, or deals with all of them, to be called before the next step.

        Raises:
            WorkerStartError: if the system has no room.
        """
        self._epoch = epoch
        self._is_starting = True
        workers = range(self._spec.num_workers)
        if self._context.get_start_method() == "spawn":
            # Each computes for a second until it is up: if all did so at once, none would make the first batch soon.
            workers = workers[: usable_cores()]
        try:
            for first in workers[::_AT_ONCE]:
                if self._closing:  # while others were being launched
                    break
                begun = self._epoch
                with self._starting(workers[first : first + _AT_ONCE], begun) as (launch, processes):
                    yield launch
                for process in processes:
                    if process.worker_id in self.processes:  # it was not wanted, and then again, meanwhile
                        self._let_go(process, 0.0)
                        continue
                    self.processes[process.worker_id] = process
                    if self._epoch is not begun:  # while it was being launched
                        process.put(Kind.EPOCH, self._epoch)
                started()
            if not self._closing:
                yield partial(self._adopt, self.processes.values())
        except BaseException:
            self._closing = True
            raise
        finally:
            self._is_starting = False
            if self._closing:
                self.end(0.0)

    @contextlib.contextmanager
    def _starting(self, workers: Iterable[int], epoch: EpochSpec) -> Iterator[tuple[Launch, list[WorkerProcess]]]:
        """Start processes, all or none: give a function that launches them, to be called meanwhile, in any thread.

        Raises:
            WorkerStartError: if the system has no room for one of them.
        """
        started: dict[WorkerProcess, WorkerHeap] = {}
        share = epoch.num_workers or self._spec.num_workers
        importing = self._spec.importing
        try:
            for worker in workers:
                process = WorkerProcess(worker, self._loop, self, overlaps=self._spec.overlaps)
                started[process] = heap_for_a_worker(self._slabs)
            launches = [
                partial(each.launch, self._context, self._source, heap.hand_over(share), epoch, importing)
                for each, heap in started.items()
            ]
            yield partial(launch_all, self._context, launches), [*started]
            for process in started:
                process.watch(partial(self.on_frames, process))
        except BaseException as error:
            for process, heap in started.items():
                process.close()
                heap.reclaim()
            if isinstance(error, OSError):
                raise could_not_start(error) from error
            raise
        self._heaps |= started

    def add(self, worker: int, num_workers: int) -> None:
        """Start a process under this worker id: one more, or in the place of another, which is gone."""
        self.processes.pop(worker, None)  # whether or not another one can be started
        self.processes[worker] = self._start_other(worker, num_workers)

    def _start_other(self, worker: int, num_workers: int) -> WorkerProcess:
        with self._starting([worker], self._epoch_of_newcomer(num_workers)) as (launch, (process,)):
            launch()
        try:
            self._adopt([process])
        except BaseException:
            self._leaving.add(process)
            process.end(0.0)
            raise
        return process

    def _adopt(self, processes: Iterable[WorkerProcess]) -> None:
        """Give processes that were started to an executor. In any thread.

        Raises:
            WorkerStartError: if the system has no room for it.
        """
        try:
            running = [each for process in tuple(processes) if (each := process.running()) is not None]
            if running:
                self._managers.add(executors.adopt(running))
        except (OSError, RuntimeError) as error:  # Python's error where no thread can be started is a RuntimeError
            raise could_not_start(error) from error

    def begin_epoch(self, epoch: EpochSpec) -> None:
        """Begin a new run over the data; tickets of the last one are forgotten."""
        self._epoch = epoch
        body = pickle.dumps(epoch)
        for process in self.processes.values():
            process.channel.send(Kind.EPOCH, body, more=True)

    def wait_dead(self, timeout_s: float) -> bool:
        """Wait until all processes are gone, replaced ones too, and the threads of their executors. Not on the loop."""
        deadline = time.monotonic() + timeout_s
        waits = [super().wait_dead(timeout_s)]
        for manager in tuple(self._managers):
            manager.join(max(0.0, deadline - time.monotonic()))
            waits.append(not manager.is_alive())
        return all(waits)

    # ------------------------------------------------------------------------------------------------- sending

    def send(self, worker: int, tickets: Sequence[tuple[int, Any]]) -> Sequence[tuple[int, Exception]]:
        """Give the worker tickets, and slabs to use again; return those whose keys cannot be pickled."""
        process = self.processes[worker]
        heap = self._heaps[process]
        pickled, refused = pickle_tickets(tickets)
        if pickled:
            process.channel.send(Kind.TICKETS, *pack_tickets(pickled, heap.returned()))
        return refused

    # ---------------------------------------------------------------------------------------------- receiving

    def on_frames(self, process: WorkerProcess, frames: Iterable[tuple[int, memoryview]]) -> None:
        """Take what one read of a worker's channel has brought. Outcomes of tickets are told together.

        Raises:
            BadFrame: it is not what a worker of ours writes. What came before is told.
        """
        decode, run, now = self._heaps[process].decode, self._epoch.number, perf_counter()
        came: list[Came] = []
        try:
            for kind, body in frames:
                if kind not in OUTCOMES:
                    # In the order in which the worker has sent it: what it answers when it is asked where it is may
                    # have it killed, and nothing that came before is to be made again then.
                    before, came = came, []
                    self._tell(process, before)
                    self._on_other(process, kind, body)
                else:
                    outcome, began = unpack(kind, body, decode), now
                    now = perf_counter()
                    if outcome.record.epoch == run:
                        came.append((outcome, began, now))
        finally:
            self._tell(process, came)

    def _tell(self, process: WorkerProcess, came: list[Came]) -> None:
        if came and self.listener is not None and process not in self._leaving:
            self.listener.on_outcomes(process.worker_id, came)

    def _on_other(self, process: WorkerProcess, kind: int, body: memoryview) -> None:
        """Take what is no outcome."""
        if kind == Kind.UP:
            process.on_up()
            if self.listener is not None:
                self.listener.on_room()
        elif kind == Kind.IDLE:
            process.channel.send(Kind.TICKETS, *pack_tickets([], self._heaps[process].returned()))
        elif kind in (Kind.READY, Kind.AWAITS, Kind.ENDING):
            self.on_message(process, kind, pickle.loads(body) if body else None)
        else:
            raise BadFrame(f"a frame of kind {kind}, which is none of a worker's")

    def on_exit(self, process: WorkerProcess, expected: bool) -> None:
        """A process is gone."""
        if (heap := self._heaps.pop(process, None)) is not None:
            heap.reclaim()
        super().on_exit(process, expected)

    def _maybe_closed(self) -> None:
        if not self._is_starting:
            super()._maybe_closed()

    def _close(self) -> None:
        if isinstance(self._source, PickledSpec):
            self._source.close()
        while self._heaps:  # of workers whose end was not dealt with to the last, because something failed
            self._heaps.popitem()[1].reclaim()
        super()._close()


class WorkerHandle:
    """A worker as code written for torch's iterator finds it in ``_workers``: like a process of multiprocessing."""

    def __init__(self, process: WorkerProcess) -> None:
        self._process = process
        self.pid: int = process.pid
        self.name: str = f"asyncloader worker {process.worker_id}"
        self.daemon = True

    def __repr__(self) -> str:
        return repr(self._process)

    @property
    def exitcode(self) -> int | None:
        """None while it runs; negative for a signal."""
        return self._process.exitcode

    def is_alive(self) -> bool:
        """Whether the process is there."""
        return self._process.is_alive

    def join(self, timeout: float | None = None) -> None:
        """Wait until the process is gone, ``timeout`` seconds at most."""
        self._process.wait_dead(timeout)

    def terminate(self) -> None:
        """Kill the process with SIGKILL."""
        self._process.kill()

    kill = terminate
