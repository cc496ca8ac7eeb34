"""Tickets on their way to workers.

    put ──> by worker ── flush, once for all that was decided at a time ──> Backend.send: one message for each worker

The tickets of a worker that is not started yet, or that is to be renewed, wait until its process is there. The tickets
of a worker that has died wait for the next process, or are dropped. A worker whose memory is bounded has only a few in
hand at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from typing import Any, TypeAlias

from asyncloader.backends.backend import Backend
from asyncloader.engine.workforce import Workforce

Refuse: TypeAlias = Callable[[int, int, Exception], None]


class Outbox:
    """Tickets that workers are about to be sent. On the loop thread.

    Args:
        pool: The workers.
        workforce: Says which worker is sent nothing for the moment, since it is to be renewed.
    """

    def __init__(self, pool: Backend, workforce: Workforce) -> None:
        self._pool = pool
        self._workforce = workforce
        self._tickets: dict[int, list[tuple[int, Any]]] = {}

    def put(self, worker: int, number: int, keys: Any) -> None:
        """Have the worker sent a ticket by the next `flush`."""
        self._tickets.setdefault(worker, []).append((number, keys))

    def count(self, worker: int) -> int:
        """Return how many tickets of this worker were not sent."""
        return len(self._tickets.get(worker, ()))

    def drop(self, worker: int) -> list[int]:
        """Forget what was not sent to this worker; return the numbers of these tickets."""
        return [number for number, _ in self._tickets.pop(worker, ())]

    def clear(self) -> None:
        """Forget what was not sent."""
        self._tickets.clear()

    def flush(self, refuse: Refuse, in_flight: Mapping[int, Sized]) -> None:
        """Send what there is.

        Args:
            refuse: Is told worker, number and error of a ticket whose keys cannot be pickled.
            in_flight: By worker, the tickets that it has not answered, sent or not.
        """
        if not self._tickets:
            return
        places, workforce = self._pool.processes, self._workforce
        for worker in tuple(self._tickets):  # a refused ticket flushes as well
            if not workforce.may_send(worker) or (place := places.get(worker)) is None or not place.is_alive:
                continue
            if tickets := self._tickets.pop(worker, None):
                if (
                    workforce.most_in_hand is not None
                ):  # what a worker has in hand it finishes, however it grows by that
                    room = max(0, workforce.most_in_hand - (len(in_flight[worker]) - len(tickets)))
                    if later := tickets[room:]:
                        self._tickets[worker] = later
                    if not (tickets := tickets[:room]):
                        continue
                for number, error in self._pool.send(worker, tickets):
                    refuse(worker, number, error)
