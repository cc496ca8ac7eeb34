"""Which of a loader's runs its methods speak of: the one that has given a batch last, or has begun.

    for batch in loader:                    run 0
        if step == 6:
            picture(next(iter(loader)))     run 1 begins and is dropped after a batch: it was a look beside run 0
    loader.state_dict()                     run 0 was used last: the methods speak of it

A run that was dropped after one batch at most was a look, and the methods speak of the run beside it, if that has
outlived it. Nothing is noted for this when a batch is given: figures have the time at which it was taken.
"""

from __future__ import annotations

import weakref
from collections import deque
from operator import attrgetter
from typing import Any

from asyncloader.run.checkpoint import Checkpointer, nobody, warn_once

_REMEMBERED = 64
"""Iterators that were dropped."""
_IN_DOUBT = (
    "The loader's state was asked for while two of its iterators were in use. It is that of the one that has given %d "
    "batches, not of the other, which has given %d. If the other one is meant, call state_dict() of that iterator. If "
    "an iterator is no longer needed, delete it, or close() it."
)
_USED_UP = (
    "The state that was loaded is used up: an iterator has begun at it, and was dropped before its end, after %d "
    "batches. The iterator that begins now begins an epoch anew. If that was a look at a batch before training, load "
    "the state again after the look."
)
_RESTARTED = (
    "iter(loader) was called while another iterator was in use, which had given %d batches and was not at its end. "
    "With persistent_workers=True both are one: a loop that is still going on goes on in the new run, from its "
    "beginning. To look at a batch inside a loop, use another loader, or loader.batch(epoch, number)."
)


class CurrentRun:
    """Knows which run is the current one. Used in the threads of consumers; iterators may be dropped in any thread.

    Args:
        warned: The warnings that the loader has logged about states, once each.

    Attributes:
        records: The newest run, and before it those whose iterators were alive when it began.
    """

    def __init__(self, warned: set[str]) -> None:
        self.records: tuple[Checkpointer, ...] = ()
        # References to iterators that were dropped, in this order. Each is put here without a function of ours: what
        # the handler of a signal raises in one, while an object goes, is lost.
        self._dropped: deque[Any] = deque(maxlen=_REMEMBERED)
        self._warned = warned

    def begin(self, run: Checkpointer) -> None:
        """Note a run that begins."""
        last = self.run()
        if last is not None and last.iterator is not nobody and not last.is_alive:
            self._warn_if_used_up(last)
        self.records = (*(each for each in self.records if each.is_alive), run)

    def hand_on(self, iterator: Any) -> None:
        """Note the iterator of the newest run. With persistent workers it had another run before, which is over."""
        *older, newest = self.records
        for each in older:
            if each.iterator() is iterator:
                self._warn_if_used_up(each)
                self.records = (*(other for other in older if other is not each), newest)
                break
        newest.iterator = weakref.ref(iterator, self._dropped.append)

    def run(self, *, of_state: bool = False) -> Checkpointer | None:
        """Return the current run; None before the first one.

        Args:
            of_state: A state is to be made of it. If there is doubt, a warning says which run that is.
        """
        if not self.records:
            return None
        *others, last = sorted(self.records, key=attrgetter("used_at"))
        rivals = [each for each in others if each.is_alive or (not last.is_alive and self._has_outlived(each, last))]
        if not rivals or (last is self.records[-1] and last.is_alive):
            return last
        meant, other = (rivals[-1], last) if last.was_a_look else (last, rivals[-1])
        if of_state:
            warn_once(self._warned, _IN_DOUBT, meant.given, other.given)
        return meant

    def warn_of_restart(self) -> None:
        """Warn if the run whose workers are to begin another one has given batches, and has more."""
        last = self.run()
        if last is not None and last.given and not last.progress.end_is_known and last.iterator() is not None:
            warn_once(self._warned, _RESTARTED, last.given)

    def close_all(self) -> None:
        """Close the iterators that there are, and forget all runs."""
        for each in self.records:
            if (iterator := each.iterator()) is not None:
                iterator.leave()
        self.records = ()

    def _has_outlived(self, run: Checkpointer, other: Checkpointer) -> bool:
        """Whether the iterator of a run was dropped after that of another one, or may have come to its end after it."""
        dropped = list(self._dropped)
        if run.iterator not in dropped or other.iterator not in dropped:  # closed, or at its end, some time ago
            return True
        return dropped.index(run.iterator) > dropped.index(other.iterator)

    def _warn_if_used_up(self, last: Checkpointer) -> None:
        if last.is_resumed and not last.progress.end_is_known:
            warn_once(self._warned, _USED_UP, last.given)
