"""Puts ahead: a task in another process goes on before its sample has come to the feed, as far as there is room.

    task ── unit, pickled ──> what is ahead ── one message at a time ──> the feed's server
         <── an error of one that was put before ──┘<── for how many more there is room ──┘

A unit is pickled when it is put: its sample may be changed afterwards, and an error of pickle is raised by its own put.
Messages travel in the order of puts, and before those of later calls. Without room, one task of a loop at a time asks
the feed for its own sample, and waits there.
"""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import Any

from asyncloader.log import log
from asyncloader.online.errors import FeedClosedError
from asyncloader.online.link import Request
from asyncloader.signals import HandlersWait

_MOST_AT_ONCE = 128
"""Units that wait for an answer to others: the feed takes these while more are made."""


class Puts:
    """The puts of one process. In any thread.

    Args:
        connection: Sends messages in the order of its calls.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._lock = threading.RLock()  # an answer may come at once
        self._units: list[bytes] = []  # that are not sent
        self._room = self._num_sent = 0  # for so many more; and so many are not answered
        self._error: Exception | None = None
        self._is_closed = False
        self._local = threading.local()  # one event loop runs in a thread

    def put(self, unit: bytes) -> bool:
        """Put a pickled unit if there was room for it; return whether.

        Raises:
            Exception: that of a unit that was put before. This one is not put.
        """
        with self._lock:
            self.check()
            if is_room := self._room > 0:
                self._room -= 1
                self._units.append(unit)
                if not self._num_sent or len(self._units) >= _MOST_AT_ONCE:
                    self.send()
            return is_room

    @property
    def is_ahead(self) -> bool:
        """Whether something was put that the feed may not have."""
        return self._num_sent > 0 or bool(self._units)

    def send(self) -> None:
        """Send what is ahead now, whatever is on its way."""
        with HandlersWait(), self._lock:
            if self._units:
                units, self._units = self._units, []
                self._num_sent += len(units)
                self._connection.call(self.request(len(units)), "put", units)

    def request(self, count: int = 0) -> Request:
        """Return a request of puts, of which so many were put ahead."""
        request = Request()
        request.when_done(partial(self._hear, count))
        return request

    def check(self) -> None:
        """Raise what became of a unit that was put ahead, once."""
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # whose frames have this one

    def turn(self) -> asyncio.Lock:
        """Return what the tasks of this event loop hold that find no room, one at a time."""
        loop = asyncio.get_running_loop()
        if getattr(self._local, "loop", None) is not loop:
            self._local.loop, self._local.turn = loop, asyncio.Lock()
        return self._local.turn  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the connection, as soon as what is ahead has come to the feed."""
        with self._lock:
            self._is_closed = True
            self.send()
            self._go_on()

    def _hear(self, count: int, request: Request) -> None:
        with self._lock:
            room, error = request.outcome
            self._num_sent -= count
            self._room = (room or 0) - self._num_sent - len(self._units)
            if count:
                self._error = self._error or error
                self._go_on()

    def _go_on(self) -> None:
        if not self._num_sent:
            self.send()
        if self._is_closed and not self._num_sent:
            self._connection.end()
            if self._error is not None and not isinstance(self._error, FeedClosedError):
                log.warning("What was put by a process that has left its feed is not in: %s", self._error)
