"""Which processes of a training take the batches of a feed, whatever they begin, ask, leave and begin again."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from asyncloader.errors import ConfigurationError, LoaderClosedError
from asyncloader.online.ledger import WAITS, Ledger, Rules
from asyncloader.online.runs import Runs, Seat
from tests.support import effort


class Player:
    """The iterator of a seat, and what it was sent."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self.given = 0
        self.parts: list[Any] = []
        self.number = -1
        self.is_over = False


class Play(RuleBasedStateMachine):
    """Seats read ahead, ask, die, and begin again, while units are put."""

    @initialize(
        ranks=st.integers(1, 3), peers=st.integers(1, 2), share=st.integers(1, 2), bound=st.sampled_from([0, None])
    )
    def make(self, ranks: int, peers: int, share: int, bound: int | None) -> None:
        """Have a feed for some ranks of some peers."""
        self.size = ranks * share
        self.ledger = Ledger(Rules(self.size, self.size if bound == 0 else 3 * self.size, bound))
        self.runs = Runs(self.ledger)
        self.seats = [Seat(rank, ranks, peer, peers) for rank in range(ranks) for peer in range(peers)]
        self.players: dict[Seat, Player] = {}
        self.batches: dict[int, list[int]] = {}  # of this run: the units of each, as the seats were sent them
        self.trained: list[int] = []

    def _is_started(self, player: Player | None) -> bool:
        return player is not None and player.number in self.runs._readers

    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        """A seat begins, or begins again."""
        seat = data.draw(st.sampled_from(self.seats))
        had_begun = set(self.runs._readers)
        was_given = max((player.given for player in self.players.values() if self._is_started(player)), default=0)
        player = self.players[seat] = Player(seat)
        player.number = self.runs.begin(seat, lambda: player.given)
        if self.runs._readers.keys() != had_begun:
            assert sorted(reader.seat for reader in self.runs._readers.values()) == sorted(self.seats)
            self.trained += [unit for batch in range(was_given) for unit in self.batches.get(batch, [])]
            self.batches = {}

    @rule(count=st.integers(1, 4))
    def put(self, count: int) -> None:
        """Producers put what there is room for."""
        for _ in range(count):
            if self.ledger.room and not (self.ledger.closed or self.ledger.ended):
                self.ledger.put([0], self.ledger.version, 1.0, 0.0)

    @rule()
    def close(self) -> None:
        """Nothing more is put."""
        self.ledger.closed = True

    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        """A seat reads its part of the next batch."""
        if (player := self.players.get(data.draw(st.sampled_from(self.seats)))) is None or player.is_over:
            return
        try:
            part = self.runs.part(player.number, len(player.parts))
        except LoaderClosedError as error:
            is_left = "has left" in str(error)
            assert is_left or not self._is_started(player)
            player.is_over = True
            return
        if player.number in self.runs.coming:
            assert part is WAITS
        if part is None:
            player.is_over = True
        elif part is not WAITS:
            assert part  # no rank has an empty step
            numbers = [unit.id for unit in part]
            whole = self.batches.setdefault(
                len(player.parts), [unit.id for unit in self.ledger.batch(self.runs._first + len(player.parts))]
            )
            assert numbers == whole[player.seat.rank :: player.seat.num_ranks]
            player.parts.append(numbers)

    @rule(data=st.data())
    def ask(self, data: st.DataObject) -> None:
        """A consumer is given a batch, and asks for the next one."""
        player = self.players.get(data.draw(st.sampled_from(self.seats)))
        if player is not None and player.given < len(player.parts) and self._is_started(player):
            player.given += 1
            self.runs.asked(player.number, lambda: player.given)

    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        """The process of a seat ends."""
        player = self.players.pop(data.draw(st.sampled_from(self.seats)), None)
        if player is not None:
            self.runs.leave(player.number)

    @invariant()
    def each_unit_is_somewhere_once(self) -> None:
        """No unit is in two batches of a run, and none was trained in an earlier one."""
        if not hasattr(self, "batches"):
            return
        units = [unit for batch in self.batches.values() for unit in batch]
        assert len(set(units)) == len(units)
        assert not set(units) & set(self.trained)
        assert self.ledger.done <= self.ledger.formed

    @invariant()
    def all_ranks_have_as_many_steps(self) -> None:
        """A seat that was told the end had all batches."""
        if hasattr(self, "players"):
            ends = {
                len(player.parts)
                for player in self.players.values()
                if self._is_started(player) and self.runs._readers[player.number].taken == math.inf
            }
            assert len(ends) <= 1


