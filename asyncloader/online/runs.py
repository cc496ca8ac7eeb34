"""Runs: which processes of a training take the batches of a feed, and which part of each. No I/O, clock or thread.

    seats of 2 ranks x 2 peers      (0, 0)  (0, 1)  (1, 0)  (1, 1)
    a batch of units a b c d         a c     a c     b d     b d

A *seat* is one process of the training: a peer of a rank. Ranks divide each batch, and peers of a rank (tensor-,
context- and pipeline-parallel processes) are given the same part. All ranks have as many steps: a batch has a unit for
each of them, or is none.

An iterator that begins waits until all seats have begun. So no call of a process group is needed, and it does not
matter how many processes of an earlier try have begun before they died.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from asyncloader.errors import ConfigurationError, LoaderClosedError
from asyncloader.online.ledger import WAITS, Ledger, Unit


class Seat(NamedTuple):
    """One process of a training.

    Attributes:
        rank: Its data-parallel rank.
        num_ranks: How many ranks there are.
        peer: Its number among the processes of the rank.
        num_peers: How many processes a rank has.
    """

    rank: int = 0
    num_ranks: int = 1
    peer: int = 0
    num_peers: int = 1

    @property
    def is_first(self) -> bool:
        """Whether states of the feed are saved and loaded here."""
        return self.rank == self.peer == 0


@dataclass(slots=True)
class Reader:
    """An iterator of the loader of one seat.

    Attributes:
        seat: Where it is.
        given: Counts its batches that the consumer was given.
        taken: The number of its first batch that it was not sent; infinite after the end.
    """

    seat: Seat
    given: Callable[[], int]
    taken: float = 0


class Runs:
    """Who takes the batches of a ledger. Whoever calls holds the feed's lock.

    Args:
        ledger: The ledger.

    Attributes:
        coming: Readers that have begun, by their numbers, and wait until all seats have.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.coming: dict[int, Reader] = {}
        self._ledger = ledger
        self._numbers = itertools.count()
        self._readers: dict[int, Reader] = {}  # of the run
        self._first = 0  # the number of the run's first batch among those of the ledger
        self._gone: Reader | None = None  # whose process has ended, and which was sent the fewest batches

    @property
    def has_begun(self) -> bool:
        """Whether somebody takes batches, or has: since a state was loaded, if one was."""
        return bool(self._readers)

    def begin(self, seat: Seat, given: Callable[[], int]) -> int:
        """Have an iterator begin, in place of another one of its seat; return its number.

        Raises:
            ConfigurationError: if batches cannot be divided.
        """
        if (size := self._ledger.rules.size) % seat.num_ranks:
            raise ConfigurationError(
                f"{seat.num_ranks} ranks share each batch: batch_size should be a multiple of that for the feed, but a "
                f"batch has {size} samples or groups"
            )
        shape = seat._replace(rank=0, peer=0)
        for other, reader in list(self.coming.items()):
            if reader.seat == seat or reader.seat._replace(rank=0, peer=0) != shape:  # of an earlier try
                del self.coming[other]
        number = next(self._numbers)
        self.coming[number] = Reader(seat, given)
        if len(self.coming) == seat.num_ranks * seat.num_peers:
            self._ledger.finish(self.next_given())
            self._ledger.parts = seat.num_ranks
            self._ledger.begin()
            self._readers, self.coming = self.coming, {}
            self._first, self._gone = self._ledger.formed, None
        return number

    def asked(self, number: int, given: Callable[[], int]) -> None:
        """Note that a consumer asks for its next batch. A batch is trained when all seats were given it, and asked.

        Raises:
            LoaderClosedError: if another iterator has begun.
        """
        if number not in self.coming:
            self._reader(number)
            self.count(number, given)

    def count(self, number: int, given: Callable[[], int]) -> None:
        """Take what counts the batches that an iterator's consumer was given; nothing more, if another has begun."""
        if number in self._readers:
            self._readers[number].given = given
            self._ledger.finish(self._first + min(reader.given() for reader in self._readers.values()))

    def part(self, number: int, batch: int) -> list[Unit] | None:
        """Return the part of an iterator of a batch; None at the end; WAITS if that is not known yet.

        Raises:
            LoaderClosedError: if another iterator has begun, or the process of another seat has ended.
        """
        if number in self.coming:
            return WAITS  # type: ignore[no-any-return]
        reader, seat = self._reader(number), self._reader(number).seat
        if (gone := self._gone) is not None and batch >= gone.taken:
            raise LoaderClosedError(
                f"rank {gone.seat.rank}, peer {gone.seat.peer} has left: its process has ended, and no other one "
                "was given its batches. Begin again on all ranks, from a state"
            )
        if not self._ledger.can_answer(self._first + batch):
            return WAITS  # type: ignore[no-any-return]
        is_there = self._first + batch < self._ledger.formed
        reader.taken = max(reader.taken, batch + 1 if is_there else math.inf)
        return self._ledger.batch(self._first + batch)[seat.rank :: seat.num_ranks] if is_there else None

    def leave(self, number: int) -> None:
        """Note that the process of an iterator has ended. Others go on as far as it was sent batches."""
        self.coming.pop(number, None)
        reader = self._readers.get(number)
        if reader is not None and reader.taken < (math.inf if self._gone is None else self._gone.taken):
            self._gone = reader

    def end(self) -> None:
        """Give nothing more to those who take batches, because a state was loaded."""
        self._readers, self._first = {}, self._ledger.formed

    def position(self, number: int, step: int) -> int:
        """Return the number of a batch of an iterator among those of the ledger.

        Of an iterator that is given nothing, that of the first batch which the next one will be given.
        """
        return self._first + step if number in self._readers else self.next_given()

    def next_given(self) -> int:
        """Return the number of the first batch that no consumer was given."""
        return self._first + max((reader.given() for reader in self._readers.values()), default=0)

    def _reader(self, number: int) -> Reader:
        if number not in self._readers:
            raise other_has_begun()
        return self._readers[number]


def other_has_begun() -> LoaderClosedError:
    """Say why an iterator gives nothing more."""
    return LoaderClosedError("another iterator over this feed has begun, and is given the batches from now on")
