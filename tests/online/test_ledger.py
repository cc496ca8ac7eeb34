"""The ledger of a feed: leases, the bound on staleness, batches and states, in all orders of events."""

from __future__ import annotations

import pickle
from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncloader.online.errors import LeaseLostError
from asyncloader.online.ledger import Ledger, Rules, Unit
from tests.support import effort


def check(ledger: Ledger) -> None:
    """See that each unit is in one place, and the counts are those of the places."""
    batches = [unit for batch in ledger._batches for unit in batch]
    places = [*ledger.pending, *ledger._running.values(), *ledger._ready, *batches]
    assert sorted(unit.id for unit in places) == sorted(ledger.units)
    assert all(ledger.units[unit.id] is unit for unit in places)
    assert len(ledger.units) <= ledger.rules.limit
    assert len(ledger._batches) == ledger.formed - ledger.done
    assert all(unit.samples for unit in (*ledger._ready, *batches))
    begun = Counter(unit.partial[1] for unit in ledger.pending if unit.partial)
    assert ledger._new_running == begun + Counter(unit.version for unit in ledger._running.values())
    assert ledger._new_ready == Counter(unit.version for unit in ledger._ready)
    settled = ("trained", "stale", "dropped", "failed")
    assert ledger.next_id == len(ledger.units) + sum(ledger.counts[name] for name in settled)


