"""Where workers run, as the engine sees it.

    engine ── start, send, add, end ──> Backend   `Pool` of processes, `LocalPool` of threads or on the loop; others
            <── on_ready, on_outcomes, ... ──

All of it happens on the loop thread, but for `wait_dead` and a `Launch`, which any thread may carry out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from asyncloader.backends.worker import Worker
from asyncloader.messages.messages import EpochSpec
from asyncloader.messages.outcome import Outcome

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

    def on_closed(self) -> None:
        """All workers are gone."""


class Backend(Protocol):
    """The workers of one iterator, in their places by id.

    The session says how many there are: `start` makes the first, `add` others at any time, `dismiss` lets one go.
    """

    listener: Listener | None

    @property
    def processes(self) -> Mapping[int, Worker]:
        """The workers that have a place now, by id; a worker that was dismissed or lost has none."""

    def start(self, epoch: EpochSpec, started: Callable[[], None]) -> Iterator[Launch]:
        """Start the workers, some at a time; `started` is called each time: these can be given tickets before the next.

        On failure those that did start are ended.

        Yields:
            A function that launches the next ones, to be called, in any thread, before the next step.
        """

    def send(self, worker: int, tickets: Sequence[tuple[int, Any]]) -> Sequence[tuple[int, Exception]]:
        """Give the worker tickets; return those whose keys cannot be pickled, which were not sent."""

    def begin_epoch(self, epoch: EpochSpec) -> None:
        """Begin a new run over the data; tickets of the last one are forgotten."""

    def discard(self, worker: int) -> None:
        """Kill or abandon this worker, whose end then is nobody's concern: another will take its place."""

    def add(self, worker: int, num_workers: int) -> None:
        """Start a worker under this id: one more, or in the place of another.

        The other one has died, or was discarded or dismissed. The new one can be given tickets at once. Where that is
        not urgent it joins the run only when it tells that it is ready.

        Args:
            worker: Its id.
            num_workers: How many workers there are, as its dataset is told.

        Raises:
            Exception: if the system has no room for it. Nothing is left of it then.
        """

    def dismiss(self, worker: int, grace_s: float) -> None:
        """Let this worker finish, if it is there: it has no tickets. Its place is free, its end nobody's concern.

        Args:
            worker: Its id.
            grace_s: After so many seconds it is killed or abandoned.
        """

    def end(self, grace_s: float) -> None:
        """Tell all workers to finish; kill or abandon what is left after ``grace_s`` seconds."""

    def wait_dead(self, timeout_s: float) -> bool:
        """Wait until all workers are gone. In any thread but the loop's."""
