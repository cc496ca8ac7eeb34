"""The epochs of one iterator whose samples seed the global generators in the trainer's process, and how these end.

    break: the iterator is dropped ─> no sample seeds them any more; one that does is waited for ─> the trainer goes on

A trainer may seed the generators after a ``break``. No sample of the epoch that it has left undoes that.
"""

from __future__ import annotations

import queue
import signal
import sys
import threading
import weakref
from functools import partial

from asyncloader import threads
from asyncloader.seeding import turns
from asyncloader.seeding.sample_context import EpochKey
from asyncloader.signals import HandlersWait

_ends: dict[weakref.ref[object], weakref.ref[object]] = {}
"""Of iterators that are there. Not in what they refer to: a weak reference that goes with its object calls nothing."""


class SeedingEpochs:
    """The epochs of an iterator that are not over. Belongs to its consumers."""

    def __init__(self) -> None:
        self._keys: list[EpochKey] = []

    def begin(self, key: EpochKey) -> None:
        """Note an epoch that begins."""
        self._keys.append(key)

    def end(self) -> None:
        """End all epochs; wait for the sample that has the generators, 10 s at most, and then warn."""
        self._end(self._keys.copy())

    def end_one(self, key: tuple[int, int, int]) -> None:
        """End this epoch as `end` does, if it has begun here."""
        self._end([each for each in self._keys if each is key])

    def end_others(self, key: tuple[int, int, int]) -> None:
        """End all epochs but this one."""
        self._end([each for each in self._keys if each is not key])

    def _end(self, keys: list[EpochKey]) -> None:
        if turns.end(keys):
            turns.wait_ended()
        self._keys[:] = [each for each in self._keys if not each.is_over]

    def end_with(self, iterator: object) -> None:
        """End all epochs when this is dropped, and wait as `end` does.

        An exception of a signal's handler in the callback of a weak reference would be printed and forgotten. So
        handlers do not run while this one waits: a thread raises the signals once more when the iterator's callbacks
        are over. The thread learns of that by the other callback, a method of C, which comes later because it was made
        before.
        """
        is_over: queue.SimpleQueue[object] = queue.SimpleQueue()
        last = weakref.ref(iterator, is_over.put)
        _ends[weakref.ref(iterator, partial(_on_dropped, self._keys, is_over))] = last


def _on_dropped(keys: list[EpochKey], is_over: queue.SimpleQueue[object], dropped: weakref.ref[object]) -> None:
    del _ends[dropped]
    if not turns.end(keys) or sys.is_finalizing():
        return
    came: list[int] = []
    with HandlersWait(came.append):
        turns.wait_ended()
    if came:
        threads.start(partial(_raise_again, came, is_over), "asyncloader signals")


def _raise_again(numbers: list[int], is_over: queue.SimpleQueue[object]) -> None:
    is_over.get()
    for number in numbers:  # to the thread that handles them, which may wait for something by now
        signal.pthread_kill(threading.main_thread().ident or 0, number)
