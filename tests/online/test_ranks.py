"""Ranks of a feed, in all orders of events: as many steps on each, each sample once, nobody waits without a reason."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncloader.errors import LoaderClosedError
from asyncloader.online import Feed, FeedClosedError, RanksError
from asyncloader.online.ranks import Seat
from tests import effort

ITEMS = 30
TIMEOUT_S = 100


class Rank:
    """A rank, with the iterator that it has now. Steps are numbered within a run."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.place: Any = None
        self.begun: asyncio.Task[int] | None = None
        self.seat: Seat | None = None
        self.given = 0
        self.step: asyncio.Task[Any] | None = None
        self.is_over = False

    @property
    def run(self) -> int:
        """Number of its run, or 0."""
        begun = self.begun
        return begun.result() if begun is not None and begun.done() and begun.exception() is None else 0

    @property
    def is_asking(self) -> bool:
        """Whether it waits for a step, or for others."""
        return self.step is not None and not self.step.done()


class Play(RuleBasedStateMachine):
    """A feed, its producers and its ranks."""

    @initialize(data=st.data())
    def make(self, data: st.DataObject) -> None:
        """Begin."""
        self.loop = asyncio.new_event_loop()
        self.now = 0.0
        self.tasks: list[asyncio.Task[Any]] = []
        self.trained: Counter[int] = Counter()  # in the history of the states
        self.saved: tuple[Any, Counter[int]] | None = None
        self.parts: dict[tuple[int, int], dict[int, list[int]]] = {}  # of steps, by run and number
        self._make(data)

    def _make(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, 3))
        self.staleness = data.draw(st.sampled_from([None, 0, 1]))
        self.feed: Feed[int] = Feed(
            range(ITEMS), batch_size=data.draw(st.integers(1, 3)), max_staleness=self.staleness, on_stale="recycle",
            max_cost=data.draw(st.sampled_from([None, 9])), num_replicas=count, step_timeout=TIMEOUT_S,
        )  # fmt: skip
        self.ranks = [Rank(number) for number in range(count)]
        self.is_last = False  # the run has been left, or has ended

    def turn(self) -> None:
        """Have the loop do all that it can."""
        for _ in range(6):
            self.loop.run_until_complete(asyncio.sleep(0))

    def start(self, work: Any) -> asyncio.Task[Any]:
        """Begin what may have to wait."""
        task = self.loop.create_task(work)
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # it may be nobody's
        self.tasks.append(task)
        return task

    # ------------------------------------------------------------------------------------------------- producers

    @rule(count=st.integers(1, 9), data=st.data())
    def produce(self, count: int, data: st.DataObject) -> None:
        """Samples are made, where there is room."""
        for _ in range(count):
            self._produce_one(data.draw(st.integers(0, 9)))
        self.turn()

    def _produce_one(self, cost: int) -> None:
        try:
            unit = self.feed._try_lease(bool)
        except FeedClosedError:
            return
        if unit is not None:
            assert unit.lease is not None
            self.feed.put_leased(unit.lease, unit.item, unit.version, cost, 0)

    # ----------------------------------------------------------------------------------------------------- ranks

    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        """A rank begins to iterate."""
        rank = data.draw(st.sampled_from(self.ranks))
        if rank.begun is not None and not (rank.is_over or data.draw(st.integers(0, 5)) == 0):
            return
        if rank.run:
            rank.place = ("run", rank.run, rank.given)
        rank.given, rank.step, rank.is_over = 0, None, False

        def take(seat: Seat) -> None:
            rank.seat = seat

        rank.begun = self.start(self.feed.begin_rank(rank.rank, rank.place, take))
        self.turn()

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """An iterator is dropped."""
        rank = data.draw(st.sampled_from(self.ranks))
        if rank.seat is not None and data.draw(st.integers(0, 5)) == 0:
            self.feed.rank_leaves(rank.seat)
            self.turn()

    @rule(data=st.data())
    def advance(self, data: st.DataObject) -> None:
        """The consumer of a rank asks for its next step, and is given it if it is there."""
        self._advance(data.draw(st.sampled_from(self.ranks)))

    @rule()
    def advance_all(self) -> None:
        """The consumers of all ranks do."""
        for rank in self.ranks:
            self._advance(rank)

    def _advance(self, rank: Rank) -> None:
        if rank.seat is None or rank.is_over:
            return
        self.now += 1
        self.feed.rank_asks(rank.seat, rank.given, self.now)
        if rank.step is None:
            rank.step = self.start(self.feed.rank_step(rank.seat, rank.given))
        self.turn()
        if not rank.step.done():
            return
        step, rank.step = rank.step, None
        if isinstance(step.exception(), (RanksError, LoaderClosedError)):
            rank.is_over = True
            assert self.feed._reader() is not rank.seat.run or not self.parts.get((rank.run, rank.given))
        elif (keys := step.result()) is None:
            rank.is_over = True
            assert {len(parts) for (run, _), parts in self.parts.items() if run == rank.run} <= {len(self.ranks)}
        else:
            parts = self.parts.setdefault((rank.run, rank.given), {})
            parts[rank.rank] = [key[-1] for key in keys]
            costs = self.feed._parts[rank.given][rank.rank]
            assert len(keys) <= self.feed.batch_size
            assert self.feed._ledger.rules.max_cost is None or sum(unit.cost for unit in costs) <= 9
            rank.given += 1
            if self.staleness is not None:
                assert all(self.feed.version - key[2] <= self.staleness for key in keys)
            if len(parts) == len(self.ranks):
                values = [value for part in parts.values() for value in part]
                if len(values) > len(set(values)):  # at the end: fewer than ranks
                    assert all(len(part) == 1 for part in parts.values())
                self.trained.update(set(values))
                self._update()

    def _update(self) -> None:
        """The weights are updated when all ranks have taken a step, sometimes."""
        if len({rank.given for rank in self.ranks}) == 1:
            self.feed.version += 1

    @rule()
    def wait_too_long(self) -> None:
        """The time of those who wait is up: all of them are told."""
        waited = [rank for rank in self.ranks if rank.is_asking and rank.seat is not None]
        self.now += TIMEOUT_S
        looks = itertools.takewhile(lambda due: due is not None, iter(lambda: self.feed.look_at_ranks(self.now), ...))
        assert len([*looks]) <= 2  # those that are in a run, and those that are not
        self.turn()
        assert not any(rank.is_asking for rank in waited)

    # ---------------------------------------------------------------------------------------------------- states

    @rule()
    def save(self) -> None:
        """All ranks take a state, behind the same step."""
        runs = {(rank.run, rank.given) for rank in self.ranks}
        if len(runs) > 1 or any(rank.seat is None for rank in self.ranks) or 0 in dict(runs):
            return
        ((run, given),) = runs
        states = [self.feed.rank_state(rank.rank, run, given) for rank in self.ranks]
        assert len({state["id"] for state in states}) == 1
        if self.feed._ranks is not None and self.feed._ranks.run is not None and self.feed._ranks.run.number == run:
            self.saved = states[0], self.trained.copy()

    @precondition(lambda self: self.saved is not None)
    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        """The job is killed, and goes on from the last state, with another number of ranks."""
        assert self.saved is not None
        self._drop()
        self._make(data)
        state, self.trained = self.saved[0], self.saved[1].copy()
        self.parts = {}
        for rank in self.ranks:
            self.feed.rank_load(rank.rank, state)
            rank.place = ("state", state["id"])

    def _drop(self) -> None:
        for rank in self.ranks:
            for task in (rank.begun, rank.step):
                if task is not None:
                    task.cancel()
                    with contextlib.suppress(asyncio.CancelledError, RanksError, LoaderClosedError):
                        self.loop.run_until_complete(task)
        self.feed.close()

    # ------------------------------------------------------------------------------------------------- what holds

    @invariant()
    def each_sample_is_trained_once(self) -> None:
        """In the history of the states."""
        if hasattr(self, "trained"):
            assert not self.trained or max(self.trained.values()) == 1

    @invariant()
    def nobody_waits_in_vain(self) -> None:
        """Whoever waits does so for a rank that has not begun, or not asked, or for producers."""
        expected = [task for rank in getattr(self, "ranks", []) for task in (rank.begun, rank.step)]
        assert all(task.done() or task in expected for task in getattr(self, "tasks", []))
        for rank in getattr(self, "ranks", []):
            if not rank.is_asking:
                continue
            ledger = self.feed._ledger
            behind = any(other.given < rank.given for other in self.ranks)
            to_do = ledger.pending or ledger._running or (ledger.has_room and not ledger.source_over)
            assert not rank.run or not (ledger.can_take() or ledger.is_over)
            assert not rank.run or behind or to_do or ledger.done < ledger.formed

    def teardown(self) -> None:
        """All ranks begin anew, and take what there is to the end: as many steps each, and each item once."""
        if not hasattr(self, "ranks"):
            return
        same = len({(rank.run, rank.given) for rank in self.ranks}) == 1 and self.ranks[0].run
        for rank in self.ranks:
            rank.place = ("run", rank.run, rank.given) if same else rank.place
            rank.is_over, rank.begun, rank.given, rank.step = False, None, 0, None

            def take(seat: Seat, rank: Rank = rank) -> None:
                rank.seat = seat

            rank.begun = self.start(self.feed.begin_rank(rank.rank, rank.place, take))
            self.turn()
        is_fit = all(rank.run for rank in self.ranks)
        assert is_fit or not same
        for _ in range(200 if is_fit else 0):
            for _ in range(ITEMS):
                self._produce_one(1)
            for rank in self.ranks:
                self._advance(rank)
            if all(rank.is_over for rank in self.ranks):
                break
        if is_fit:
            assert all(rank.is_over for rank in self.ranks)
            assert len({rank.given for rank in self.ranks}) == 1
            if same:
                assert sorted(self.trained.elements()) == [*range(ITEMS)]
        self._drop()
        self.turn()
        self.nobody_waits_in_vain()
        self.loop.close()


TestPlay = Play.TestCase
TestPlay.settings = settings(max_examples=effort.examples(50), stateful_step_count=40, deadline=None)
