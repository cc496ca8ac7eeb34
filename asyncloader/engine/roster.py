"""Which workers there are and what each has in hand: whose turn it is, and who has the fewest tickets.

    join, leave, retire ──> takers, in the order of their ids: one of them has the turn, a newcomer before all
    the scheduler ────────> in_flight: who has which tickets

A batch costs nearly as much here with thousands of workers as with two. Loads are compared only where that is asked:
until then nothing is kept of them but which have changed. The scheduler alone uses it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from heapq import heappop, heappush, heapreplace

from asyncloader.engine.actions import Ticket


class Roster:
    """The workers of a run.

    Args:
        num_workers: How many workers take tickets from the beginning, numbered from 0.
        turn: The worker that has the turn, counted through these again and again.

    Attributes:
        in_flight: By worker, its tickets by number.
        active: Workers that take tickets, or still have some in hand.
        leaving: Active workers that get no more tickets.
        held: Active workers that get nothing for a moment.
        changed: Workers that may have fewer tickets than before, or can be given some again.
    """

    def __init__(self, num_workers: int, turn: int) -> None:
        self.in_flight: dict[int, dict[int, Ticket]] = {worker: {} for worker in range(num_workers)}
        self.active = set(self.in_flight)
        self.leaving: set[int] = set()
        self.held: set[int] = set()
        self._takers = sorted(self.active)
        self._turn = turn % max(1, num_workers)
        self._newcomers: deque[int] = deque()
        self.changed = set(self._takers)
        self._loads: list[tuple[int, int]] = []  # a heap of tickets and worker: no worker has fewer, some may have more
        self._entries: dict[int, int] = {}  # the entry of each worker that counts; others are left over

    # -------------------------------------------------------------------------------------------------- workers

    @property
    def num_takers(self) -> int:
        """How many take tickets, those that are held for a moment included."""
        return len(self._takers)

    def takes(self, worker: int) -> bool:
        """Whether the worker takes tickets, perhaps after a moment."""
        return worker in self.active and worker not in self.leaving

    def join(self, worker: int) -> None:
        """Have a worker take tickets: a new one, or one that was leaving."""
        if worker in self.leaving:
            self.leaving.discard(worker)
        else:
            self.active.add(worker)
            self.in_flight[worker] = {}
            self._newcomers.append(worker)
        self.changed.add(worker)
        place = bisect_left(self._takers, worker)
        self._takers.insert(place, worker)
        self._turn += place < self._turn

    def leave(self, worker: int) -> None:
        """Have a worker take no more tickets, and finish those that it has."""
        self._strike(worker)
        self.leaving.add(worker)

    def retire(self, worker: int) -> None:
        """Let go of a worker. The caller takes the tickets that it has in hand."""
        if self.takes(worker):
            self._strike(worker)
        for workers in (self.active, self.leaving, self.held):
            workers.discard(worker)

    def release(self, worker: int) -> None:
        """The worker can be given tickets again, if it was held."""
        self.held.discard(worker)
        self.changed.add(worker)

    def _strike(self, worker: int) -> None:
        place = bisect_left(self._takers, worker)
        del self._takers[place]
        self._turn -= place < self._turn
        if self._turn >= len(self._takers):
            self._turn = 0

    # -------------------------------------------------------------------------------------------------- choices

    def least(self) -> tuple[int, int] | None:
        """Return how many tickets the worker has that has the fewest of those that can be given some, and its id."""
        loads, entries = self._loads, self._entries
        for worker in self.changed:
            if self._is_open(worker) and (count := len(self.in_flight[worker])) < entries.get(worker, count + 1):
                entries[worker] = count
                heappush(loads, (count, worker))
        self.changed.clear()
        while loads:
            noted, worker = loads[0]
            if entries.get(worker) == noted and self._is_open(worker):
                if (count := len(self.in_flight[worker])) == noted:
                    return loads[0]
                entries[worker] = count
                heapreplace(loads, (count, worker))
            else:
                if entries.get(worker) == noted:
                    del entries[worker]
                heappop(loads)
        return None

    def _is_open(self, worker: int) -> bool:
        """Whether the worker can be given tickets now."""
        return worker in self.active and worker not in self.leaving and worker not in self.held

    def take_turn(self, share: int) -> int | None:
        """Return whose turn it is: a newcomer's until it has its share of tickets, otherwise one after the other's.

        As torch: round robin over the workers that still have data. The turn of one that is held is kept for it: None.
        """
        while self._newcomers:
            newcomer = self._newcomers[0]
            if self._is_open(newcomer) and len(self.in_flight[newcomer]) < share:
                return newcomer
            self._newcomers.popleft()
        takers = self._takers
        if not takers or (worker := takers[self._turn]) in self.held:
            return None
        self._turn = (self._turn + 1) % len(takers)
        return worker

    def validate(self) -> None:
        """Check what must hold between any two events."""
        assert self._takers == sorted(self.active - self.leaving)
        assert self.leaving | self.held <= self.active
        for worker in filter(self._is_open, self.active - self.changed):
            assert self._entries[worker] <= len(self.in_flight[worker])
