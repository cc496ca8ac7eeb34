"""What counts leftovers does not keep them."""

from __future__ import annotations

import os
import threading
import weakref

from tests.support.leftovers import Holdings


class Holder(threading.Thread):
    """Has a descriptor, which is closed with it, as an executor's thread has those of its processes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.may_end = threading.Event()
        weakref.finalize(self, os.close, os.open(os.devnull, os.O_RDONLY))

    def run(self) -> None:
        self.may_end.wait()


def test_a_thread_that_was_seen_and_has_ended_holds_nothing() -> None:
    """The look at it before it ended does not keep its descriptor."""
    before = Holdings.now()
    thread = Holder()
    thread.start()
    seen = Holdings.now()
    assert len(before.more_than_before(0.0)) == 2
    thread.may_end.set()
    thread.join()
    del thread
    assert before.more_than_before(0.0) == []
    assert not seen.new_threads(before)
