"""The epochs of one iterator whose samples seed the global generators in the trainer's process, and how these end.

    break: the iterator is dropped ─> no sample seeds them any more; one that does is waited for ─> the trainer goes on

A trainer may seed the generators after a ``break``. No sample of the epoch that it has left undoes that.
"""

from __future__ import annotations

import sys
import weakref

from asyncloader.seeding import turns
from asyncloader.seeding.sample_context import EpochKey
from asyncloader.signals import HandlersWait


class SeedingEpochs:
    """The epochs of an iterator that are not over. Belongs to its consumers."""

    def __init__(self) -> None:
        self._keys: list[EpochKey] = []

    def begin(self, key: EpochKey) -> None:
        """Note an epoch that begins."""
        self._keys.append(key)

    def end(self, key: object = None, *, others: bool = False) -> None:
        """End an epoch, if it has begun here, or all others; by default all.

        Wait for the sample that has the generators, 10 s at most, and then warn.
        """
        keys = [each for each in self._keys if key is None or (each is key) is not others]
        if turns.end(keys):
            turns.wait_ended()
        self._keys[:] = [each for each in self._keys if not each.is_over]

    def end_with(self, iterator: object) -> None:
        """End all epochs when this is dropped, and wait as `end` does."""
        weakref.finalize(iterator, _end_dropped, self._keys).atexit = False


def _end_dropped(keys: list[EpochKey]) -> None:
    # Handlers of signals run when the wait is over: an exception of theirs would end it, and is lost in a finalizer.
    if turns.end(keys) and not sys.is_finalizing():
        with HandlersWait():
            turns.wait_ended()
