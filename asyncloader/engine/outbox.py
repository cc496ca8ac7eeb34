"""Tickets on their way to workers.

    put ──> by worker ── flush, once for all that was decided at a time ──> Backend.send: one message for each worker

What is for a worker that is not started yet waits until it is; what is for one that is held, until it is not; and
what is for one that has died, for its successor, or to be dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any, TypeAlias

from asyncloader.backends.backend import Backend

Refuse: TypeAlias = Callable[[int, int, Exception], None]


class Outbox:
    """What workers are about to be sent. On the loop thread.

    Args:
        pool: The workers.
        held: Those that are sent nothing for the moment, as somebody else says.
    """

    def __init__(self, pool: Backend, held: Set[int] = frozenset()) -> None:
        self._pool = pool
        self._held = held
        self._tickets: dict[int, list[tuple[int, Any]]] = {}

    def put(self, worker: int, seq: int, keys: Any) -> None:
        """Have the worker sent a ticket by the next `flush`."""
        self._tickets.setdefault(worker, []).append((seq, keys))

    def drop(self, worker: int) -> list[int]:
        """Forget what was not sent to this worker; return the numbers of these tickets."""
        return [seq for seq, _ in self._tickets.pop(worker, ())]

    def clear(self) -> None:
        """Forget what was not sent."""
        self._tickets.clear()

    def flush(self, refuse: Refuse) -> None:
        """Send what there is.

        Args:
            refuse: Is told worker, sequence number and error of a ticket whose keys cannot be pickled.
        """
        if not self._tickets:
            return
        places, held = self._pool.processes, self._held
        for worker in tuple(self._tickets):  # a refused ticket flushes as well
            if worker in held or (place := places.get(worker)) is None or not place.is_alive:
                continue
            if tickets := self._tickets.pop(worker, None):
                for seq, error in self._pool.send(worker, tickets):
                    refuse(worker, seq, error)
