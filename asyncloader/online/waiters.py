"""Those who wait for a feed: tasks on any event loop, and threads. A waiter is woken once, and looks again then."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from itertools import islice


class TaskWaiter:
    """A task that waits, on the loop that it is made on.

    Attributes:
        future: Is done when the task is to look again.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[None] = self._loop.create_future()

    def wake(self) -> None:
        """Have the task look again. In any thread. A task whose loop is closed waits no more."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._set)

    def _set(self) -> None:
        if not self.future.done():
            self.future.set_result(None)


class ThreadWaiter:
    """A thread that waits."""

    def __init__(self) -> None:
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
    """Take the first so many out; return what wakes them."""
    woken = list(islice(waiters, count))
    for waiter in woken:
        del waiters[waiter]
    return [waiter.wake for waiter in woken]


def wake_all(wakes: Sequence[Callable[[], object]]) -> None:
    """Wake all of these, also those behind one whose wake-up raises: it may be interrupted."""
    if wakes:
        with ExitStack() as stack:
            for wake in reversed(wakes):
                stack.callback(wake)