TestPlay = Play.TestCase
TestPlay.settings = settings(max_examples=effort.examples(150), stateful_step_count=40, deadline=None)


def begun(runs: Runs, *seats: Seat) -> list[int]:
    """Have seats begin; return the numbers of their iterators."""
    return [runs.begin(seat, int) for seat in seats]


def ledger_with(count: int, size: int, **rules: Any) -> Ledger:
    """Return a ledger with so many units that wait."""
    ledger = Ledger(Rules(size, 100, **rules))
    for number in range(count):
        ledger.put([number], 0, 1.0, 0.0)
    return ledger


def test_ranks_divide_a_batch_and_peers_share_their_part() -> None:
    """Whoever of them asks first."""
    runs = Runs(ledger_with(8, 4))
    seats = [Seat(rank, 2, peer, 3) for rank in range(2) for peer in range(3)]
    numbers = begun(runs, *seats)
    parts = [[unit.id for unit in runs.part(number, 0) or ()] for number in numbers]
    assert parts == [[0, 2]] * 3 + [[1, 3]] * 3


def test_nobody_is_given_a_batch_before_all_have_begun() -> None:
    """So it does not matter how many of an earlier try had begun."""
    runs = Runs(ledger_with(4, 2))
    (early,) = begun(runs, Seat(0, 2))
    assert runs.part(early, 0) is WAITS
    (again,) = begun(runs, Seat(0, 2))
    with pytest.raises(LoaderClosedError, match="another iterator"):
        runs.part(early, 0)
    begun(runs, Seat(1, 2))
    assert runs.part(again, 0) is not WAITS


def test_a_try_with_another_number_of_ranks() -> None:
    """The newest one counts."""
    runs = Runs(ledger_with(4, 2))
    begun(runs, Seat(0, 2))
    (alone,) = begun(runs, Seat())
    assert len(runs.part(alone, 0) or ()) == 2


def test_a_rank_that_died_before_it_began() -> None:
    """It is not counted among those who have begun."""
    runs = Runs(ledger_with(4, 2))
    (dead,) = begun(runs, Seat(0, 2))
    runs.leave(dead)
    (other,) = begun(runs, Seat(1, 2))
    assert runs.part(other, 0) is WAITS


def test_others_go_on_as_far_as_a_rank_was_sent_batches() -> None:
    """A rank that ends after so many steps leaves none of the others behind, and nobody waits for one that died."""
    runs = Runs(ledger_with(6, 2))
    first, second = begun(runs, Seat(0, 2), Seat(1, 2))
    runs.part(first, 0)
    runs.leave(first)
    assert runs.part(second, 0)
    with pytest.raises(LoaderClosedError, match="rank 0, peer 0 has left"):
        runs.part(second, 1)


def test_what_is_left_at_the_end_and_fills_no_step() -> None:
    """A step has a unit for each rank, or is none; short steps are divided."""
    runs = Runs(ledger := ledger_with(7, 4))
    ledger.closed = True
    first, second = begun(runs, Seat(0, 2), Seat(1, 2))
    sizes = []
    for number in range(2):
        sizes.append([len(runs.part(reader, number) or ()) for reader in (first, second)])
        for reader in (first, second):
            runs.asked(reader, lambda done=number + 1: done)  # type: ignore[misc]
    assert sizes == [[2, 2], [2, 1]]
    assert runs.part(first, 2) is None
    runs = Runs(ledger := ledger_with(1, 2))
    ledger.closed = True
    first, second = begun(runs, Seat(0, 2), Seat(1, 2))
    assert runs.part(first, 0) is runs.part(second, 0) is None
    assert ledger.num_ready == 1


def test_batches_that_ranks_cannot_divide() -> None:
    """It is said when a rank begins."""
    with pytest.raises(ConfigurationError, match="batch_size should be a multiple"):
        begun(Runs(ledger_with(0, 3)), Seat(0, 2))
