"""Ranks of a feed, in all orders of events: as many steps on each, each sample once, nobody waits without a reason."""

from __future__ import annotations

import itertools
from collections import Counter
from time import monotonic
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncloader.errors import LoaderClosedError
from asyncloader.online import Feed, RanksError
from asyncloader.online.link import Request
from asyncloader.online.ranks import Seat
from tests import effort
from tests.patience import wait_until

ITEMS = 30
TIMEOUT_S = 100
keys = itertools.count()


class Rank:
    """A rank, with the reader that it has now. Steps are numbered within a run."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.place: Any = None
        self.key = ""
        self.seat: Seat | None = None
        self.given = 0
        self.step: Request | None = None
        self.is_over = False

    @property
    def run(self) -> int:
        """Number of its run, or 0."""
        return 0 if self.seat is None or self.seat.run is None else self.seat.run.number

    @property
    def is_asking(self) -> bool:
        """Whether it waits for a step, or for others."""
        return self.step is not None and not self.step.done()


class Play(RuleBasedStateMachine):
    """A feed, its producers and its ranks."""

    @initialize(data=st.data())
    def make(self, data: st.DataObject) -> None:
        """Begin."""
        self.requests: list[Request] = []
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
        self.server = self.feed._server
        self.ranks = [Rank(number) for number in range(count)]
        self.is_last = False  # the run has been left, or has ended

    # ------------------------------------------------------------------------------------------------- producers

    @rule(count=st.integers(1, 9), data=st.data())
    def produce(self, count: int, data: st.DataObject) -> None:
        """Samples are made, where there is room."""
        for _ in range(count):
            self._produce_one(data.draw(st.integers(0, 9)))

    def _produce_one(self, cost: int) -> None:
        request = Request()
        self.server.call(request, "lease")
        if not request.done():
            wait_until(lambda: request.done() or not self.server._source.waits)  # type: ignore[union-attr]
            self.server.withdraw(request)
        if request.exception() is None and (leased := request.result()) is not None:
            self.server.call(Request(), "settle", leased.lease, (leased.item, leased.version, cost, 0))

    # ----------------------------------------------------------------------------------------------------- ranks

    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        """A rank begins to iterate."""
        rank = data.draw(st.sampled_from(self.ranks))
        if rank.seat is not None and not (rank.is_over or data.draw(st.integers(0, 5)) == 0):
            return
        if rank.run:
            rank.place = ("run", rank.run, rank.given)
        self._begin(rank)

    def _begin(self, rank: Rank) -> None:
        rank.given, rank.step, rank.is_over = 0, None, False
        rank.key = str(next(keys))
        self._ask(rank, -1, None)
        rank.seat = self.server._seats[rank.key]

    def _ask(self, rank: Rank, given: int, number: int | None) -> Request:
        request = Request()
        self.server.call(request, "step", rank.key, rank.rank, rank.place, given, number)
        self.requests.append(request)
        return request

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """An iterator is dropped."""
        rank = data.draw(st.sampled_from(self.ranks))
        if rank.seat is not None and data.draw(st.integers(0, 5)) == 0:
            self.server.leave(rank.key)
            rank.is_over = True

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
        self._ask(rank, rank.given, None)
        if rank.step is None:
            rank.step = self._ask(rank, rank.given, rank.given)
        if not rank.step.done():
            return
        step, rank.step = rank.step, None
        if isinstance(step.exception(), (RanksError, LoaderClosedError)):
            rank.is_over = True
            assert self.server.run is not rank.seat.run or not self.parts.get((rank.run, rank.given))
        elif (found := step.result()[1]) is None:
            rank.is_over = True
            assert {len(parts) for (run, _), parts in self.parts.items() if run == rank.run} <= {len(self.ranks)}
        else:
            parts = self.parts.setdefault((rank.run, rank.given), {})
            parts[rank.rank] = [key[-1] for key in found]
            costs = self.server._parts[rank.given][rank.rank]
            assert len(found) <= self.feed.batch_size
            assert self.server.ledger.rules.max_cost is None or sum(unit.cost for unit in costs) <= 9
            rank.given += 1
            if self.staleness is not None:
                assert all(self.feed.version - key[2] <= self.staleness for key in found)
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
        waited = [rank for rank in self.ranks if rank.is_asking and not rank.is_over]
        for _ in range(2):  # those that are in a run, and those that are not
            self.server.look(monotonic() + 2 * TIMEOUT_S)
        assert not any(rank.is_asking for rank in waited)

    # ---------------------------------------------------------------------------------------------------- states

    @rule()
    def save(self) -> None:
        """All ranks take a state, behind the same step."""
        runs = {(rank.run, rank.given) for rank in self.ranks}
        if len(runs) > 1 or any(rank.seat is None for rank in self.ranks) or 0 in dict(runs):
            return
        ((run, given),) = runs
        requests = [Request() for _ in self.ranks]
        for request in requests:
            self.server.call(request, "state", run, given)
        states = [request.result() for request in requests]
        assert len({state["id"] for state in states}) == 1
        if self.server.run is not None and self.server.run.number == run:
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
            self.server.call(Request(), "load", rank.rank, state)
            rank.place = ("state", state["id"])

    def _drop(self) -> None:
        for request in self.requests:  # of processes that have gone
            if not request.done():
                self.server.withdraw(request)
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
        expected = [rank.step for rank in getattr(self, "ranks", [])]
        assert all(request.done() or request in expected for request in getattr(self, "requests", []))
        for rank in getattr(self, "ranks", []):
            if not rank.is_asking:
                continue
            ledger = self.server.ledger
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
            self._begin(rank)
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


TestPlay = Play.TestCase
TestPlay.settings = settings(max_examples=effort.examples(50), stateful_step_count=40, deadline=None)
