"""Ctrl-C at every moment of an operation on a feed: it has happened or it has not, and the feed goes on.

The quick form takes some of the moments, others in each run; every one of them is slow. A failure names its moment.
"""

import contextlib
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from asyncloader import DataLoader
from asyncloader.online import Feed
from tests.faults.test_interrupts_everywhere import NEVER, RealCtrlC
from tests.support.patience import wait_until

pytestmark = [
    pytest.mark.usefixtures("sigint_raises"),
    pytest.mark.skipif(
        sys.version_info[:2] == (3, 12), reason="CPython 3.12.1 crashes by itself where instructions are traced"
    ),
]

ITEMS = 4


class Counter:
    """A source with a state, whose code the interrupts do not hit."""

    def __init__(self) -> None:
        self.given = 0

    def __iter__(self) -> "Counter":
        return self

    def __next__(self) -> int:
        if self.given == ITEMS:
            raise StopIteration
        self.given += 1
        return self.given - 1

    def state_dict(self) -> dict[str, Any]:
        """Return how many were given."""
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on behind them."""
        self.given = state["given"]


SOURCES: dict[str, Callable[[], Any]] = {
    "list": lambda: [*range(ITEMS)],
    "generator": lambda: (number for number in range(ITEMS)),
    "stateful": Counter,
}


def lease(feed: Feed[Any]) -> None:
    with feed.lease() as item:
        item.put(item.value)


def iterate(feed: Feed[Any]) -> None:
    for item in feed.leases():
        # A signal between the two lines would leave the item with a producer that has not begun.
        sys.settrace(None)
        with item:
            item.put(item.value)
        return


def drop(feed: Feed[Any]) -> None:
    with feed.lease() as item:
        item.drop()


def retry(feed: Feed[Any]) -> None:
    with feed.lease() as item:
        item.retry()


def read(feed: Feed[Any]) -> None:
    for _ in range(2):
        with feed.lease() as item:
            item.put(item.value)
    next(iter(feed.make_batch_sampler()))


def set_version(feed: Feed[Any]) -> None:
    feed.version += 1


def take_state(feed: Feed[Any]) -> None:
    feed.state_dict()


def stop_and_resume(feed: Feed[Any]) -> None:
    feed.load_state_dict(feed.state_dict())


OPERATIONS = [lease, iterate, drop, retry, read, set_version, take_state, stop_and_resume, Feed.stats, Feed.handle]


@pytest.fixture(params=[30, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "every"])
def one_in(request: pytest.FixtureRequest) -> int:
    """Of how many moments one is taken."""
    return request.param  # type: ignore[no-any-return]


def each_moment(
    operation: Callable[[Feed[Any]], object], make: Callable[[], Feed[Any]], one_in: int
) -> Iterator[tuple[int, Feed[Any]]]:
    """Interrupt an operation at one moment after the other, of one feed each; give the moment, and the feed."""
    with RealCtrlC(NEVER):
        operation(make())
    moment, uninterrupted = random.randint(1 - one_in, 0), 0
    while uninterrupted < 2:
        moment += one_in
        interrupt, feed = RealCtrlC(moment), make()
        with contextlib.suppress(KeyboardInterrupt), interrupt:
            operation(feed)
        uninterrupted += interrupt.left > 0
        yield moment, feed
        server = feed._server
        assert not any((server._leasers, server._putters, server._readers)), moment
        feed.close()
    assert moment > 2 * one_in, "it was not interrupted at all"


def rest_of(feed: Feed[Any]) -> list[int]:
    """Return what is trained, after all items that are left were put."""
    for item in feed.leases():
        with item:
            item.put(item.value)
    return sorted(int(value) for batch in DataLoader(feed) for value in batch)


@pytest.mark.covering(1)
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("source", ["list", "generator", "stateful"])
def test_each_item_once_whatever_was_interrupted(
    source: str, operation: Callable[[Feed[Any]], object], one_in: int
) -> None:
    if operation is stop_and_resume and source == "generator":
        pytest.skip("a generator that was read cannot go back")
    for moment, feed in each_moment(operation, lambda: Feed(SOURCES[source](), batch_size=2), one_in):
        before = feed.stats().counts["dropped"]
        assert before <= (operation is drop), moment
        seen = rest_of(feed)
        assert seen == [*range(before, ITEMS)], moment
        assert feed.stats().running == 0


@pytest.mark.parametrize("how", ["put_nowait", "put_sync"])
def test_a_put_happens_or_not(how: str, one_in: int) -> None:
    for moment, feed in each_moment(lambda feed: getattr(feed, how)(0), lambda: Feed(batch_size=1), one_in):
        stats = feed.stats()
        assert stats.ready <= 1, moment
        feed.put_nowait(1)
        feed.close()
        assert [batch.item() for batch in DataLoader(feed)] == [0, 1][1 - stats.ready :], moment


def test_who_waits_for_room(one_in: int) -> None:
    """Whoever comes behind it is not left waiting for a wake-up that went to it."""

    def make() -> Feed[Any]:
        feed = Feed(batch_size=1, max_samples=1)
        feed.put_nowait(0)
        return feed

    def put(feed: Feed[Any]) -> None:
        reader = threading.Thread(target=make_room, args=(feed,))
        reader.start()
        try:
            feed.put_sync(1)
        finally:
            sys.settrace(None)
            is_over.set()
            reader.join(20)
            is_over.clear()

    def make_room(feed: Feed[Any]) -> None:
        wait_until(lambda: feed.stats().producers_waiting or is_over.is_set())
        keys = feeds[0] = iter(feed.make_batch_sampler())
        next(keys)
        keys.follow(lambda: 1)
        keys.asked()

    feeds: dict[int, Any] = {}
    is_over = threading.Event()
    for moment, feed in each_moment(put, make, one_in):
        ready = feed.stats().ready
        assert ready <= 1, moment
        if not ready:
            feed.put_sync(2, timeout=20)
        assert len(next(feeds[0])) == 1, moment


def test_an_interrupt_while_the_source_takes_its_time() -> None:
    """Its code runs in a thread, where no handler raises: whoever waits is interrupted, and no item is lost by that."""
    goes_on, reads = threading.Event(), threading.Event()

    def items() -> Iterator[int]:
        reads.set()
        goes_on.wait(20)
        yield from range(ITEMS)

    feed = Feed(items(), batch_size=1, max_samples=ITEMS + 1)
    main = threading.main_thread().ident or 0
    threading.Timer(0.2, lambda: reads.wait(20) and signal.pthread_kill(main, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        lease(feed)
    goes_on.set()
    assert rest_of(feed) == [*range(ITEMS)]


def test_an_iterator_that_was_interrupted_goes_on(one_in: int) -> None:
    """It does not wait for a batch that it has not asked for; none is left out, and none comes twice."""
    readers: dict[Feed[Any], Any] = {}

    def make() -> Feed[Any]:
        feed: Feed[Any] = Feed(batch_size=1, max_samples=2)
        for number in range(2):
            feed.put_nowait(number)
        readers[feed] = iter(feed.make_batch_sampler())
        return feed

    for moment, feed in each_moment(lambda feed: next(readers[feed]), make, one_in):
        keys = readers.pop(feed)
        taken = keys.number
        seen: list[Any] = []
        reading = threading.Thread(target=lambda keys=keys, seen=seen: seen.append(next(keys)), daemon=True)
        reading.start()
        reading.join(20)
        assert [key[3] for batch in seen for key in batch] == [taken], moment
