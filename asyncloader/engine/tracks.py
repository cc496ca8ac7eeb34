"""How far workers are in their data, batch by batch.

    given(batch) ──> the next batch of the stream that is not done with ── done(number, snapshot) ──> start
    forget_given() ──> what was given and is not done with is given again

A worker of an iterable dataset reads one batch after the other, and each ticket that it gets takes the next one. Where
it makes several at once they may be done with in any order; its place in the data is then before the first that is not
done with, and those ahead of it are known one by one. So another worker can begin at that place: it reads over what is
ahead, and nothing is lost or comes twice.

A worker of a map-style dataset that provides a state has no place, but a `History`: what it has made since its state
was last taken. Another worker loads the state and makes that again.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from asyncloader.messages.snapshot import Made, Untold, WorkerStart


class Track:
    """Keeps what of one worker's stream is done with, in one run. Batches of it are numbered from 0.

    Args:
        start: Where the worker begins.
    """

    def __init__(self, start: WorkerStart) -> None:
        self._place = start._replace(ahead=())
        self._first = 0  # the first that is not done with: all before it are in `_place`
        self._ahead: dict[int, Any] = dict.fromkeys(start.ahead)  # done with beyond that: snapshots by number
        self._given: dict[int, int] = {}  # numbers by ticket
        self._next = 0

    def __repr__(self) -> str:
        return f"<Track first={self._first} ahead={sorted(self._ahead)} given={self._given}>"

    @property
    def start(self) -> WorkerStart:
        """Where another worker has to begin."""
        return self._place._replace(ahead=tuple(sorted(number - self._first for number in self._ahead)))

    def given(self, batch: int) -> None:
        """The worker got a ticket, which takes the next batch that is not done with."""
        self._next = max(self._next, self._first)
        while self._next in self._ahead:
            self._next += 1
        self._given[batch] = self._next
        self._next += 1

    def forget_given(self) -> None:
        """The worker is gone, and what it had was not made."""
        self._given.clear()
        self._next = self._first

    def answered(self, batch: int, snapshot: Any, keys: Any = None) -> int:
        """The ticket has an outcome, and its batch is done with; return the number of that.

        -1 if the ticket was not `given`: the batches of the worker are done with as they come.
        """
        number = self._given.pop(batch, -1)
        self.done(number, snapshot)
        return number

    def done(self, number: int, snapshot: Any, keys: Any = None) -> None:
        """A batch is done with, -1 for the first that is not; the dataset was in this state when it had been read."""
        if isinstance(snapshot, Untold):
            snapshot = None
        # A new dictionary: copies of this track keep theirs (`Place.after`).
        self._ahead = {**self._ahead, self._first if number < 0 else number: snapshot}
        while self._first in self._ahead:
            self._place = self._place.after(self._ahead.pop(self._first))
            self._first += 1


class History:
    """Keeps what of one worker of a map-style dataset is done with, in one run.

    Where samples of several batches are in work at once, what was made after a state cannot be made again from it: some
    of that is in it. Then the last state that was taken stands for itself.

    Args:
        start: Where the worker begins.
        key: The seeds of batches: base seed, epoch, rank.
        overlaps: Samples of several batches are in work at once.
    """

    def __init__(self, start: WorkerStart, key: tuple[int, int, int], *, overlaps: bool) -> None:
        self._start = start
        self._since: tuple[Made, Any] | None = None  # what was made then, the last first: each with what was before it
        self._key = key
        self._overlaps = overlaps
        self._is_known = True  # whether what was made since a state, or the beginning, is in `start`

    @property
    def start(self) -> WorkerStart:
        """Where another worker has to begin."""
        made, rest = [], self._since
        while rest is not None:
            last, rest = rest
            made.append(last)
        return self._start._replace(made=(*self._start.made, *reversed(made)))

    def given(self, batch: int) -> None:
        """The worker got a ticket."""

    def forget_given(self) -> None:
        """The worker is gone: another one makes what it had."""

    def answered(self, batch: int, snapshot: Any, keys: Any) -> int:
        """The ticket has an outcome; return its number."""
        self.done(batch, snapshot, keys)
        return batch

    def done(self, number: int, snapshot: Any, keys: Any = None) -> None:
        """A batch is done with; the dataset was in this state then, or nobody knows (None, Untold)."""
        if snapshot is None:
            if self._is_known and not self._overlaps:
                # Copies of this history keep theirs (`Place.after`), and none is as long as the history.
                self._since = Made(self._key, number, keys), self._since
        elif isinstance(snapshot, Untold):
            self._is_known = False
            self._start, self._since = WorkerStart(), None
        elif not self._overlaps or snapshot.taken_at >= getattr(self._start.snapshot, "taken_at", 0.0):
            self._is_known = True
            self._start, self._since = WorkerStart(0, snapshot), None


Progressing: TypeAlias = Track | History
"""How far one worker is."""


def make_tracks(
    starts: dict[int, WorkerStart] | None, key: tuple[int, int, int] | None, *, overlaps: bool
) -> dict[int, Progressing]:
    """Return how far each worker is that begins there, in a stream, or with a ``key`` in a map-style dataset."""
    return {
        worker: Track(start) if key is None else History(start, key, overlaps=overlaps)
        for worker, start in (starts or {}).items()
    }
