"""Producers of a program that has ended: it does not wait for them, and they are told."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from tests.support.nursery import Program

PROGRAM = """
    import multiprocessing
    import sys
    import threading
    import time

    from asyncloader import DataLoader
    from asyncloader.online import Feed


    def put(feed):
        while True:
            feed.put_sync(0)


    def lease(feed):
        for item in feed.leases():
            with item:
                item.put(item.value)


    def train(feed):
        for number, _ in enumerate(DataLoader(feed, num_workers=int(num_workers))):
            if number == 3:
                print("trained")
                raise SystemExit(7)


    made_by, producer, trainer, num_workers = sys.argv[1:]
    feed = Feed(iter(range(10**9)) if made_by == "lease" else None, batch_size=2, max_samples=2)
    if made_by == "lease":
        feed.load_state_dict(feed.state_dict())
    if producer == "thread":
        threading.Thread(target=globals()[made_by], args=(feed,)).start()
    else:
        context = multiprocessing.get_context("fork")
        context.Process(target=globals()[made_by], args=(feed.handle(),)).start()
    if trainer == "nobody":
        while not feed.stats().producers_waiting:
            time.sleep(0.01)
        sys.exit(7)
    if trainer == "main":
        train(feed)
    if trainer == "late":
        threading.Thread(target=lambda: [time.sleep(1), train(feed)]).start()
    else:
        threading.Thread(target=train, args=(feed,)).start()
    sys.exit(7)
"""

LATE = """
    import sys
    import threading
    import time

    from asyncloader import DataLoader
    from asyncloader.online import Feed


    def lease(feed):
        for item in feed.leases():
            with item:
                item.put(item.value)


    def train(feed):
        while threading.main_thread().is_alive():
            time.sleep(0.01)
        time.sleep(0.3)
        for number, _ in enumerate(DataLoader(feed)):
            if number == 1500:
                print("trained")
                raise SystemExit(7)


    feed = Feed(iter(range(10**9)), batch_size=2, max_samples=2)
    threading.Thread(target=lease, args=(feed,)).start()
    threading.Thread(target=train, args=(feed,)).start()
    sys.exit(7)
"""

pytestmark = pytest.mark.interpreter

THREADS_COME_LATE = not (3, 12) <= sys.version_info < (3, 12, 2)
"""Whether Python starts threads for anybody once the main thread has returned."""


@pytest.mark.skipif(not THREADS_COME_LATE, reason="this Python starts no thread once the main thread has returned")
def test_a_source_is_read_on_for_a_trainer_that_comes_late(run: Callable[..., Program]) -> None:
    """Beyond what was read ahead when the main thread ended."""
    ended = run(LATE)
    assert (ended.returncode, ended.out, ended.err) == (7, "trained\n", "")


@pytest.mark.covering(2)
@pytest.mark.parametrize(("trainer", "num_workers"), [("main", 1), ("thread", 0), ("late", 0), ("nobody", 0)])
@pytest.mark.parametrize("producer", ["thread", "process"])
@pytest.mark.parametrize("made_by", ["put", "lease"])
def test_a_trainer_that_ends(
    run: Callable[..., Program], made_by: str, producer: str, trainer: str, num_workers: int
) -> None:
    """Those who wait for room in the feed are told why; what leases items comes to its end.

    So it is if nobody has begun to train when the main thread ends. A thread may begin a while later: until then not
    all that is left waits.
    """
    if trainer in ("thread", "late") and not THREADS_COME_LATE:
        pytest.skip("this Python starts no thread once the main thread has returned")
    ended = run(PROGRAM, made_by, producer, trainer, num_workers)
    assert ended.returncode == 7
    assert ended.out == ("trained\n" if trainer != "nobody" else "")
    if made_by == "lease":
        assert ended.err == ""
    else:
        last = ended.err.splitlines()[-1]
        assert last.startswith("asyncloader.online.errors.FeedClosedError: the feed "), ended.err
