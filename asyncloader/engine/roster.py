"""Which workers there are and what each has in hand: whose turn it is, and who has the fewest tickets.

    join, leave, retire ──> takers, in the order of their ids: one of them has the turn, a newcomer before all
    give, take_back ──────> in_flight, and a heap of how many tickets each taker has

A batch costs as much here with thousands of workers as with two. The scheduler alone uses it.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import deque

from asyncloader.engine.actions import Ticket

_WORKER_BITS = 32
_WORKER = (1 << _WORKER_BITS) - 1


class Roster:
    """The workers of a run.

    Args:
        num_workers: Who takes tickets from the beginning: so many, numbered from 0.
        turn: Who has the turn, counted through these again and again.

    Attributes:
        in_flight: By worker, its tickets by sequence number.
        active: Who takes tickets, or has some in hand still.
        leaving: Of these, who gets no more.
        loads: How many tickets each has that can be given some now.
    """

    def __init__(self, num_workers: int, turn: int) -> None:
        self.in_flight: dict[int, dict[int, Ticket]] = {worker: {} for worker in range(num_workers)}
        self.active = set(self.in_flight)
        self.leaving: set[int] = set()
        self._held: set[int] = set()
        self._takers = sorted(self.active)
        self._turn = turn % max(1, num_workers)
        self._newcomers: deque[int] = deque()
        self.loads: dict[int, int] = {}
        # Entries are (tickets, worker) in one integer. The one that counts of each worker says no more tickets than it
        # has, and is put right when it comes up; the others are dropped then, or when there are too many of them.
        self._heap: list[int] = []
        self._entered: dict[int, int] = {}  # how many tickets that one says
        for worker in self._takers:
            self._note(worker)

    # -------------------------------------------------------------------------------------------------- workers

    @property
    def num_takers(self) -> int:
        """How many take tickets, those that are held for a moment included."""
        return len(self._takers)

    def takes(self, worker: int) -> bool:
        """Whether the worker takes tickets, perhaps after a moment."""
        return worker in self.active and worker not in self.leaving

    def is_held(self, worker: int) -> bool:
        """Whether the worker gets nothing for a moment."""
        return worker in self._held

    def join(self, worker: int) -> None:
        """Have a worker take tickets: a new one, or one that was leaving."""
        if worker in self.leaving:
            self.leaving.discard(worker)
        else:
            self.active.add(worker)
            self.in_flight[worker] = {}
            self._newcomers.append(worker)
        place = bisect_left(self._takers, worker)
        self._takers.insert(place, worker)
        self._turn += place < self._turn
        self._note(worker)

    def leave(self, worker: int) -> None:
        """Have a worker take no more tickets, and finish those that it has."""
        self._strike(worker)
        self.leaving.add(worker)

    def retire(self, worker: int) -> None:
        """Let go of a worker. What it has in hand is to be taken as well."""
        if self.takes(worker):
            self._strike(worker)
        self.active.discard(worker)
        self.leaving.discard(worker)
        self._held.discard(worker)

    def _strike(self, worker: int) -> None:
        place = bisect_left(self._takers, worker)
        del self._takers[place]
        self._turn -= place < self._turn
        if self._turn >= len(self._takers):
            self._turn = 0
        self._pass_over(worker)

    def hold(self, worker: int) -> None:
        """Have nothing given to the worker until `release`."""
        self._held.add(worker)
        self._pass_over(worker)

    def release(self, worker: int) -> None:
        """The worker can be given tickets again."""
        self._held.discard(worker)
        self._note(worker)

    # -------------------------------------------------------------------------------------------------- tickets

    def give(self, worker: int, ticket: Ticket) -> None:
        """Note that the worker has the ticket."""
        ticket.worker = worker
        self.in_flight[worker][ticket.seq] = ticket
        if worker in self.loads:
            self.loads[worker] += 1

    def take_back(self, worker: int, seq: int) -> Ticket | None:
        """Return a ticket that the worker has no more; None if it never had it."""
        ticket = self.in_flight[worker].pop(seq, None)
        if worker in self.loads:
            self._count(worker)
        return ticket

    def take_all(self, worker: int) -> list[Ticket]:
        """Return all that the worker had, in the order in which it got it."""
        tickets, self.in_flight[worker] = self.in_flight[worker], {}
        self._note(worker)
        return list(tickets.values())

    def _note(self, worker: int) -> None:
        """Keep count of a worker, if it can be given tickets."""
        if self.takes(worker) and worker not in self._held:
            self._count(worker)

    def _count(self, worker: int) -> None:
        self.loads[worker] = load = len(self.in_flight[worker])
        if (entered := self._entered.get(worker)) is None or load < entered:
            self._entered[worker] = load
            heapq.heappush(self._heap, load << _WORKER_BITS | worker)
            if len(self._heap) > 64 + 2 * len(self.loads):
                self._entered = self.loads.copy()
                self._heap = [load << _WORKER_BITS | worker for worker, load in self.loads.items()]
                heapq.heapify(self._heap)

    def _pass_over(self, worker: int) -> None:
        """Give the worker nothing for the moment, or no more."""
        self.loads.pop(worker, None)
        self._entered.pop(worker, None)

    # -------------------------------------------------------------------------------------------------- choices

    def least(self) -> tuple[int, int] | None:
        """Return who has the fewest tickets of those that can be given some, and how many: the lowest of the ids."""
        heap, loads, entered = self._heap, self.loads, self._entered
        while heap:
            entry = heap[0]
            worker, said = entry & _WORKER, entry >> _WORKER_BITS
            if entered.get(worker) != said:
                heapq.heappop(heap)
            elif (load := loads[worker]) == said:
                return worker, load
            else:  # it has more by now
                entered[worker] = load
                heapq.heapreplace(heap, load << _WORKER_BITS | worker)
        return None

    def take_turn(self, share: int) -> int | None:
        """Return whose turn it is: a newcomer's until it has its share of tickets, otherwise one after the other's.

        As torch: round robin over the workers that still have data. The turn of one that is held is kept for it: None.
        """
        while self._newcomers:
            if self.loads.get(self._newcomers[0], share) < share:
                return self._newcomers[0]
            self._newcomers.popleft()
        if not self._takers or (worker := self._takers[self._turn]) in self._held:
            return None
        self._turn = (self._turn + 1) % len(self._takers)
        return worker

    def validate(self) -> None:
        """Check what must hold between any two events."""
        takers = {worker for worker in self.active if self.takes(worker)}
        assert self._takers == sorted(takers)
        assert self.leaving | self._held <= self.active
        assert self.loads == {worker: len(self.in_flight[worker]) for worker in takers - self._held}
        assert all(self._entered[worker] <= load for worker, load in self.loads.items())
        assert self._entered.keys() == self.loads.keys()
        by_load = sorted(self.loads.items(), key=lambda item: (item[1], item[0]))
        assert self.least() == next(iter(by_load), None)
