"""What counts leftovers does not keep them."""

from __future__ import annotations

import mmap
import os
import sys
import threading
import weakref

import pytest

from tests.support.leftovers import SHM, Holdings


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


@pytest.mark.skipif(sys.platform != "linux", reason="names of segments are not seen elsewhere")
def test_shared_memory_is_of_whoever_has_mapped_it() -> None:
    """What nobody has mapped is another program's, but for torch's."""
    before = Holdings.now()
    mapped, _, of_torch = segments = [SHM / f"{name}_{os.getpid()}" for name in ("psm", "psm_unused", "torch")]
    try:
        for segment in segments:
            segment.write_bytes(bytes(mmap.PAGESIZE))
        with mapped.open("r+b") as file, mmap.mmap(file.fileno(), 0):
            left = before.more_than_before(0.0)
        assert {text for text in left if text.startswith("shared memory")} == {
            f"shared memory {segment}" for segment in (mapped, of_torch)
        }
    finally:
        for segment in segments:
            segment.unlink(missing_ok=True)
