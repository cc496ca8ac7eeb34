"""Which workers there are and what each has in hand: whose turn it is, and who has the fewest tickets.

    join, leave, retire ──> takers, in the order of their ids: one of them has the turn, a newcomer before all
    give, take_back ──────> in_flight, and a sorted list of how many tickets each taker has

A batch costs nearly as much here with thousands of workers as with two: bisection, and moving a few kilobytes. The
scheduler alone uses it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

from asyncloader.engine.actions import Ticket

_LOAD = 1 << 32
"""What one ticket adds to an entry of the sorted list, whose lower half is the id of the worker."""


class Roster:
    """The workers of a run.

    Args:
        num_workers: How many workers take tickets from the beginning, numbered from 0.
        turn: The worker that has the turn, counted through these again and again.

    Attributes:
        in_flight: By worker, its tickets by number.
        active: Workers that take tickets, or still have some in hand.
        leaving: Active workers that get no more tickets.
    """

    def __init__(self, num_workers: int, turn: int) -> None:
        self.in_flight: dict[int, dict[int, Ticket]] = {worker: {} for worker in range(num_workers)}
        self.active = set(self.in_flight)
        self.leaving: set[int] = set()
        self._held: set[int] = set()
        self._takers = sorted(self.active)
        self._turn = turn % max(1, num_workers)
        self._newcomers: deque[int] = deque()
        self._open = set(self._takers)  # who can be given tickets now
        self._loads = list(self._takers)  # of these, (tickets, worker) in one integer, in ascending order

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
        self._admit(worker)

    def leave(self, worker: int) -> None:
        """Have a worker take no more tickets, and finish those that it has."""
        self._strike(worker)
        self.leaving.add(worker)

    def retire(self, worker: int) -> None:
        """Let go of a worker. The caller takes the tickets that it has in hand."""
        if self.takes(worker):
            self._strike(worker)
        for workers in (self.active, self.leaving, self._held):
            workers.discard(worker)

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
        self._admit(worker)

    def _admit(self, worker: int) -> None:
        """Let the worker be given tickets, if it takes some and is not held."""
        if self.takes(worker) and worker not in self._held | self._open:
            self._open.add(worker)
            insort(self._loads, len(self.in_flight[worker]) * _LOAD + worker)

    def _pass_over(self, worker: int) -> None:
        """Give the worker nothing for the moment, or no more."""
        if worker in self._open:
            self._open.discard(worker)
            del self._loads[bisect_left(self._loads, len(self.in_flight[worker]) * _LOAD + worker)]

    # -------------------------------------------------------------------------------------------------- tickets

    def give(self, worker: int, ticket: Ticket) -> None:
        """Note that the worker has the ticket."""
        ticket.worker = worker
        tickets = self.in_flight[worker]
        tickets[ticket.batch] = ticket
        if worker in self._open:
            self._count(worker, len(tickets) - 1, len(tickets))

    def take_back(self, worker: int, batch: int) -> Ticket | None:
        """Return a ticket that the worker has no more; None if it never had it."""
        tickets = self.in_flight[worker]
        if (ticket := tickets.pop(batch, None)) is not None and worker in self._open:
            self._count(worker, len(tickets) + 1, len(tickets))
        return ticket

    def take_all(self, worker: int) -> list[Ticket]:
        """Return all that the worker had, in the order in which it got it."""
        tickets, self.in_flight[worker] = self.in_flight[worker], {}
        if worker in self._open:
            self._count(worker, len(tickets), 0)
        return list(tickets.values())

    def _count(self, worker: int, before: int, now: int) -> None:
        """Note that a worker has so many tickets now."""
        del self._loads[bisect_left(self._loads, before * _LOAD + worker)]
        insort(self._loads, now * _LOAD + worker)

    # -------------------------------------------------------------------------------------------------- choices

    def least(self) -> tuple[int, int] | None:
        """Return who has the fewest tickets of those that can be given some, and how many: the lowest of the ids."""
        return (self._loads[0] % _LOAD, self._loads[0] // _LOAD) if self._loads else None

    def take_turn(self, share: int) -> int | None:
        """Return whose turn it is: a newcomer's until it has its share of tickets, otherwise one after the other's.

        As torch: round robin over the workers that still have data. The turn of one that is held is kept for it: None.
        """
        while self._newcomers:
            newcomer = self._newcomers[0]
            if newcomer in self._open and len(self.in_flight[newcomer]) < share:
                return newcomer
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
        assert self._open == takers - self._held
        assert self._loads == sorted(len(self.in_flight[worker]) * _LOAD + worker for worker in self._open)
