"""What a run must not leave behind."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator
from pathlib import Path

from asyncloader.backends.backend import END_GRACE_S
from tests.support.leftovers import Holdings

PATIENCE_S = 3 * END_GRACE_S  # a worker that was stopped for good is killed after that grace


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """See that the block leaves no child, thread, descriptor, memfd, mapping or segment of shared memory.

    Raises:
        AssertionError: if it does.
    """
    before, mappings = Holdings.now(), memfd_mappings()
    yield
    left = before.more_than_before(PATIENCE_S)
    assert not left, "left behind: " + "; ".join(left)
    gc.collect()
    assert memfd_mappings() <= max(mappings, 1), f"{memfd_mappings()} mappings, {mappings} before"


@contextlib.contextmanager
def nobody_left() -> Iterator[None]:
    """See that the block leaves no child and no thread.

    Raises:
        AssertionError: if it does.
    """
    before = Holdings.now()
    yield
    given_up = time.monotonic() + PATIENCE_S
    while (left := _somebody(before)) and time.monotonic() < given_up:
        time.sleep(0.02)
    assert not left, f"left behind: {left}"


def _somebody(before: Holdings) -> list[object]:
    now = Holdings.now()
    return [*(now.children - before.children), *now.new_threads(before)]


def memfd_mappings() -> int:
    """Count this process's mappings of memfds."""
    return Path("/proc/self/maps").read_text().count("/memfd:")
