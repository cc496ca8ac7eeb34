"""Where finished batches wait for the consumer, and the consumer for batches.

    loop thread ── put ──> ready (deque) ── take ──> consumer: a thread, or a task on any loop
                └─ wake ─> waiter (a lock, or a future)

Consumers of one iterator take turns, so one of them waits at most. It takes without waiting if there is something.
Otherwise it leaves a waiter, looks once more, and waits. The interleavings with a `put` in the loop thread:

  1. The consumer finds nothing. 2. The loop appends, finds no waiter. 3. The consumer leaves its waiter, looks again,
     finds the item, withdraws the waiter.
  1. The consumer finds nothing, leaves its waiter. 2. The loop appends, wakes the waiter. 3. The consumer looks again,
     finds the item; its waiter is already woken, which costs nothing.

A wake-up says that something has changed, not what: whoever is interrupted while it waits looks again next time. Not
used: ``threading.Event`` and ``queue``, which take several locks a batch; ``run_coroutine_threadsafe``, which takes a
task a batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Handoff(Generic[T]):
    """A queue with one producer, and one consumer at a time.

    `put` belongs to the producer's thread, `wait` and `wait_async` to the consumer; any thread may `wake`.
    """

    def __init__(self) -> None:
        self.ready: deque[T] = deque()
        self._waiter: Callable[[], object] | None = None

    @property
    def is_awaited(self) -> bool:
        """Whether a consumer waits."""
        return self._waiter is not None

    def wake(self) -> None:
        """Have the consumer that waits look at the state of things."""
        if (waiter := self._waiter) is not None:
            with contextlib.suppress(RuntimeError):  # its loop was closed; or its lock is released already
                waiter()

    def wait(self, changed: Callable[[], bool], deadline: float | None) -> bool:
        """Block the thread until woken, or ``changed()`` is true; False when the deadline passed.

        Args:
            changed: Looked at once after the waiter is in place.
            deadline: On :func:`time.monotonic`'s clock, seconds; None for no limit.
        """
        lock = threading.Lock()
        lock.acquire()
        try:
            self._waiter = lock.release
            return changed() or lock.acquire(timeout=-1 if deadline is None else max(0.0, deadline - time.monotonic()))
        finally:
            self._waiter = None

    async def wait_async(self, changed: Callable[[], bool], deadline: float | None) -> bool:
        """Suspend the task until woken; see `wait`."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        timer = None
        try:
            # The loop cancels the future to wake the task: a compiled method, in which no signal's handler can raise.
            self._waiter = lambda: loop.call_soon_threadsafe(future.cancel)
            if changed():
                return True
            if deadline is not None:  # uvloop rounds to milliseconds, and would wake the task before the deadline
                timer = loop.call_later(max(0.0, deadline - time.monotonic()) + 0.001, future.cancel)
            # Not asyncio.wait: from Python 3.14 on its frame holds the task, and the error of a cancelled task holds
            # its frames. The iterator, and its workers, would stay until a collection.
            await asyncio.gather(future, return_exceptions=True)
            return deadline is None or time.monotonic() < deadline
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()