class Play(RuleBasedStateMachine):
    """Producers and a trainer. A version is new when it was trained with; sometimes versions jump."""

    may_jump = False

    @initialize(data=st.data())
    def make(self, data: st.DataObject) -> None:
        """Begin with some rules."""
        size, steps = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
        staleness = data.draw(st.sampled_from([0, 1, 2, None]))
        limit = (3 if staleness is None else staleness * steps + 1) * size
        self.rules = Rules(
            size,
            data.draw(st.integers(size, limit)),
            staleness,
            steps,
            data.draw(st.sampled_from(["drop", "keep", "recycle"])),
            data.draw(st.none() | st.integers(1, 4)) if self.may_jump else None,
            data.draw(st.integers(0, 2)),
        )
        self.ledger = Ledger(self.rules)
        self.items = 0
        self.is_trained = False  # the trainer holds a batch
        self.read, self.is_promised = 0, False  # by the loader: the number of its next batch, or the end
        self.first = self.given = 0  # batches: before those of this reader, and of this reader given to the trainer
        self.since_update = 0
        self.uses: Counter[int] = Counter()
        self.saved: Any = None
        self.writing: list[Any] = []  # states that are written later, and what each has to be
        # The source, and the feed, end after so many items.
        self.ends_after, self.closes_after = (data.draw(st.sampled_from([0, 2, 5, 12])) for _ in range(2))

    # -------------------------------------------------------------------------------------------------- producers

    @rule()
    def lease(self) -> None:
        """A producer asks for a lease."""
        ledger = self.ledger
        if ledger.closed or ledger.ended:
            return
        if ledger.pending:
            before = ledger.pending[0]
            partial = before.partial
            unit = ledger.lease()
            assert unit.id == before.id
            if unit.partial:
                value, version = partial
                is_late = self.rules.max_staleness is not None and ledger.version - version > self.rules.max_staleness
                assert self.rules.on_stale == "keep" or not is_late
                assert (unit.value, unit.version) == (value, version)
                return
            assert (unit.value,) == unit.item
        elif ledger.room and not ledger.source_over:
            unit = ledger.lease(self.items)
            self.items += 1
        else:
            return
        assert unit.version == ledger.version

    def _some(self, data: st.DataObject) -> Unit | None:
        leases = sorted(self.ledger._running)
        return self.ledger._running[data.draw(st.sampled_from(leases))] if leases and not self.ledger.closed else None

    @rule(data=st.data(), cost=st.integers(0, 4), priority=st.integers(0, 2))
    def put(self, data: st.DataObject, cost: int, priority: int) -> None:
        """A producer is done."""
        if (unit := self._some(data)) is not None:
            lease = unit.lease
            assert lease is not None
            version = data.draw(st.integers(0, unit.version)) if self.may_jump else unit.version
            self.ledger.put([unit.id], version, cost, priority, lease)
            with pytest.raises(LeaseLostError):
                self.ledger.put([unit.id], version, cost, priority, lease)

    @rule(priority=st.integers(0, 2))
    def push(self, priority: int) -> None:
        """A sample comes without a lease."""
        ledger = self.ledger
        if ledger.room and not (ledger.closed or ledger.ended):
            ledger.put([ledger.next_id], ledger.version, 1, priority)

    @rule(data=st.data(), failed=st.booleans())
    def give_back(self, data: st.DataObject, failed: bool) -> None:
        """A producer fails, dies, or takes too long."""
        if (unit := self._some(data)) is not None:
            assert unit.lease is not None
            self.ledger.give_back(unit.lease, failed=failed)

    @rule(data=st.data())
    def hand_over(self, data: st.DataObject) -> None:
        """A producer gives back what it has made so far."""
        if (unit := self._some(data)) is not None:
            assert unit.lease is not None
            tries, version = unit.tries, unit.version
            self.ledger.give_back(unit.lease, False, ["partly", unit.id])
            unit = self.ledger.units[unit.id]
            assert (unit.tries, unit.partial) == (tries, (["partly", unit.id], version))

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        """A producer has nothing to put."""
        if (unit := self._some(data)) is not None:
            assert unit.lease is not None
            self.ledger.drop(unit.lease)

    # ---------------------------------------------------------------------------------------------------- trainer

    @rule()
    def promise(self) -> None:
        """The loader asks whether it is given a batch, or the end, without waiting."""
        self.is_promised = self.ledger.can_answer(self.read)

    @rule()
    def take(self) -> None:
        """The loader reads what it was promised, whatever has come since."""
        ledger = self.ledger
        if self.is_promised and not ledger.ended:
            batch = ledger.batch(self.read)
            assert 0 < len(batch) <= self.rules.size
            assert len({unit.id for unit in batch}) == len(batch)
            self.read += 1
            self.is_promised = False

    @rule()
    def ask(self) -> None:
        """The trainer asks for its next batch, and is given it if it is there."""
        self.ledger.finish(self.first + self.given)
        self.is_trained = False
        if self.read == self.first + self.given:
            self.promise()
            self.take()
        if self.read > self.first + self.given:
            self._train(self.ledger.batch(self.ledger.done))

    def _train(self, batch: list[Unit]) -> None:
        self.given += 1
        self.since_update += 1
        self.is_trained = True
        for unit in batch:
            self.uses[unit.id] += 1
            assert self.uses[unit.id] == 1
            if not self.may_jump and self.rules.max_staleness is not None:
                assert self.ledger.version - unit.version <= self.rules.max_staleness

    @rule()
    def update(self) -> None:
        """The weights are updated, or not, after so many batches."""
        if self.is_trained and self.since_update >= self.rules.steps:
            self.since_update = 0
            self.ledger.set_version(self.ledger.version + 1)

    @rule(by=st.integers(1, 3))
    @precondition(lambda self: self.may_jump)
    def jump(self, by: int) -> None:
        """The version jumps."""
        self.ledger.set_version(self.ledger.version + by)

    @rule()
    def leave(self) -> None:
        """The trainer leaves, and comes again."""
        self.ledger.finish(self.first + self.given)
        self.ledger.begin()
        self._begin()

    def _begin(self) -> None:
        self.first = self.read = self.ledger.formed
        self.given, self.is_trained, self.is_promised = 0, False, False

    # ----------------------------------------------------------------------------------------------------- states

    @rule()
    def save(self) -> None:
        """A state is taken."""
        write = self.ledger.state(self.first + self.given)
        state = pickle.dumps(write())
        self.writing = [*self.writing[-3:], (write, state)]
        self.saved = state, self.items, self.uses.copy(), self.since_update

    @rule()
    def load(self) -> None:
        """The job is killed, and goes on from the last state."""
        if self.saved is None:
            return
        state, self.items, uses, self.since_update = self.saved
        self.uses = uses.copy()
        self.ledger = Ledger(self.rules)
        self.ledger.load(pickle.loads(state))
        self._begin()

    @rule(is_source=st.booleans())
    def end(self, is_source: bool) -> None:
        """The source ends, or the feed is closed."""
        if is_source and self.items >= self.ends_after:
            self.ledger.source_over = True
        elif not is_source and self.items >= self.closes_after:
            self.ledger.closed = True

    # ------------------------------------------------------------------------------------------------- what holds

    @invariant()
    def a_promise_is_kept(self) -> None:
        """A loader that was promised a batch, or the end, need not wait for it."""
        if hasattr(self, "ledger") and self.is_promised:
            assert self.ledger.can_answer(self.read)

    @invariant()
    def everything_is_in_its_place(self) -> None:
        """Nothing is lost, nothing is there twice."""
        if hasattr(self, "ledger"):
            check(self.ledger)

    @invariant()
    def a_state_is_that_of_its_moment(self) -> None:
        """Whenever it is written, and whatever has become of its units meanwhile."""
        for write, state in getattr(self, "writing", ()):
            assert write() == pickle.loads(state)

    @invariant()
    def nobody_waits_in_vain(self) -> None:
        """If the trainer waits, a producer can do something about it."""
        if not hasattr(self, "ledger"):
            return
        ledger = self.ledger
        if ledger.formed == ledger.done and not (self.is_promised or ledger.can_take() or ledger.is_over):
            assert not ledger.closed
            assert ledger._running or ledger.pending or (ledger.room and not ledger.source_over)

    @invariant()
    def what_is_slow_is_trained(self) -> None:
        """Nothing gets too old by waiting, and nothing is trained too old."""
        if hasattr(self, "ledger") and not self.may_jump:
            counts = self.ledger.counts
            assert not counts["stale"]
            assert not counts["recycled"]
            assert not counts["late"]

    def teardown(self) -> None:
        """All that is there is trained, if it is waited for."""
        if not hasattr(self, "ledger"):
            return
        ledger = self.ledger
        ledger.source_over = True
        for _ in range(200):
            if ledger.pending and not ledger.closed:
                ledger.lease()
            for unit in list(ledger._running.values()):
                if not ledger.closed:
                    assert unit.lease is not None
                    ledger.put([unit.id], unit.version, 1, 0, unit.lease)
            self.ask()
            check(ledger)
            if ledger.is_over:
                break
        assert ledger.is_over
        unsettled = [*ledger._running.values(), *ledger.pending] if ledger.closed else []
        assert set(ledger.units) == {unit.id for unit in unsettled} | {
            unit.id for batch in ledger._batches for unit in batch
        }


