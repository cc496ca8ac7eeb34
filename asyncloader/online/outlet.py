"""Outlet: the trainer's side of a feed. Batches for a loader of this process, or steps for ranks.

    ledger ── a batch ──> FeedKeys ──> the loader
           ── a batch, or step ── dealt once, when the first rank asks for it ──> each rank its part

What a loader, or all ranks, were given is charged until the next one is asked for.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from os import PathLike
from typing import Any

from asyncloader.errors import ConfigurationError
from asyncloader.online.intake import Change, Intake
from asyncloader.online.keys import SampleKey, keys_of, other_has_begun
from asyncloader.online.ledger import Rules, Unit
from asyncloader.online.ranks import RankPlace, Ranks, Run, Seat
from asyncloader.online.waiters import Waiters, first


class Outlet(Intake):
    """The trainer's side of a feed.

    Args:
        source: That of the intake, as all that is not told of here.
        rules: The rules of its ledger.
        group_size: Samples of a unit; None for single ones.
        lease_timeout: How long a lease lasts, in seconds.
        spill: Folder that what is put is written to.
        num_replicas: Ranks that steps are dealt to; None for a loader of this process.
        step_timeout: How long ranks wait for a step, in seconds; None for ever.
    """

    def __init__(
        self,
        source: Any,
        rules: Rules,
        group_size: int | None,
        lease_timeout: float | None,
        spill: str | PathLike[str] | None,
        num_replicas: int | None,
        step_timeout: float | None,
    ) -> None:
        super().__init__(source, rules, group_size, lease_timeout, spill)
        self._reader: Callable[[], Any] = nobody
        self._runs_begun = self._first = 0
        self._given: Callable[[], int] = int  # how many of the reader's batches, from the first one on
        self._ranks = None if num_replicas is None else Ranks(num_replicas)
        self._step_timeout = step_timeout
        self._parts: dict[int, list[list[Unit]]] = {}  # of the steps of this run, by rank
        self._is_run_over = False
        self._beginners: Waiters = {}  # for other ranks, to begin a run

    @property
    def has_begun(self) -> bool:
        """Whether somebody takes batches, or has: since a state was loaded, if one was."""
        return self._reader is not nobody

    # ------------------------------------------------------------------------------------- a loader of this process

    def begin(self, reader: Any) -> int:
        """Give batches to this reader from now on, first those that the last one was not given; return the number."""
        with Change(self):
            self._begin(reader, int)
            return self._first

    def _begin(self, reader: Any, given: Callable[[], int]) -> None:
        self._ledger.finish(self._next_given())
        self._ledger.begin()
        self._reader, self._runs_begun = weakref.ref(reader), self._runs_begun + 1
        self._first, self._given = self._ledger.formed, given
        self._tells.clear()
        self._woken += first(self._readers, len(self._readers))

    def follow(self, reader: Any, given: Callable[[], int]) -> None:
        """Take what counts how many batches of a reader consumers were given."""
        with Change(self):
            if self._reader() is reader:
                self._given = given

    def asked(self, reader: Any) -> None:
        """Note that a consumer asks for its next batch.

        Raises:
            LoaderClosedError: if another reader has begun. What this one has prefetched is given to that.
        """
        if self._reader() is not reader:
            raise other_has_begun()
        if self._next_given() > self._ledger.done:
            with Change(self):
                self._ledger.finish(self._next_given())

    def arrived(self, reader: Any, tell: Callable[[], object]) -> bool:
        """Return whether a reader gets a batch, the end or an error without waiting; if not, tell it when it does.

        A reader that was promised an answer reads it with the lock of its run held, which the trainer needs to ask for
        a batch. So it must not wait then, and an update of the version in between must not take the answer back.
        """
        with Change(self):
            if self._reader() is not reader or self._ledger.can_answer(reader.number):
                return True
            self._tells.append(tell)
            return False

    def why_no_keys(self) -> str:
        """Return why there may be no further batch: no producer has a lease. "" while some producer has one."""
        with Change(self):
            ledger = self._ledger
            if ledger.num_running:
                return ""
            return (
                f"its feed has {ledger.num_ready} of {ledger.rules.size} samples or groups, and no producer has a lease"
            )

    def next_batch(self, reader: Any) -> list[SampleKey]:
        """Return the batch with the reader's number; wait for it.

        Raises:
            StopIteration: at the end.
            LoaderClosedError: if another reader has begun.
            FeedClosedError: at the end, if an error of the source brought that.
        """

        def attempt() -> list[SampleKey] | None:
            batch = self._batch(reader, reader.number)
            return None if batch is None else keys_of(batch)

        keys: list[SampleKey] = self._until_sync(attempt, self._readers, None, in_turn=False)
        if not keys:
            raise StopIteration
        return keys

    def _batch(self, reader: Any, number: int) -> list[Unit] | None:
        """Return a batch, which is formed now if it is the next; none of its units at the end; None to wait for it."""
        ledger = self._ledger
        if self._reader() is not reader:
            raise other_has_begun()
        if not ledger.can_answer(number):
            return None
        if number < ledger.formed:
            return ledger.batch(number)
        if self._error is not None:
            raise self._closed_error()
        return []

    def _next_given(self) -> int:
        """Return the number of the first batch that no consumer was given."""
        return self._first + self._given()

    # --------------------------------------------------------------------------------------------------------- ranks

    def check_rank(self, rank: int) -> None:
        """See that there is a rank.

        Raises:
            ConfigurationError: if not.
        """
        if self._ranks is None:
            raise ConfigurationError("the feed was made without num_replicas: its batches are not dealt to ranks")
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self._ranks.count:
            raise ConfigurationError(f"rank should be an integer from 0 to {self._ranks.count - 1}, but is {rank!r}")

    async def begin_rank(self, rank: int, place: RankPlace, take: Callable[[Seat], object]) -> int:
        """Begin a run with all ranks, when they have come; return its number.

        Args:
            rank: Begins.
            place: Where it goes on.
            take: Is given the iterator of the rank before others are waited for.

        Raises:
            RanksError: if they go on at different places.
        """
        self.check_rank(rank)
        assert self._ranks is not None
        with Change(self):
            before = self._ranks.run
            take(seat := self._ranks.begin(rank, place))
            self._wake_ranks()
            if (run := self._ranks.run) is not before and run is not None:
                self._begin(run, _given_by(run))
                self._parts, self._is_run_over = {}, False
        number: int = await self._until(lambda: self._has_begun(seat), self._beginners, in_turn=False)
        return number

    def _wake_ranks(self) -> None:
        for waiters in (self._beginners, self._readers):
            self._woken += first(waiters, len(waiters))

    def _has_begun(self, seat: Seat) -> int | None:
        if seat.run is not None:
            return seat.run.number
        if seat.error is not None:
            raise seat.error
        assert self._ranks is not None
        if self._ranks.newest.get(seat.rank) is not seat:
            raise other_has_begun()
        return None

    async def rank_step(self, seat: Seat, number: int) -> list[SampleKey] | None:
        """Return the part of a rank in a step of its run; None at the end; wait for it.

        Raises:
            RanksError: if ranks do not take the same steps.
            LoaderClosedError: if another run has begun.
            FeedClosedError: at the end, if an error of the source brought that.
        """
        await self._until(lambda: self._has_begun(seat), self._beginners, in_turn=False)
        keys = await self._until(lambda: self._part(seat, number), self._readers, in_turn=False)
        return keys or None

    def _part(self, seat: Seat, number: int) -> list[SampleKey] | None:
        is_dealt = number < self._ledger.formed - self._first and self._reader() is seat.run
        if self._is_run_over and not is_dealt and self._reader() is seat.run:
            return []
        if seat.error is not None and not is_dealt:
            raise seat.error
        if (step := self._batch(seat.run, self._first + number)) is None:
            return None
        if not step:
            self._is_run_over = True  # for all ranks, whatever comes now
            return []
        if number not in self._parts:
            done = self._ledger.done - self._first
            self._parts = {each: parts for each, parts in self._parts.items() if each >= done}
            self._parts[number] = self._ledger.dealt(step)
        return keys_of(self._parts[number][seat.rank])

    def rank_asks(self, seat: Seat, given: int, now: float) -> None:
        """Note that the consumer of a rank asks for another step of its run, after so many.

        Args:
            seat: Its iterator.
            given: Steps that it was given before.
            now: Seconds, of the clock of `look_at_ranks`.
        """
        with Change(self):
            seat.given, seat.since = given, now
            if self._reader() is seat.run is not None:
                self._ledger.finish(self._next_given())

    def rank_leaves(self, seat: Seat) -> None:
        """Note that the iterator of a rank is gone."""
        with Change(self):
            assert self._ranks is not None
            self._ranks.leave(seat)
            self._wake_ranks()

    def look_at_ranks(self, now: float) -> float | None:
        """End the run if consumers have waited for too long; return when to look again, or None. Seconds."""
        if self._step_timeout is None or self._ranks is None:
            return None
        with Change(self):
            ledger, size = self._ledger, self._ledger.rules.size
            waiting = self._ranks.waiting(ledger.formed - self._first)
            if self._is_run_over:  # only whoever begins the next one waits
                waiting = [seat for seat in waiting if seat.run is None]
            if not waiting or now < (due := waiting[0].since + self._step_timeout):
                return due if waiting else None
            producers = f"{ledger.num_ready} of {size} samples or groups are there, {ledger.num_running} are leased"
            self._ranks.time_out(waiting, self._step_timeout, producers)
            self._wake_ranks()
        return now  # others may have waited as long


def nobody() -> None:
    """Stand for a reader that is gone."""


def _given_by(run: Run) -> Callable[[], int]:
    return lambda: run.given
