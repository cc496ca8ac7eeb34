"""Decide which workers there are: who is started, who takes tickets, who leaves, so that there are as many as wanted.

    want, run begun, ready, gone ──> ┌───────────┐ ──> Start(worker), Dismiss(worker)   its process, or thread
                                     │ Workforce │ ──> Join(worker), Leave(worker)      what the scheduler is told
                                     └───────────┘

No loop, no clock, no process is touched: the supervisor tells what has happened, and carries out what is decided. A
worker that is started joins when it has opened the dataset, so nothing waits for it. One that leaves finishes what it
has in hand; if it is wanted again before that, it stays.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from asyncloader.backends.backend import Worker
from asyncloader.engine.actions import Action, Dismiss, Join, Leave, Start
from asyncloader.engine.roster import Roster


class Workforce:
    """The workers that there are to be, by id. Called from the loop thread only.

    Args:
        num_workers: How many are wanted at the beginning, numbered from 0.

    Attributes:
        wanted: Who is asked for. Not all of them need be there.
        guests: Who has come without being asked for, from another machine, and stays as long as it can.
    """

    def __init__(self, num_workers: int) -> None:
        self.wanted = set(range(num_workers))
        self.guests: set[int] = set()
        self._asked = num_workers  # ids below this one are of workers that were asked for at some time
        self._coming: set[int] = set()  # started, or to be, and not ready

    def __repr__(self) -> str:
        return f"<Workforce {sorted(self.members)} coming={sorted(self._coming)}>"

    @property
    def members(self) -> set[int]:
        """Who is to be there. In any thread."""
        return self.wanted | self.guests

    def want(self, num_workers: int) -> None:
        """Want so many from now on, beside guests: the last go first, and new ones get the lowest ids that are free."""
        self.wanted.difference_update(sorted(self.wanted)[num_workers:])
        free = (worker for worker in itertools.count() if worker not in self.wanted)
        self.wanted.update(list(itertools.islice(free, max(0, num_workers - len(self.wanted)))))
        self._asked = max(self._asked, 1 + max(self.wanted, default=-1))

    def settle(self, roster: Roster, processes: Mapping[int, Worker]) -> list[Action]:
        """Decide who comes and who goes, now that others are wanted, or another run has begun.

        Args:
            roster: Who takes tickets, or is leaving.
            processes: The workers that there are.
        """
        members = self.members
        self._coming &= members - roster.active  # a run that has begun with them waits for them itself
        actions: list[Action] = []
        for worker in sorted(members):
            if roster.takes(worker):
                continue
            if worker in roster.leaving or (worker in processes and processes[worker].is_ready):
                actions.append(Join(worker))
            elif worker not in self._coming:
                self._coming.add(worker)
                if worker not in processes:
                    actions.append(Start(worker))
        for worker in sorted((roster.active | processes.keys()) - members, reverse=True):
            actions += self._let_go(worker, roster)
        return actions

    def ready(self, worker: int, roster: Roster) -> list[Action]:
        """A worker has opened the dataset. It may be a guest, or not be wanted any more."""
        self._coming.discard(worker)
        if worker in roster.active:
            return []
        if worker not in self.wanted:
            if worker < self._asked:  # it was just being started when it was wanted no more
                return [Dismiss(worker)]
            self.guests.add(worker)
        return [Join(worker)]

    def leaves(self, worker: int, roster: Roster) -> list[Action]:
        """A worker wants to go."""
        self.gone(worker)
        return self._let_go(worker, roster)

    def gone(self, worker: int) -> None:
        """A worker is not to be had any more: it could not be started, left by itself, or was lost."""
        for those in (self._coming, self.wanted, self.guests):
            those.discard(worker)

    def comes_later(self, worker: int) -> None:
        """A worker that is wanted could not be started, and is started later."""
        self._coming.add(worker)

    def is_coming(self, worker: int) -> bool:
        """Whether the worker has not joined yet."""
        return worker in self._coming

    def _let_go(self, worker: int, roster: Roster) -> list[Action]:
        if roster.takes(worker):
            return [Leave(worker)]
        return [] if worker in roster.active else [Dismiss(worker)]