class Jumps(Play):
    """With versions that jump, samples that were put with old ones, and batches of different sizes."""

    may_jump = True


class Counted(float):
    """A priority that counts how often it is compared."""

    compared = 0

    def __neg__(self) -> Counted:
        return Counted(-float(self))

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return float(self) == other

    def __lt__(self, other: float) -> bool:
        Counted.compared += 1
        return float(self) < other

    __hash__ = float.__hash__


@pytest.mark.parametrize("waiting", [100, 10_000])
def test_an_order_is_not_sorted_anew_for_each_batch(waiting: int) -> None:
    """A batch takes as long however much waits; those with the highest priority come first, in the order they came."""
    ledger = Ledger(Rules(8, waiting))
    for number in range(waiting):
        ledger.put([number], 0, 1, Counted(number % 50))
    Counted.compared = 0
    batches = [[unit.samples[0] for unit in ledger.take()] for _ in range(2)]
    ledger.finish(2)
    assert Counted.compared < 3000
    best = sorted(range(waiting), key=lambda number: -(number % 50))[:16]
    assert batches == [best[:8], best[8:]]


many = settings(max_examples=effort.examples(150), stateful_step_count=50, deadline=None)
TestPlay = Play.TestCase
TestPlay.settings = many
TestJumps = Jumps.TestCase
TestJumps.settings = many
