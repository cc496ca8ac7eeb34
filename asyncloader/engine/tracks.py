"""How far workers are in their streams, batch by batch, whatever order the batches come in.

    given(seq) ──> the next batch of the stream that is not done with ── done(number, snapshot) ──> start
    lost() ──────> what was given and is not done with is given again

A worker of an iterable dataset reads one batch after the other, and each ticket that it gets takes the next one. Where
it makes several at once they may be done with in any order; its place in the data is then before the first that is not
done with, and those ahead of it are known one by one. So another worker can begin at that place: it reads over what is
ahead, and nothing is lost or comes twice.
"""

from __future__ import annotations

from typing import Any

from asyncloader.workers.protocol.snapshot import Start


class Track:
    """Keeps what of one worker's stream is done with, in one run. Batches of it are numbered from 0.

    Args:
        start: Where the worker begins.
    """

    def __init__(self, start: Start) -> None:
        self._place = Start(start.batches, start.snapshot)
        self._first = 0  # the first that is not done with: all before it are in `_place`
        self._ahead: dict[int, Any] = dict.fromkeys(start.ahead)  # done with beyond that: snapshots by number
        self._given: dict[int, int] = {}  # numbers by ticket
        self._next = 0

    def __repr__(self) -> str:
        return f"<Track first={self._first} ahead={sorted(self._ahead)} given={self._given}>"

    @property
    def start(self) -> Start:
        """Where another worker has to begin."""
        return self._place._replace(ahead=tuple(sorted(number - self._first for number in self._ahead)))

    def given(self, seq: int) -> None:
        """The worker got a ticket, which takes the next batch that is not done with."""
        self._next = max(self._next, self._first)
        while self._next in self._ahead:
            self._next += 1
        self._given[seq] = self._next
        self._next += 1

    def lost(self) -> None:
        """The worker is gone, and what it had was not made."""
        self._given.clear()
        self._next = self._first

    def answered(self, seq: int, snapshot: Any) -> int:
        """The ticket has an outcome, and its batch is done with; return the number of that.

        -1 if the ticket was not `given`: the batches of the worker are done with as they come.
        """
        number = self._given.pop(seq, -1)
        self.done(number, snapshot)
        return number

    def done(self, number: int, snapshot: Any) -> None:
        """A batch is done with, -1 for the first that is not; the dataset was in this state when it had been read."""
        self._ahead[self._first if number < 0 else number] = snapshot
        while self._first in self._ahead:
            self._place = self._place.after(self._ahead.pop(self._first))
            self._first += 1
