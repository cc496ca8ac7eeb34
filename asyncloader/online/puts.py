"""Puts of other processes: those that tasks make in one turn of their event loop travel in one message.

    task ── unit ──> waiting ── one message at a time ──> the feed's server
         <── outcome of each: it is in, or an error ──┘

The server takes units of a message as far as there is room, and none is wrong. Others are sent again, each by itself,
and wait there: so a task whose sample is in goes on, whatever the others wait for, and nothing is sent more
than twice. The same is done with a message that cannot be pickled or unpickled: whose fault that is shows then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from asyncloader.online.link import Link, Request
from asyncloader.online.producers import MOST_UNITS

_UNKNOWN: Any = object()


class Put:
    """A put of a task.

    Args:
        unit: Samples, their version and whether that is the default, cost, and priority.
        answered: Ends when the outcome is known.

    Attributes:
        outcome: None if the unit is in, or the error.
        request: The call that it was sent with last; None before.
        is_withdrawn: Its task waits no longer: it is not sent again.
    """

    __slots__ = ("answered", "is_withdrawn", "outcome", "request", "unit")
    answered: asyncio.Future[None]
    unit: tuple[Any, ...]

    def __init__(self, unit: tuple[Any, ...], answered: asyncio.Future[None]) -> None:
        self.unit, self.answered = unit, answered
        self.outcome: Exception | None = _UNKNOWN
        self.request: Request | None = None
        self.is_withdrawn: bool = False

    def settle(self, outcome: Exception | None) -> None:
        """Note the outcome, and have the task go on."""
        self.outcome = outcome
        if not self.answered.done():
            self.answered.set_result(None)


class Puts:
    """The puts of the tasks of one event loop.

    Args:
        link: The connection.
        loop: The event loop, on which everything here runs.
    """

    loop: asyncio.AbstractEventLoop

    def __init__(self, link: Link, loop: asyncio.AbstractEventLoop) -> None:
        self._link, self.loop = link, loop
        self._waiting: list[Put] = []
        self._turn: list[Put] | None = None  # what was sent together and is not answered; empty: it is about to be sent

    async def put(self, unit: tuple[Any, ...]) -> bool:
        """Wait until a unit is in; return whether the task was cancelled meanwhile, and too late.

        Raises:
            Exception: if the feed does not take it.
        """
        put = Put(unit, self.loop.create_future())
        self._waiting.append(put)
        if self._turn is None:
            self._begin_turn()
        try:
            await put.answered
            if put.outcome is not None:
                raise put.outcome
            return False
        except asyncio.CancelledError:
            await self._withdraw(put)
            if put.outcome is not None:
                raise
            return True
        finally:
            del put  # an error has the frames that it was raised in, and would be in a circle with this

    async def _withdraw(self, put: Put) -> None:
        """Take back the put of a task that is cancelled, unless it is in."""
        if put in self._waiting:
            self._waiting.remove(put)
        elif put.outcome is _UNKNOWN and put.request is not None:
            put.is_withdrawn, put.answered = True, self.loop.create_future()
            self._link.withdraw(put.request)
            await asyncio.wait({put.answered})

    def _begin_turn(self) -> None:
        """Send what waits when all tasks of this turn of the loop have had theirs."""
        self._turn = []
        self.loop.call_soon(self._send_turn)

    def _send_turn(self) -> None:
        self._turn, self._waiting = self._waiting[:MOST_UNITS], self._waiting[MOST_UNITS:]
        if self._turn:
            self._send(self._turn)
        else:
            self._turn = None

    def _send(self, puts: Sequence[Put]) -> None:
        request = Request()
        for put in puts:
            put.request = request
        request.add_done_callback(partial(self._hear, puts))
        try:
            self._link.call(request, "put", [put.unit for put in puts])
        except Exception as error:  # it cannot be pickled
            request.answer(None, error)

    def _hear(self, puts: Sequence[Put], request: Any) -> None:
        """Have an answer be looked at on the loop. In any thread."""
        with suppress(RuntimeError):  # it was closed, and nobody waits
            self.loop.call_soon_threadsafe(self._answered, puts, request)

    def _answered(self, puts: Sequence[Put], request: Request) -> None:
        answer, error = request.outcome
        count, refused = answer or (0, error if len(puts) == 1 else None)
        for put in puts[:count]:
            put.settle(None)
        if refused is not None:
            puts[count].settle(refused)
        for put in puts[count + (refused is not None) :]:
            if put.is_withdrawn:
                put.settle(_UNKNOWN)
            else:
                self._send([put])
        if puts is self._turn:
            self._begin_turn()
