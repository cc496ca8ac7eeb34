"""The hand-off between the loop thread and any number of consumers: no item and no wake-up is ever lost."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from asyncloader.engine.handoff import Handoff
from tests.patience import wait_until

SOON_S = 10.0


class Steps:
    """Forces an order between threads: whoever comes to a step before its turn waits for it."""

    def __init__(self) -> None:
        self._next = 1
        self._changed = threading.Condition()

    def __call__(self, number: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._next == number, SOON_S), f"step {number} never came"
            self._next += 1
            self._changed.notify_all()


def in_thread(function: Callable[[], object]) -> threading.Thread:
    """Start a thread for the function."""
    thread = threading.Thread(target=function, daemon=True)  # a test that fails leaves it waiting
    thread.start()
    return thread


def test_an_item_put_before_the_waiter_is_in_place_is_found() -> None:
    """The first interleaving of the docstring: the second look finds the item, and the waiter is withdrawn."""
    handoff: Handoff[int] = Handoff()
    steps = Steps()

    def consume() -> None:
        assert not handoff.ready
        steps(1)
        steps(4)
        assert handoff.wait(lambda: bool(handoff.ready), None)

    consumer = in_thread(consume)
    steps(2)
    handoff.put(7)  # finds nobody who waits
    assert handoff.waiting == 0
    steps(3)
    consumer.join(SOON_S)
    assert not consumer.is_alive()
    assert (list(handoff.ready), handoff.waiting) == ([7], 0)


def test_an_item_put_between_waiter_and_second_look_wakes_for_nothing() -> None:
    """The second interleaving: the waiter was taken and woken already, which costs nothing."""
    handoff: Handoff[int] = Handoff()

    def look() -> bool:
        assert handoff.waiting == 1
        handoff.put(7)  # as the loop thread would, just now
        assert handoff.waiting == 0
        return bool(handoff.ready)

    assert handoff.wait(look, None)
    assert list(handoff.ready) == [7]


async def test_a_task_finds_an_item_put_between_waiter_and_second_look() -> None:
    """The same for a task; the late wake-up of its future does no harm."""
    handoff: Handoff[int] = Handoff()

    def look() -> bool:
        handoff.put(7)
        return bool(handoff.ready)

    assert await handoff.wait_async(look, None)
    await asyncio.sleep(0)
    assert list(handoff.ready) == [7]


def test_a_thread_is_woken_by_an_item() -> None:
    """A consumer that sleeps wakes up, and only one for one item."""
    handoff: Handoff[int] = Handoff()
    woken: list[bool] = []
    threads = [in_thread(lambda: woken.append(handoff.wait(lambda: False, None))) for _ in range(3)]
    wait_until(lambda: handoff.waiting == 3)
    handoff.put(1)
    wait_until(lambda: len(woken) == 1)
    assert handoff.waiting == 2
    handoff.wake_all()
    for thread in threads:
        thread.join(SOON_S)
    assert woken == [True] * 3


def test_waiting_ends_at_the_deadline() -> None:
    """Without an item the answer is False, in time, and no waiter is left."""
    handoff: Handoff[int] = Handoff()
    begun = time.monotonic()
    assert not handoff.wait(lambda: False, begun + 0.05)
    assert not handoff.wait(lambda: False, begun)  # long past
    assert time.monotonic() - begun >= 0.05
    assert handoff.waiting == 0


async def test_a_tasks_waiting_ends_at_the_deadline() -> None:
    """The same for a task."""
    handoff: Handoff[int] = Handoff()
    begun = time.monotonic()
    assert not await handoff.wait_async(lambda: False, begun + 0.05)
    assert not await handoff.wait_async(lambda: False, begun)
    assert time.monotonic() - begun >= 0.05
    assert handoff.waiting == 0


async def test_a_cancelled_task_withdraws_its_waiter() -> None:
    """So that no wake-up goes to it."""
    handoff: Handoff[int] = Handoff()
    task = asyncio.create_task(handoff.wait_async(lambda: False, None))
    await asyncio.sleep(0)
    assert handoff.waiting == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert handoff.waiting == 0


async def test_a_cancelled_task_keeps_nothing_alive() -> None:
    """Who waits in a dropped iterator was its last user: its workers end by reference count, without a collection."""

    class News:
        def has_come(self) -> bool:
            return False

    handoff: Handoff[int] = Handoff()
    news = News()
    gone = weakref.ref(news)
    task = asyncio.create_task(handoff.wait_async(news.has_come, None))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.sleep(0)  # uvloop has the last callback until its next turn
    del task, news
    assert gone() is None


async def test_a_wake_up_of_a_cancelled_task_is_passed_on() -> None:
    """1. Two tasks wait. 2. An item comes, the first is woken. 3. It is cancelled before it runs. 4. The second
    wakes."""
    handoff: Handoff[int] = Handoff()
    first = asyncio.create_task(handoff.wait_async(lambda: False, None))
    await asyncio.sleep(0)
    second = asyncio.create_task(handoff.wait_async(lambda: False, None))
    await asyncio.sleep(0)
    handoff.put(7)
    first.cancel()
    assert await asyncio.wait_for(second, SOON_S)
    assert first.cancelled() or await asyncio.gather(first, return_exceptions=True)


async def test_a_wake_up_that_comes_with_the_deadline_is_passed_on() -> None:
    """1. Two tasks wait. 2. The first's deadline passes; 3. in the same turn of its loop it is woken. 4. The second
    wakes."""
    handoff: Handoff[int] = Handoff()
    first = asyncio.create_task(handoff.wait_async(lambda: False, time.monotonic() + 0.02))
    await asyncio.sleep(0)
    second = asyncio.create_task(handoff.wait_async(lambda: False, None))
    await asyncio.sleep(0)
    time.sleep(0.03)  # the loop is late: when it turns, both the timer and the wake-up are due  # noqa: ASYNC251
    handoff.put(7)
    if await asyncio.wait_for(first, SOON_S):
        assert handoff.waiting == 1  # it may take the item; the other sleeps on
        handoff.wake_all()
    assert await asyncio.wait_for(second, SOON_S)


def test_a_wake_up_of_a_timed_out_thread_is_passed_on() -> None:
    """1. Two threads wait. 2. The first is out of time. 3. Its waiter is taken before it withdraws. 4. The second
    wakes."""
    handoff: Handoff[int] = Handoff()
    steps = Steps()
    original = handoff._withdraw

    def late(waiter: object, woken: bool) -> None:
        if not woken and threading.current_thread() is first:
            steps(1)
            steps(4)
        original(waiter, woken)  # type: ignore[arg-type]

    handoff._withdraw = late  # type: ignore[method-assign]
    answers: dict[str, bool] = {}
    first = threading.Thread(
        target=lambda: answers.update(first=handoff.wait(lambda: False, time.monotonic() + 0.01)), daemon=True
    )
    first.start()
    wait_until(lambda: handoff.waiting == 1)
    second = in_thread(lambda: answers.update(second=handoff.wait(lambda: False, None)))
    wait_until(lambda: handoff.waiting == 2)
    steps(2)
    handoff.put(7)  # passes over the first waiter, who has given up
    assert handoff.waiting == 0
    steps(3)
    second.join(SOON_S)
    first.join(SOON_S)
    assert answers == {"first": False, "second": True}


def test_waiters_of_a_closed_loop_are_passed_over() -> None:
    """A loop that was closed with a task waiting does not swallow the wake-up of a thread that waits too."""
    handoff: Handoff[int] = Handoff()
    loop = asyncio.new_event_loop()
    coroutine = handoff.wait_async(lambda: False, None)
    task = loop.create_task(coroutine)
    loop.call_soon(loop.stop)
    loop.run_forever()
    assert handoff.waiting == 1
    loop.close()
    thread = in_thread(lambda: handoff.wait(lambda: False, None))
    wait_until(lambda: handoff.waiting == 2)
    handoff.put(7)
    thread.join(SOON_S)
    assert not thread.is_alive()
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    with contextlib.suppress(RuntimeError):
        coroutine.close()


@pytest.mark.parametrize("loop_factory", ["asyncio", "uvloop"])
def test_threads_and_tasks_together_get_each_item_once(loop_factory: str) -> None:
    """Threads, and tasks of several loops, some of which are cancelled or run out of time now and then."""
    make_loop = asyncio.new_event_loop if loop_factory == "asyncio" else pytest.importorskip("uvloop").new_event_loop
    handoff: Handoff[int] = Handoff()
    total = 3000
    taken: deque[int] = deque()
    ended = threading.Event()

    def news() -> bool:
        return bool(handoff.ready) or ended.is_set()

    def take() -> bool:
        try:
            taken.append(handoff.ready.popleft())
        except IndexError:
            return False
        return True

    def consume() -> None:
        while not (ended.is_set() and not handoff.ready):
            if not take():
                handoff.wait(news, time.monotonic() + 0.002 if len(taken) % 3 else None)

    async def consume_async() -> None:
        while not (ended.is_set() and not handoff.ready):
            if not take():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.002 if len(taken) % 3 else None):
                        await handoff.wait_async(news, time.monotonic() + 0.001 if len(taken) % 2 else None)
            await asyncio.sleep(0)

    def run_loop() -> None:
        async def main() -> None:
            await asyncio.gather(*(consume_async() for _ in range(3)))

        with asyncio.Runner(loop_factory=make_loop) as runner:
            runner.run(main())

    with ThreadPoolExecutor(4) as threads:
        done = [threads.submit(consume), threads.submit(consume), threads.submit(run_loop), threads.submit(run_loop)]
        for number in range(total):
            handoff.put(number)
            if number % 7 == 0:
                time.sleep(0.0002)  # let them run dry
        ended.set()
        handoff.wake_all()
        for future in done:
            future.result(SOON_S)
    assert sorted(taken) == list(range(total))
    assert handoff.waiting == 0
