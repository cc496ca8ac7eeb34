"""Decide which workers there are: which are started, take tickets, leave, and are renewed.

    want, run begun, ready ──> ┌───────────┐ ──> ("start", worker, rest_s), ("dismiss", worker)   a process, or thread
    has_grown ───────────────> │ Workforce │ ──> ("join", worker), ("leave", worker)              for the scheduler
                               └───────────┘

The workforce touches no loop, clock or process: the engine tells it what has happened, and carries out what it
decides. A worker that is started joins when it has opened the dataset, so nothing waits for it. A worker that leaves
finishes what it has in hand; if it is wanted again before that, it stays, unless it is being renewed.

A worker that has grown too large is renewed: it leaves, and when it is gone another process is started under its id,
which joins. Meanwhile the other workers do its work.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from asyncloader.backends.worker import Worker
from asyncloader.engine.actions import Action
from asyncloader.engine.scheduler import Scheduler
from asyncloader.log import log
from asyncloader.observe.timing import show_bytes
from asyncloader.options import Options

_APART_S = 0.005
"""Starts of several workers lie so far apart. Seconds."""


class Workforce:
    """The workers that there are to be, by id. Called from the loop thread only.

    Args:
        options: With the number of workers that are wanted at the beginning, numbered from 0, and the memory that a
            worker may have: `max_worker_memory`.

    Attributes:
        wanted: The workers that are asked for. Not all of them need be there. Consumers may read it.
        coming: Those of them that have not joined yet: they are started, or are to be, and are not ready.
        grown: The private memory of workers that have more than they may have, and are to be renewed.
        most_in_hand: So many tickets a worker is sent at once, where its memory is bounded; otherwise None. What it has
            in hand it finishes, however it grows by that.
    """

    def __init__(self, options: Options) -> None:
        self.wanted: set[int] = set(range(options.num_at_start))
        self.coming: set[int] = set()
        self._max_bytes = options.max_worker_memory
        self.most_in_hand: int | None = None if self._max_bytes is None else options.prefetch
        self.grown: dict[int, int] = {}
        self._bounds: dict[int, int] = {}  # of the memory of workers that have made a batch
        self._has_warned = False

    # ------------------------------------------------------------------------------------------------ come and go

    def want(self, num_workers: int) -> None:
        """Want so many from now on: the last go first, and new ones get the lowest ids that are free."""
        self.wanted.difference_update(sorted(self.wanted)[num_workers:])
        free = (worker for worker in itertools.count() if worker not in self.wanted)
        self.wanted.update(list(itertools.islice(free, max(0, num_workers - len(self.wanted)))))

    def settle(self, scheduler: Scheduler, processes: Mapping[int, Worker]) -> list[Action]:
        """Decide which workers come and go, now that others are wanted, one has gone, or another run has begun.

        Args:
            scheduler: It has the workers that take tickets, and those that leave.
            processes: The workers that have a place. One that has died keeps its place until another one is started.
        """
        takers, there = scheduler.takers, scheduler.in_flight.keys()
        living = {worker: process for worker, process in processes.items() if process.is_alive}
        self.coming &= self.wanted - there  # a run that has begun with them waits for them itself
        actions: list[Action] = []
        for worker in sorted(self.wanted):
            if worker in takers or (worker in there and worker in self.grown):
                continue  # a worker that is being renewed gets no more tickets, however often it is wanted
            if worker in there or (worker in living and living[worker].is_ready):
                actions.append(("join", worker))
            elif worker not in self.coming:
                self.coming.add(worker)
                if worker not in living:
                    # One after the other: a fork holds up the loop, on which batches come.
                    actions.append(("start", worker, _APART_S * len(actions)))
        for worker in sorted((there | processes.keys()) - self.wanted, reverse=True):
            if worker in takers:
                actions.append(("leave", worker))
            elif worker not in there:
                actions.append(("dismiss", worker))
        return actions

    def ready(self, worker: int, scheduler: Scheduler) -> list[Action]:
        """A worker has opened the dataset. It may not be wanted any more."""
        self.coming.discard(worker)
        if worker in scheduler.in_flight:
            return []
        return [("join" if worker in self.wanted else "dismiss", worker)]

    # ---------------------------------------------------------------------------------------------------- renewal

    def reset(self, worker: int) -> None:
        """The worker has a process that has made nothing yet, or none."""
        self._bounds.pop(worker, None)
        self.grown.pop(worker, None)

    def has_grown(self, worker: int, private_bytes: int) -> bool:
        """A worker has come to an outcome; return whether it has more memory than it may have.

        What it takes at its start another one would take too: then it may have twice that.

        Args:
            worker: Its id.
            private_bytes: Its private memory; 0 if that is not known.
        """
        most = self._max_bytes
        if most is None or not private_bytes:
            return False
        if (bound := self._bounds.get(worker)) is None:
            bound = self._bounds[worker] = most if private_bytes <= most else 2 * private_bytes
            if bound > most and not self._has_warned:
                self._has_warned = True
                log.warning(
                    "max_worker_memory is %s, and a worker takes %s after its first batch: to renew it then might be "
                    "for nothing. It is renewed when it has come to twice that.",
                    show_bytes(most),
                    show_bytes(private_bytes),
                )
        if private_bytes > bound:
            self.grown[worker] = private_bytes
        return worker in self.grown
