"""Which of a loader's runs its methods speak of: the newest one whose iterator is alive.

    for batch in loader:                    run 0
        if step == 6:
            picture(next(iter(loader)))     run 1 begins and is dropped: the methods speak of run 0 again
    loader.state_dict()                     run 0 is gone too, and was used last: they speak of it

An iterator is alive until it is dropped, closed or at its end. Batches that are given are not noted: how far runs are
is looked at when one begins, when an iterator is dropped, and when somebody asks.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from operator import attrgetter
from typing import Any

from asyncloader.observe.meter import Meter
from asyncloader.run.checkpoint import Checkpointer

log = logging.getLogger("asyncloader")

_how_far = attrgetter("counted", "end_is_known")
"""Of a `Progress`: the batches that are counted, and the calls that are not; whether the end is known."""

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


class RunRecord:
    """A run, as its loader knows it. Belongs to a `CurrentRun`, whose moments are numbers.

    Attributes:
        checkpointer: Makes its states.
        is_resumed: It has begun from a state of the middle of a run.
        beside: The runs whose iterators were alive when it began.
        meter: Counts what happens in it; None before it is made.
        iterator: Returns its iterator; None if that is gone.
        begun_at: The moment at which it began.
        used_at: The last moment at which it was found to be further than before.
        gone_at: The moment at which its iterator was found not to be alive; None while it is.
    """

    def __init__(self, checkpointer: Checkpointer, *, is_resumed: bool, beside: Sequence[RunRecord], now: int) -> None:
        self.checkpointer = checkpointer
        self.is_resumed = is_resumed
        self.beside = tuple(beside)
        self.meter: Meter | None = None
        self.iterator: Callable[[], Any] = _nobody
        self.begun_at = self.used_at = now
        self.gone_at: int | None = None
        self._seen = _given(_how_far(checkpointer.progress))

    @property
    def given(self) -> int:
        """How many batches it has given."""
        progress = self.checkpointer.progress
        return progress.now.position + len(progress.now.ahead) - progress.began[0]

    @property
    def has_ended(self) -> bool:
        """Whether a consumer was told that there are no more batches."""
        return self.checkpointer.progress.end_is_known

    def note(self, seen: tuple[Any, bool], now: int) -> None:
        """Note how far it was at a moment."""
        if (given := _given(seen)) != self._seen:
            self._seen, self.used_at = given, now

    def look(self, now: int) -> None:
        """Note how far it is, and whether its iterator is alive."""
        self.note(_how_far(self.checkpointer.progress), now)
        iterator = self.iterator()
        if self.gone_at is None and (iterator is None or iterator.is_closed or self.has_ended):
            self.gone_at = now


class CurrentRun:
    """Knows which run is the current one. Used in the threads of consumers; iterators may be dropped in any thread.

    Args:
        warned: The warnings that the loader has logged about states, once each.

    Attributes:
        records: The newest run, and before it those whose iterators were alive when it began.
    """

    def __init__(self, warned: set[str]) -> None:
        self.records: tuple[RunRecord, ...] = ()
        self._drops: deque[tuple[int, list[tuple[Any, bool]]]] = deque()
        self._now = 0
        self._warned = warned

    def begin(self, checkpointer: Checkpointer, *, is_resumed: bool) -> None:
        """Note a run that begins."""
        last = self.record()
        self._look()
        if last is not None and last.gone_at is not None and last.iterator is not _nobody:
            self._warn_if_used_up(last)
        beside = [each for each in self.records if each.gone_at is None]
        self._now += 1
        self.records = (*beside, RunRecord(checkpointer, is_resumed=is_resumed, beside=beside, now=self._now))

    def hand_on(self, iterator: Any) -> None:
        """Note the iterator of the newest run. With persistent workers it had another run before, which is over."""
        *older, newest = self.records
        for each in older:
            if each.iterator() is iterator:
                self._warn_if_used_up(each)
                newest.beside = tuple(other for other in newest.beside if other is not each)
                self.records = (*(other for other in older if other is not each), newest)
                break
        newest.iterator = self._refer_to(iterator, newest)

    def record(self, *, of_state: bool = False) -> RunRecord | None:
        """Return the current run; None before the first one.

        Args:
            of_state: A state is to be made of it. If there is doubt, a warning says which run that is.
        """
        if len(self.records) < 2:
            return self.records[0] if self.records else None
        self._look()
        chosen, others = self._choose()
        if others and of_state:
            self._warn(_IN_DOUBT, chosen.given, others[-1].given)
        return chosen

    def warn_of_restart(self) -> None:
        """Warn if the run whose workers are to begin another one has given batches, and has more."""
        last = self.record()
        if last is not None and last.given and not last.has_ended and last.iterator() is not None:
            self._warn(_RESTARTED, last.given)

    def close_all(self) -> None:
        """Close the iterators that there are, and forget all runs."""
        for each in self.records:
            if (iterator := each.iterator()) is not None:
                iterator.leave()
        self.records = ()

    def _choose(self) -> tuple[RunRecord, list[RunRecord]]:
        """Return the current run, and those that may be meant as well."""
        *older, newest = self.records
        if (gone_at := newest.gone_at) is None:
            return newest, [each for each in older if each.gone_at is None and each.used_at >= newest.used_at]
        begun_at = newest.begun_at if newest.iterator() is not None else gone_at  # nobody knows when it came to its end
        rivals = [each for each in older if each.gone_at is None or max(each.gone_at, each.used_at) > begun_at]
        if not rivals:
            return newest, []
        last = max(rivals, key=lambda each: each.used_at)
        if last.used_at > gone_at:
            self.records = tuple(older)  # the newest was a look beside it
            return self._choose()
        was_a_look = last.given <= 1 and (newest.given > 1 or newest.has_ended)
        return (newest, [last]) if was_a_look else (last, [newest])

    def _warn_if_used_up(self, last: RunRecord) -> None:
        if last.is_resumed and not last.has_ended:
            self._warn(_USED_UP, last.given)

    def _refer_to(self, iterator: Any, record: RunRecord) -> Callable[[], Any]:
        """Return a weak reference. When the iterator is dropped, how far the runs beside it are is noted.

        That is done without a function of ours: what a signal's handler raises in one, while an object goes, is lost.
        """
        beside = [each.checkpointer.progress for each in record.beside]
        looks = map(list, map(map, repeat(_how_far), repeat(beside)))
        return weakref.ref(iterator, partial(next, map(self._drops.append, zip(repeat(record.begun_at), looks))))

    def _warn(self, text: str, *counts: int) -> None:
        if text not in self._warned:
            self._warned.add(text)
            log.warning(text, *counts)

    def _look(self) -> None:
        while self._drops:
            begun_at, looks = self._drops.popleft()
            self._now += 1
            for dropped in self.records:
                if dropped.begun_at == begun_at and dropped.iterator() is None:
                    dropped.gone_at = dropped.gone_at or self._now
                    for each, seen in zip(dropped.beside, looks, strict=True):
                        each.note(seen, self._now)
        self._now += 1
        for each in self.records:
            each.look(self._now)


def _given(seen: tuple[Any, bool]) -> tuple[int, bool]:
    """Return how many batches were done with at a look, and whether the end was known."""
    (place, calls), is_end_known = seen
    return place.position + len(place.ahead) + sum(call.item is None for call in calls), is_end_known


def _nobody() -> None:
    """Stand for an iterator that nobody was given yet."""
