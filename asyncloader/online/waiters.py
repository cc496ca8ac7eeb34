"""Those who wait for a feed: tasks on any event loop, and threads. A waiter is woken once, and looks again then."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

GONE: Any = object()
"""In place of nothing, when a waiter is woken whose loop was closed."""


class TaskWaiter:
    """A task that waits, on the loop that it is made on.

    Attributes:
        future: Is done when the task is to look again.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[None] = self._loop.create_future()

    @property
    def is_gone(self) -> bool:
        """Whether its loop was closed with the task on it: nobody will look."""
        return self._loop.is_closed()

    def wake(self) -> object:
        """Have the task look again; return `GONE` if its loop was closed. In any thread."""
        try:
            self._loop.call_soon_threadsafe(self._set)
        except RuntimeError:
            return GONE
        return None

    def _set(self) -> None:
        if not self.future.done():
            self.future.set_result(None)


class ThreadWaiter:
    """A thread that waits.

    Attributes:
        thread: The thread.
    """

    is_gone = False

    def __init__(self) -> None:
        self.thread = threading.current_thread()
        self._lock = threading.Lock()
        self._lock.acquire()

    def wait(self, timeout: float | None) -> bool:
        """Wait until it is woken; return whether it was in time. Seconds."""
        return self._lock.acquire(timeout=-1 if timeout is None else timeout)

    def wake(self) -> None:
        """Have the thread look again. In any thread."""
        with suppress(RuntimeError):
            self._lock.release()


Waiters = dict[TaskWaiter | ThreadWaiter, None]
"""In the order in which they came."""


def first(waiters: Waiters, count: int) -> list[Callable[[], object]]:
    """Take the first so many out, and those before them that are gone; return what wakes them."""
    woken: list[TaskWaiter | ThreadWaiter] = []
    gone: list[TaskWaiter | ThreadWaiter] = []
    for waiter in waiters:
        if len(woken) == count:
            break
        (gone if waiter.is_gone else woken).append(waiter)
    for waiter in (*gone, *woken):
        del waiters[waiter]
    return [waiter.wake for waiter in woken]


def wake_all(wakes: Sequence[Callable[[], object]]) -> bool:
    """Wake all of these, also those behind one whose wake-up raises.

    Returns:
        Whether one is gone: then whoever waits behind it is to be woken in its place.

    Raises:
        Exception: the first that a wake-up has raised.
    """
    found: list[object] = []
    errors: list[Exception] = []
    for wake in wakes:
        try:
            found.append(wake())
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return GONE in found
