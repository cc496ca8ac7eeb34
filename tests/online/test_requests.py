"""Requests: calls of a feed that may wait. Each is answered once, and thousands that wait are few objects."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from asyncloader.online import Feed, FeedFullError
from asyncloader.online.link import Request

TASKS = 500


async def test_leases_are_few_objects_for_the_garbage_collector() -> None:
    """While they wait: it looks at all of them again and again, with 10,000 in flight."""
    goes_on, done = threading.Event(), asyncio.Event()

    def items() -> Iterator[int]:
        goes_on.wait(20)
        yield from range(TASKS)

    feed = Feed(items, batch_size=TASKS)

    async def lease() -> None:
        async with feed.lease() as item:
            await done.wait()
            item.drop()

    tasks = [asyncio.create_task(lease()) for _ in range(TASKS)]
    gc.collect()
    before = len(gc.get_objects())
    await asyncio.sleep(0)
    gc.collect()
    waiting = len(gc.get_objects()) - before
    goes_on.set()
    done.set()
    await asyncio.gather(*tasks)
    feed.close()
    assert waiting < 11 * TASKS  # 24 while a request was a future of `concurrent`


def test_each_call_is_made_once() -> None:
    """Whichever thread comes first: those that want to be told, or those that answer."""
    begins = threading.Barrier(4)

    def ask(request: Request, told: list[int], first: int) -> None:
        begins.wait(20)
        for number in range(first, first + 20):
            request.when_done(lambda _, number=number: told.append(number))

    def answer(request: Request) -> None:
        begins.wait(20)
        request.deliver()

    with ThreadPoolExecutor(4) as pool:
        for _ in range(50):
            request, told = Request(), list[int]()
            asking = [pool.submit(ask, request, told, first) for first in (0, 20)]
            for each in [*asking, *(pool.submit(answer, request) for _ in range(2))]:
                each.result(20)
            assert sorted(told) == [*range(40)]


def test_a_call_while_others_are_made() -> None:
    """What asks to be told inside of a call is told, and a call that raises holds up no other."""
    request, told = Request(), list[str]()

    def fail(request: Request) -> None:
        request.when_done(lambda _: told.append("inner"))
        raise OSError

    request.when_done(fail)
    request.when_done(lambda _: told.append("outer"))
    request.answer(7)
    assert sorted(told) == ["inner", "outer"]
    assert request.result() == 7


@pytest.mark.parametrize("timeout", [-1, 0, 0.01])
def test_a_thread_waits_no_longer_than_it_says(timeout: float) -> None:
    """A time limit that is over before the call is one of 0."""
    request = Request()
    with pytest.raises(TimeoutError):
        request.result(timeout)
    request.answer(None, ValueError("late"))
    with pytest.raises(ValueError, match="late"):
        request.result(timeout)
    feed = Feed(batch_size=1, max_samples=1)
    feed.put_nowait(0)
    with pytest.raises(FeedFullError):
        feed.put_sync(1, timeout=timeout)
    feed.close()
