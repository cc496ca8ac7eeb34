"""Which workers there are and what each has in hand: whose turn it is, and who has the fewest tickets.

    join, leave, retire ──> takers: the first of them has the turn
    the scheduler ────────> in_flight: who has which tickets

Loads are compared only where a ticket goes to the worker that has the fewest. The scheduler alone uses it.
"""

from __future__ import annotations

from collections import deque
from heapq import heapify

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
        takers: Workers that take tickets, those that are held included. The first of them has the turn.
    """

    def __init__(self, num_workers: int, turn: int) -> None:
        self.in_flight: dict[int, dict[int, Ticket]] = {worker: {} for worker in range(num_workers)}
        self.active: set[int] = set(self.in_flight)
        self.leaving: set[int] = set()
        self.held: set[int] = set()
        self.takers: deque[int] = deque(range(num_workers))
        self.takers.rotate(-turn)

    def takes(self, worker: int) -> bool:
        """Whether the worker takes tickets, perhaps after a moment."""
        return worker in self.active and worker not in self.leaving

    def join(self, worker: int) -> None:
        """Have a worker take tickets, from now on: a new one, or one that was leaving. Its turn is after theirs."""
        if worker not in self.leaving:
            self.active.add(worker)
            self.in_flight[worker] = {}
        self.leaving.discard(worker)
        self.takers.append(worker)

    def leave(self, worker: int) -> None:
        """Have a worker take no more tickets, and finish those that it has."""
        self.takers.remove(worker)
        self.leaving.add(worker)

    def retire(self, worker: int) -> None:
        """Let go of a worker. The caller takes the tickets that it has in hand."""
        if self.takes(worker):
            self.takers.remove(worker)
        for workers in (self.active, self.leaving, self.held):
            workers.discard(worker)

    # -------------------------------------------------------------------------------------------------- choices

    def take_turn(self) -> int | None:
        """Return whose turn it is, one after the other's, as torch: round robin over the workers that still have data.

        The turn of a worker that is held is kept for it: None.
        """
        takers = self.takers
        if not takers or (worker := takers[0]) in self.held:
            return None
        takers.rotate(-1)
        return worker

    def loads(self) -> list[tuple[int, int]]:
        """Return a heap of the workers that can be given tickets now: how many tickets each has, and its id."""
        loads = [(len(self.in_flight[worker]), worker) for worker in self.takers if worker not in self.held]
        heapify(loads)
        return loads
