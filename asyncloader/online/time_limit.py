"""The time limit of leases: a thread gives back those that have come to their end."""

from __future__ import annotations

import queue
import weakref
from collections import deque
from functools import partial
from time import monotonic
from typing import Any

from asyncloader import threads
from asyncloader.online.lease import GivesLeases


class TimeLimit:
    """Gives leases back after a time; a lease that has ended before is left alone.

    The thread starts with the first lease, and ends when the feed is closed, or dropped.

    Args:
        feed: Has given the leases.
        seconds: How long they last.
    """

    def __init__(self, feed: GivesLeases, seconds: float) -> None:
        self._begun: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._feed = weakref.ref(feed, self._begun.put)
        self._seconds = seconds
        self._is_running = False

    def begin(self, lease: int) -> None:
        """Note that a lease begins now. With the lock of the feed held."""
        self._begun.put((monotonic() + self._seconds, lease))
        if not self._is_running:
            threads.start(partial(_watch, self._begun, self._feed), "asyncloader leases", self.end)
            self._is_running = True

    def end(self) -> None:
        """End the thread."""
        self._begun.put(None)


def _watch(begun: queue.SimpleQueue[Any], feed: weakref.ref[GivesLeases]) -> None:
    leases: deque[tuple[float, int]] = deque()
    while True:
        try:
            entry = begun.get(timeout=max(0.0, leases[0][0] - monotonic()) if leases else None)
        except queue.Empty:
            _, lease = leases.popleft()
            if (alive := feed()) is not None:
                alive.give_back(lease, failed=True)
            del alive
            continue
        if type(entry) is not tuple:
            return
        leases.append(entry)
