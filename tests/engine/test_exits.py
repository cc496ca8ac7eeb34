"""What is remembered of a program's threads until its end. What happens there: tests/faults/test_exits.py."""

from __future__ import annotations

import threading
import weakref

from asyncloader.engine import exits


def test_threads_that_have_ended_are_forgotten() -> None:
    """A program may train each epoch in a thread of its own."""

    def end_of_one() -> weakref.ref[threading.Thread]:
        thread = threading.Thread(target=exits.note_user)
        thread.start()
        thread.join()
        return weakref.ref(thread)

    first, _ = end_of_one(), end_of_one()
    assert first() is None
