"""Ranks: how far each rank of a feed is, and why a rank gets no more steps. No I/O, clock or lock.

    begin ──> waits for other ranks ── all have begun ──> in a run ── asks, asks, ... ──> left, or ended by an error

All ranks get the steps of a run up to the same one, whatever ends the run: a step is dealt to all of them at once, and
what was dealt is given to each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from asyncloader.online.errors import RanksError

RankPlace: TypeAlias = Any
"""Where a rank goes on, to be compared with that of others: None at the beginning; ``("state", id)``; ``("run", number,
steps)`` after so many steps of a run."""


@dataclass(slots=True, eq=False)
class Seat:
    """An iterator of a rank over its parts of the steps.

    Attributes:
        rank: Whose it is.
        place: Where it goes on.
        run: The run that it takes part in; None while other ranks have not begun.
        given: Steps of the run that its consumer had been given when it last asked for one; -1 before that.
        since: When that was. Seconds, of any clock.
        error: Why there are no steps beyond those that were dealt; None if there may be.
    """

    rank: int
    place: RankPlace
    run: Run | None = None
    given: int = -1
    since: float = 0.0
    error: Exception | None = None


@dataclass(slots=True, eq=False, weakref_slot=True)
class Run:
    """The steps that iterators of all ranks take together.

    Attributes:
        number: Ascending from 1 on.
        seats: The iterators.
    """

    number: int
    seats: list[Seat]

    @property
    def given(self) -> int:
        """Steps that the consumers of all ranks were given."""
        return max(0, min(seat.given for seat in self.seats))


class Ranks:
    """The ranks of a feed. Whoever calls holds the feed's lock.

    Args:
        count: How many there are.

    Attributes:
        run: The newest; None before the first one.
        newest: The newest iterator of each rank.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.run: Run | None = None
        self.newest: dict[int, Seat] = {}

    def begin(self, rank: int, place: RankPlace) -> Seat:
        """Have a rank wait for the others, or begin a run with them; its last iterator gets nothing more."""
        if (last := self.newest.get(rank)) is not None:
            self.leave(last)
        seat = self.newest[rank] = Seat(rank, place)
        waiting = [each for each in self.newest.values() if each.run is None]
        if len(waiting) == self.count:
            self._begin_run(waiting)
        return seat

    def _begin_run(self, seats: list[Seat]) -> None:
        first, *others = [self._where(seat) for seat in seats]
        if any(place != first for place in others):
            words = "; ".join(f"rank {seat.rank} {_words(seat.place)}" for seat in sorted(seats, key=_rank))
            self._end(seats, f"ranks go on at different places: {words}. Load one state on all of them")
            return
        number = 1 if self.run is None else self.run.number + 1
        if self.run is not None and first is not None and first[:2] == ("run", self.run.number):
            for seat in self.run.seats:
                seat.given = first[2]
        self.run = Run(number, seats)
        for seat in seats:
            seat.run = self.run

    def _where(self, seat: Seat) -> RankPlace:
        """Return where an iterator goes on.

        Its rank may have left the newest run before it heard that this has begun: then it was given nothing of it.
        """
        if self.run is not None and (seat.rank, seat.place) in ((each.rank, each.place) for each in self.run.seats):
            return "run", self.run.number, 0
        return seat.place

    def leave(self, seat: Seat) -> None:
        """Note that an iterator is gone, for which the other ranks of its run do not wait."""
        if self.newest.get(seat.rank) is seat:
            del self.newest[seat.rank]
            if seat.run is not None:
                self._end(seat.run.seats, f"rank {seat.rank} has left this run, after {_steps(seat.given)}")

    def waiting(self, dealt: int) -> list[Seat]:
        """Return the iterators whose consumers wait, as so many steps of the run were dealt; the longest first."""
        found = [seat for seat in self.newest.values() if seat.given >= (0 if seat.run is None else dealt)]
        return sorted((seat for seat in found if seat.error is None), key=lambda seat: seat.since)

    def time_out(self, waiting: list[Seat], seconds: float, producers: str) -> None:
        """End the run, or the beginning of one, because consumers have waited for too long.

        Args:
            waiting: Their iterators.
            seconds: How long.
            producers: How far producers are, in words.
        """
        first = waiting[0]
        if first.run is None:
            seats = [seat for seat in self.newest.values() if seat.run is None]
            missing = [rank for rank in range(self.count) if rank not in map(_rank, seats)]
            self._end(seats, f"{_ranks(map(_rank, seats))} waited {seconds} s for {_ranks(missing)} to begin a run")
            return
        behind = [seat.rank for seat in first.run.seats if seat.given < first.given]
        why = f"{_ranks(behind)} did not ask for it; {producers}" if behind else producers
        those = _ranks(map(_rank, waiting))
        self._end(first.run.seats, f"{those} waited {seconds} s for step {first.given} of this run: {why}")

    def _end(self, seats: list[Seat], why: str) -> None:
        for seat in seats:
            seat.error = seat.error or RanksError(why)
            if seat.run is None:  # it has to begin again
                del self.newest[seat.rank]


def _rank(seat: Seat) -> int:
    return seat.rank


def _words(place: RankPlace) -> str:
    if place is None:
        return "begins"
    return f"goes on from state {place[1]}" if place[0] == "state" else f"goes on after {_steps(place[2])}"


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{max(0, count)} steps"


def _ranks(ranks: Iterable[int]) -> str:
    found = sorted(ranks)
    return f"rank{'s' * (len(found) > 1)} {', '.join(map(str, found))}"
