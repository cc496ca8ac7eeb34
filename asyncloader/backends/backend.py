"""Where workers run, as the engine sees it: places, workers that leave, and the end.

    engine ── start, send, add, end ──> Backend   `Pool` of processes, `LocalPool` of threads or on the loop; others
            <── on_ready, on_outcomes, ... ──

All of it happens on the loop thread, but for `wait_dead` and a `Launch`, which any thread may carry out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from asyncloader.backends.worker import Worker
from asyncloader.loops import GuardedLoop
from asyncloader.messages.messages import EpochSpec, Kind, WorkerSpec
from asyncloader.messages.outcome import OUTCOMES, Outcome

AnyWorker = TypeVar("AnyWorker", bound=Worker)

Launch: TypeAlias = Callable[[], None]
"""Makes a process: a copy, if it is forked, of the thread that calls it."""

Came: TypeAlias = tuple[Outcome, float, float]
"""The outcome of a ticket, and when it began to be read, and had been read."""

END_GRACE_S = 3.0
"""Workers that were told to end get this long, then they are killed. Seconds."""


class Listener(Protocol):
    """The engine, as a backend sees it: it is told of outcomes, and of workers that come and go."""

    def on_ready(self, worker: int) -> None:
        """The worker has opened the dataset. If it has no part in the run yet, it has from now on."""

    def on_outcomes(self, worker: int, came: Sequence[Came]) -> None:
        """Outcomes of tickets of this worker have come, with one read of its channel: one at least."""

    def on_died(self, worker: int, process: Worker) -> None:
        """The worker ended on its own: what it was at may be to blame, and another is put in its place."""

    def on_away(self, worker: int) -> None:
        """The worker is not there for now, through no fault of its tickets, which any other worker can do.

        It must not do any that it was sent. It takes part again when it is ready.
        """

    def on_room(self) -> None:
        """One more of the workers that the run is to begin with, and that were not started, can be started now."""

    def on_closed(self) -> None:
        """All workers are gone."""


class Backend(Generic[AnyWorker]):
    """Owner of the workers of one iterator, in their places by id.

    The engine says how many there are: `start` makes the first, `add` others at any time, `dismiss` lets one go.

    Args:
        loop: The portal's.
        spec: The dataset and functions that the workers work with.

    Attributes:
        listener: Is told what happens.
        processes: The workers that have a place now, by id; a worker that was dismissed or lost has none.
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

    def start(self, epoch: EpochSpec, started: Callable[[], None]) -> Iterator[Launch]:
        """Start the workers, some at a time; `started` is called each time: these can be given tickets before the next.

        On failure those that did start are ended. A backend may leave workers to be started later: it tells `on_room`.

        Yields:
            A function that launches the next ones, to be called, in any thread, before the next step.
        """
        raise NotImplementedError

    def send(self, worker: int, tickets: Sequence[tuple[int, Any]]) -> Sequence[tuple[int, Exception]]:
        """Give the worker tickets; return those whose keys cannot be pickled, which were not sent."""
        raise NotImplementedError

    def begin_epoch(self, epoch: EpochSpec) -> None:
        """Begin a new run over the data; tickets of the last one are forgotten."""
        raise NotImplementedError

    def add(self, worker: int, num_workers: int) -> None:
        """Start a worker under this id: one more, or in the place of another.

        The other one has died, or was dismissed. The new one can be given tickets at once. Where that is
        not urgent it joins the run only when it tells that it is ready.

        Args:
            worker: Its id.
            num_workers: How many workers there are, as its dataset is told.

        Raises:
            Exception: if the system has no room for it. Nothing is left of it then.
        """
        raise NotImplementedError

    def dismiss(self, worker: int, grace_s: float) -> None:
        """Let this worker finish, if it is there: it has no tickets. Its place is free, its end nobody's concern.

        Args:
            worker: Its id.
            grace_s: After so many seconds it is killed or abandoned.
        """
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
