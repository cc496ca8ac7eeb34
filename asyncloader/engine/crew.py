"""Decide who comes and who goes, so that there are as many workers as there are to be.

    resize, run begun, ready, gone ──> ┌──────┐ ──> Start(worker), Dismiss(worker)   its process, or thread
                                       │ Crew │ ──> Join(worker), Part(worker)       what the scheduler is told
                                       └──────┘

No loop, no clock, no process is touched: the session tells what has happened, and carries out what is decided. A worker
that comes joins when it has opened the dataset, so nothing waits for it. One that goes finishes what it has in hand; if
it is wanted again before that, it stays.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping

from asyncloader.engine.actions import Action, Dismiss, Join, Part, Start
from asyncloader.engine.roster import Roster
from asyncloader.workers.backend import Worker


class Crew:
    """The workers that there are to be, by id. Called from the loop thread only.

    Args:
        num_workers: How many there are at the beginning, numbered from 0.
        first_elsewhere: From this id on workers are on other machines, and come and go by themselves.

    Attributes:
        members: Who is to be there. Not all of them need be ready.
    """

    def __init__(self, num_workers: int, first_elsewhere: int = sys.maxsize) -> None:
        self.members = set(range(num_workers))
        self._first_elsewhere = first_elsewhere
        self._coming: set[int] = set()  # started, or to be, and not ready

    def __repr__(self) -> str:
        return f"<Crew {sorted(self.members)} coming={sorted(self._coming)}>"

    @property
    def here(self) -> list[int]:
        """Who of these is on this machine. In any thread."""
        return sorted(worker for worker in tuple(self.members) if worker < self._first_elsewhere)

    def resize(self, num_workers: int) -> None:
        """Have so many members here from now on: the last go first, and new ones get the lowest ids that are free."""
        here = self.here
        self.members.difference_update(here[num_workers:])
        free = (worker for worker in itertools.count() if worker not in self.members)
        self.members.update(list(itertools.islice(free, max(0, num_workers - len(here)))))

    def settle(self, roster: Roster, places: Mapping[int, Worker]) -> list[Action]:
        """Decide who comes and who goes, now that there are to be others, or another run has begun.

        Args:
            roster: Who takes tickets, or is leaving.
            places: The workers that there are.
        """
        self._coming &= self.members - roster.active  # a run that has begun with them waits for them itself
        actions: list[Action] = []
        for worker in sorted(self.members):
            if roster.takes(worker):
                continue
            if worker in roster.leaving or (worker in places and places[worker].is_ready):
                actions.append(Join(worker))
            elif worker not in self._coming:
                self._coming.add(worker)
                if worker not in places:
                    actions.append(Start(worker))
        for worker in sorted((roster.active | places.keys()) - self.members, reverse=True):
            actions += self.let_go(worker, roster)
        return actions

    def let_go(self, worker: int, roster: Roster) -> list[Action]:
        """Decide how a worker goes that is no member any more."""
        if roster.takes(worker):
            return [Part(worker)]
        return [] if worker in roster.active else [Dismiss(worker)]

    def ready(self, worker: int, roster: Roster) -> list[Action]:
        """A worker has opened the dataset; perhaps one of another machine, which nobody had asked for.

        One of this machine that is no member is not wanted any more: it was just being started then.
        """
        self._coming.discard(worker)
        if worker in roster.active:
            return []
        if worker < self._first_elsewhere and worker not in self.members:
            return [Dismiss(worker)]
        self.members.add(worker)
        return [Join(worker)]

    def comes_later(self, worker: int) -> None:
        """A member could not be started, and is started later."""
        self._coming.add(worker)

    def is_coming(self, worker: int) -> bool:
        """Whether the worker has not joined yet."""
        return worker in self._coming

    def gone(self, worker: int) -> None:
        """A worker is not to be had any more: it could not be started, left by itself, or was lost."""
        self._coming.discard(worker)
        self.members.discard(worker)
