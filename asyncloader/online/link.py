"""Links: how a feed is reached, in its process or from another one. What is asked for, and what is leased there."""

from __future__ import annotations

import asyncio
import itertools
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from asyncloader.log import log

_numbers = itertools.count(1)
VERSION = -1
"""In place of a lease that a request watches: it waits for other weights."""


class Request:
    """A call, which may have to wait for its answer.

    Thousands may wait, and the garbage collector looks at all of their objects: a `concurrent.futures.Future` has ten.

    Attributes:
        number: Requests with a lower number were made before.
        attempt: Returns the answer, or `WAITS`. Called with the feed's lock held.
        outcome: The answer, and the error, when one of them is known.
        is_done: The outcome was delivered.
        watches: The lease whose end the request waits for, or `VERSION`; None for others.
        thread: Waits for the answer; None for a task, or another process.
        answered: What the task awaits that waits for the answer.
        link: Where that task has called.
    """

    __slots__ = ("_calls", "answered", "attempt", "is_done", "link", "number", "outcome", "thread", "watches")
    answered: asyncio.Future[None]
    link: Link

    def __init__(self) -> None:
        self.number: int = next(_numbers)
        self.attempt: Any = None
        self.outcome: tuple[Any, Exception | None] = None, None
        self.is_done: bool = False
        self.watches: int | None = None
        self.thread: threading.Thread | None = None
        self._calls: list[Callable[[Request], object]] = []

    def answer(self, answer: Any, error: Exception | None = None) -> None:
        """Have whoever waits go on."""
        self.outcome = answer, error
        self.deliver()

    def when_done(self, call: Callable[[Request], object]) -> None:
        """Have this be called with the request when the outcome is delivered, or now."""
        # No lock: a delivery by another thread, or by the garbage collector in this one, either finds the call in the
        # list, or has set `is_done` before the next line reads it.
        self._calls.append(call)
        if self.is_done:
            self.deliver()

    def deliver(self) -> None:
        """Have whoever waits go on, with the outcome. A call is made once: by whoever has taken it from the list."""
        self.is_done = True
        with suppress(IndexError):
            while True:
                call = self._calls.pop(0)
                try:
                    call(self)
                except Exception:
                    log.exception("Nobody was told of an answer of a feed")

    def result(self, timeout: float | None = None) -> Any:
        """Return the answer. In a thread, which waits for it.

        Raises:
            TimeoutError: if the answer takes longer.
            Exception: of the call.
        """
        if not self.is_done:
            # No Event: it tells with a lock of its own held, and a garbage collection at that moment may tell, too.
            told = threading.Lock()
            told.acquire()
            self.when_done(lambda _: told.release())
            if not told.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
                raise TimeoutError
        try:
            if (error := self.outcome[1]) is not None:
                raise error
            return self.outcome[0]
        finally:
            del self, error  # whose frames have this one


class Link(Protocol):
    """A feed, as those who use it reach it: its server, or a connection to that."""

    @property
    def address(self) -> str:
        """Tells the feed from others."""

    @property
    def version(self) -> int:
        """The version of the weights, as far as it is known here."""

    def call(self, request: Request, name: str, *arguments: Any) -> None:
        """Make a call of the `FeedServer`. The request comes to its answer."""

    def withdraw(self, request: Request) -> None:
        """Have a call that waits be answered now, by None: nothing has come of it."""

    def give_back(self, lease: int, failed: bool, *made: Any) -> None:
        """Have what is leased be leased again, or what was made of it so far. Also inside the garbage collector."""

    def dropped(self, reader: int, given: Callable[[], int]) -> None:
        """Note how many batches the consumer of an iterator was given in all. Also inside the garbage collector."""


def ask(link: Link, name: str, *arguments: Any, timeout: float | None = None) -> Any:
    """Return the answer to a call, in a thread, whose handlers of signals may raise; None if it was late."""
    request = Request()
    try:
        request.thread = threading.current_thread()
        link.call(request, name, *arguments)
        return request.result(timeout)
    except BaseException as error:
        give_up(link, request)
        if not isinstance(error, TimeoutError):
            raise
        return request.result()
    finally:
        del link, request  # an error has the frames that it was raised in


def give_up(link: Link, request: Request) -> None:
    """Withdraw a call; give back what it has leased."""
    if isinstance(leased := request.outcome[0], Leased):
        leased.give_back()
    elif not request.is_done:
        link.withdraw(request)


class Item(NamedTuple):
    """An item that is leased.

    Attributes:
        lease: Number of the lease, where it was leased.
        id: The id of the item.
        value: As the source gave it, or what was made of it so far.
        version: The version of the weights.
        tries: How many leases of this item have failed before.
    """

    lease: int
    id: int
    value: Any
    version: int
    tries: int


class Leased:
    """What is leased. When the last reference goes, it is given back, unless it was settled.

    Args:
        link: Where it was leased.
        item: The item.
    """

    item: Item

    def __init__(self, link: Link, item: Item) -> None:
        self.item = item
        self._finalizer = weakref.finalize(self, _give_back, weakref.ref(link), item.lease)
        self._finalizer.atexit = False

    @property
    def is_held(self) -> bool:
        """Whether it was neither settled nor given back."""
        return self._finalizer.alive

    def give_back(self) -> None:
        """Give it back now."""
        self._finalizer()

    def end(self) -> None:
        """Note that it was settled, or given back. If an interrupt comes before, it is given back again, in vain."""
        self._finalizer.detach()


def _give_back(link: weakref.ref[Link], lease: int) -> None:
    """Give a lease back that was dropped."""
    if (alive := link()) is not None:
        alive.give_back(lease, False)
