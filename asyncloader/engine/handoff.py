"""Where finished batches wait for the consumer, and the consumer for batches.

    loop thread ── put ──> ready (deque) ── take ──> consumer: a thread, or a task on any loop
                └─ wake ─> waiters (deque of locks and futures)

A consumer takes without waiting if there is something. Otherwise it leaves a waiter, looks once more, and waits. The
interleavings with a `put` in the loop thread:

  1. The consumer finds nothing. 2. The loop appends, finds no waiter. 3. The consumer leaves its waiter, looks again,
     finds the item, withdraws the waiter.
  1. The consumer finds nothing, leaves its waiter. 2. The loop appends, takes the waiter, wakes it. 3. The consumer
     looks again, finds the item; its waiter is already woken, which costs nothing.

A wake-up that its waiter can no longer use (it was interrupted, cancelled or timed out) is passed on, so that with
several consumers none sleeps beside a ready batch. Not used: ``threading.Event`` and ``queue``, which take several
locks a batch; ``run_coroutine_threadsafe``, which takes a task a batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeAlias, TypeVar

T = TypeVar("T")


class _ThreadWaiter:
    """A thread that waits: its lock is held until somebody wakes it."""

    __slots__ = ("_lock", "is_gone")

    def __init__(self) -> None:
        self.is_gone = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def wake(self) -> bool:
        if self._lock.locked():
            self._lock.release()
        return True

    def wait(self, timeout_s: float) -> bool:
        return self._lock.acquire(timeout=timeout_s)


class _TaskWaiter:
    """A task that waits on a future of its own loop.

    Its loop cancels the future to wake it. A function of ours in the place of that compiled method could be left where
    it begins, by a handler of a signal that raises: then nobody would wake the task any more.
    """

    __slots__ = ("_future", "_loop", "is_gone")

    def __init__(self) -> None:
        self.is_gone = False
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[None] = self._loop.create_future()

    def wake(self) -> bool:
        try:
            self._loop.call_soon_threadsafe(self._future.cancel)
        except RuntimeError:  # its loop was closed
            return False
        return True

    async def wait(self, timeout_s: float) -> bool:
        # Not asyncio.wait: from Python 3.14 on its frame holds the task, and the error of a cancelled task holds its
        # frames. The iterator, and its workers, would stay until a collection.
        until = self._loop.time() + timeout_s
        # uvloop rounds to milliseconds, and would wake the task before the deadline.
        timer = self._loop.call_later(timeout_s + 0.001, self._future.cancel) if timeout_s >= 0 else None
        try:
            await asyncio.gather(self._future, return_exceptions=True)
        finally:
            if timer is not None:
                timer.cancel()
        return timer is None or self._loop.time() < until


_Waiter: TypeAlias = _ThreadWaiter | _TaskWaiter


class Handoff(Generic[T]):
    """A queue with one producer and any number of consumers.

    `put` belongs to the producer's thread; everything else may be called from any thread or task.
    """

    def __init__(self) -> None:
        self.ready: deque[T] = deque()
        self._waiters: deque[_Waiter] = deque()

    @property
    def waiting(self) -> int:
        """How many consumers wait."""
        return len(self._waiters)

    def put(self, item: T) -> None:
        """Append the item and wake one consumer."""
        self.ready.append(item)
        self.wake()

    def wake(self) -> None:
        """Wake one consumer to look at the state of things."""
        while self._waiters:
            try:
                waiter = self._waiters.popleft()
            except IndexError:
                return
            try:
                if not waiter.is_gone and waiter.wake():
                    return
            except BaseException:  # whoever ends the run then wakes it
                self._waiters.appendleft(waiter)
                raise

    def wake_all(self) -> None:
        """Wake every consumer: there will be no more."""
        for _ in range(len(self._waiters)):
            self.wake()

    def wait(self, changed: Callable[[], bool], deadline: float | None) -> bool:
        """Block the thread until woken, or ``changed()`` is true; False when the deadline passed.

        Args:
            changed: Looked at once after the waiter is in place.
            deadline: On :func:`time.monotonic`'s clock, seconds; None for no limit.
        """
        waiter = _ThreadWaiter()
        woken = False
        try:
            self._waiters.append(waiter)
            woken = changed() or waiter.wait(_remaining(deadline))
        finally:
            waiter.is_gone = True  # holds also where a Ctrl-C keeps it from being withdrawn
            self._withdraw(waiter, woken)
        return woken

    async def wait_async(self, changed: Callable[[], bool], deadline: float | None) -> bool:
        """Suspend the task until woken; see `wait`."""
        waiter = _TaskWaiter()
        woken = False
        try:
            self._waiters.append(waiter)
            woken = changed() or await waiter.wait(_remaining(deadline))
        finally:
            waiter.is_gone = True  # holds also where a Ctrl-C keeps it from being withdrawn
            self._withdraw(waiter, woken)
        return woken

    def _withdraw(self, waiter: _Waiter, woken: bool) -> None:
        with contextlib.suppress(ValueError):
            self._waiters.remove(waiter)
            return
        # The waiter was taken: a wake-up was meant for us. If we cannot use it, somebody else may.
        if not woken:
            self.wake()


def _remaining(deadline: float | None) -> float:
    """Return the seconds left; -1, which locks take for no limit, without a deadline."""
    return -1 if deadline is None else max(0.0, deadline - time.monotonic())
