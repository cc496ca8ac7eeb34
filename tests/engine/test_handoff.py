"""The hand-off between the loop thread and the consumer whose turn it is: no item and no wake-up is ever lost."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from asyncloader.engine.handoff import Handoff
from tests.support.patience import wait_until

SOON_S = 10.0


def put(handoff: Handoff[int], item: int) -> None:
    """Hand an item over, as the loop thread does it."""
    handoff.ready.append(item)
    handoff.wake()


@pytest.fixture
def handoff() -> Handoff[int]:
    """One where nothing is ready."""
    return Handoff()


def test_an_item_put_between_waiter_and_second_look_wakes_for_nothing(handoff: Handoff[int]) -> None:
    """The second interleaving of the docstring: the waiter is woken already, which costs nothing."""

    def look() -> bool:
        assert handoff.is_awaited
        put(handoff, 7)  # as the loop thread would, just now
        return bool(handoff.ready)

    assert handoff.wait(look, None)
    assert (list(handoff.ready), handoff.is_awaited) == ([7], False)
    handoff.wake()  # nobody waits


async def test_a_task_finds_an_item_put_between_waiter_and_second_look(handoff: Handoff[int]) -> None:
    """The same for a task; the late wake-up of its future does no harm."""

    def look() -> bool:
        put(handoff, 7)
        return bool(handoff.ready)

    assert await handoff.wait_async(look, None)
    await asyncio.sleep(0)
    assert (list(handoff.ready), handoff.is_awaited) == ([7], False)


async def test_who_waits_is_woken_by_an_item(handoff: Handoff[int]) -> None:
    """A thread, and a task; more than one wake-up does no harm."""
    with ThreadPoolExecutor(1) as threads:
        in_thread = threads.submit(handoff.wait, lambda: False, None)
        wait_until(lambda: handoff.is_awaited)
        put(handoff, 1)
        handoff.wake()
        assert in_thread.result(SOON_S)
    in_task = asyncio.create_task(handoff.wait_async(lambda: False, None))
    await asyncio.sleep(0)
    threading.Thread(target=put, args=(handoff, 2)).start()
    assert await asyncio.wait_for(in_task, SOON_S)
    assert list(handoff.ready) == [1, 2]


async def test_waiting_ends_at_the_deadline(handoff: Handoff[int]) -> None:
    """Without an item the answer is False, in time, and no waiter is left."""
    begun = time.monotonic()
    assert not handoff.wait(lambda: False, begun + 0.05)
    assert not handoff.wait(lambda: False, begun)  # long past
    assert not await handoff.wait_async(lambda: False, begun + 0.1)
    assert not await handoff.wait_async(lambda: False, begun)
    assert time.monotonic() - begun >= 0.1
    assert not handoff.is_awaited


async def test_a_cancelled_task_keeps_nothing_alive(handoff: Handoff[int]) -> None:
    """Who waits in a dropped iterator was its last user: its workers end by reference count, without a collection."""

    class News:
        def has_come(self) -> bool:
            return False

    news = News()
    gone = weakref.ref(news)
    task = asyncio.create_task(handoff.wait_async(news.has_come, None))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.sleep(0)  # uvloop has the last callback until its next turn
    del task, news
    assert gone() is None
    assert not handoff.is_awaited


def test_a_waiter_of_a_closed_loop_is_passed_over(handoff: Handoff[int]) -> None:
    """Its task was left unfinished: the next consumer takes the item."""
    loop = asyncio.new_event_loop()
    task = loop.create_task(handoff.wait_async(lambda: False, None))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    put(handoff, 1)
    assert handoff.wait(lambda: bool(handoff.ready), None)
    with contextlib.suppress(RuntimeError):
        task.get_coro().close()  # type: ignore[union-attr]
