"""Ledger: which samples of a feed exist, where each of them is, and what may happen next. No I/O, clock or thread.

    lease ──> running ── put ──> ready ── take ──> in a batch ── done ──> settled: trained
      ^          │                 │
      │          │ give back       │ too old ──> settled: stale
      └─ pending <─────────────────┘ on_stale="recycle"         running ── drop ──> settled: dropped

A *unit* is what is leased, put and trained as a whole: one sample, or a group of samples. A unit is in one of
these places, and charged against the bound until it is settled.

The bound. Each version of the weights trains ``steps_per_version`` batches at least. So batch j is trained by version
``version + ceil((j - done) / steps_per_version)`` at the latest, where `done` batches were trained so far.
The last batch j for which that is at most u + max_staleness is the deadline of a unit of version u. Two rules hold it:

- *Admission*: a unit is admitted while all units that are not settled fit into the batches before its deadline, which
  is (max_staleness * steps_per_version + 1) batches from now. With one step per version that is the formula of AReaL,
  (max_staleness + version + 1) * batch_size - accepted - running.
- *Waiting for slow units*: a batch without a running unit is formed only if all units with the same or an earlier
  deadline still fit into the batches that are left for them. So a slow unit is waited for, and never too old for being
  slow. A unit can be too old only if versions jump, or if it was put with an old version.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain, islice
from typing import Any, Literal, NamedTuple

from asyncloader.online.errors import LeaseLostError

OnStale = Literal["drop", "keep", "recycle"]

OUTCOMES = ("trained", "stale", "dropped", "failed", "recycled", "late")
WAITS: Any = object()
"""In place of what is not there yet."""


class Rules(NamedTuple):
    """The rules of a ledger.

    Attributes:
        size: Units of a batch.
        limit: Units that may be unsettled at once.
        max_staleness: Versions that a unit may be old when it is trained; None for any.
        steps: Batches that a version is trained with.
        on_stale: What becomes of units that are older.
        max_cost: The most that units of a batch cost together; None for no bound.
        max_retries: How often a unit is leased again after a failure.
    """

    size: int
    limit: int
    max_staleness: int | None = None
    steps: int = 1
    on_stale: OnStale = "drop"
    max_cost: float | None = None
    max_retries: int = 3


class Unit(NamedTuple):
    """A sample, or a group of samples, from its lease or its put until it is settled. What changes it makes it anew.

    So a state that is still to be written down has all units as they were. In the state they have no lease.

    Attributes:
        id: Ascending in the order in which units were leased or put.
        item: The item that the source gave; nothing for a unit that was put without a lease.
        samples: The samples that were put; empty before.
        version: The version of the weights that made it, or of its lease.
        cost: The cost of all its samples.
        priority: Units with more come first.
        tries: How many leases of it have failed.
        partial: What a producer has made of the item for the next one to go on with, and the version of that; or
            nothing.
        lease: The lease that it runs under, or has run under.
    """

    id: int
    item: tuple[Any, ...] = ()
    samples: Sequence[Any] = ()
    version: int = 0
    cost: float = 0.0
    priority: float = 0.0
    tries: int = 0
    partial: tuple[Any, ...] = ()
    lease: int | None = None

    @property
    def value(self) -> Any:
        """What is leased: the item, or what has become of it so far."""
        return (self.partial or self.item)[0]


class ReadyUnits:
    """Units that wait for the trainer: those with the highest priority first, and of these whoever came first."""

    def __init__(self) -> None:
        self._by_priority: dict[float, dict[int, Unit]] = {}
        self._sorted: list[float] = []  # what priorities there are, with the sign of the highest first

    def __bool__(self) -> bool:
        return bool(self._sorted)

    def __iter__(self) -> Iterator[Unit]:
        return chain.from_iterable(self._by_priority[-key].values() for key in self._sorted)

    def add(self, unit: Unit) -> None:
        """Put a unit behind the others of its priority."""
        if unit.priority not in self._by_priority:
            insort(self._sorted, -unit.priority)
        self._by_priority.setdefault(unit.priority, {})[unit.id] = unit

    def remove(self, unit: Unit) -> None:
        """Take a unit out."""
        units = self._by_priority[unit.priority]
        del units[unit.id]
        if not units:
            del self._by_priority[unit.priority]
            del self._sorted[bisect_left(self._sorted, -unit.priority)]


class Ledger:
    """All units of a feed that are not settled. Whoever calls holds the feed's lock.

    Args:
        rules: The rules.

    Attributes:
        version: The version of the weights.
        next_id: The id of the next unit.
        formed: How many batches were formed.
        done: How many of these were trained: the consumer has asked for the one that follows.
        units: All that are not settled, by id.
        pending: Of these, those that wait for a producer; they come before new ones.
        source_over: The source has no more items.
        closed: Nothing more is leased or put.
        parts: A batch is divided into so many, and has a unit for each.
        ended: The consumer was given the end; nor is anything leased or put then, until another one begins.
        counts: Units by what became of them: "trained", "stale", "dropped", "failed". Beside these, "recycled" counts
            units that were too old and leased again, and "late" those that were trained beyond the bound.
        ages: Units that were trained, by how many versions they were old when their batch was due.
        ended_leases: Leases that have ended, until somebody looks.
    """

    next_id: int
    formed: int
    done: int
    source_over: bool
    ended: bool

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.version: int = 0
        self.next_id = self.formed = self.done = 0
        self.units: dict[int, Unit] = {}
        self.pending: deque[Unit] = deque()
        self.source_over = self.closed = self.ended = False
        self.parts = 1
        self.counts: Counter[str] = Counter()
        self.ages: Counter[int] = Counter()
        self.ended_leases: list[int] = []
        self._running: dict[int, Unit] = {}  # by lease
        self._ready = ReadyUnits()
        self._batches: deque[list[Unit]] = deque()  # from number `done` on
        self._next_lease = 0
        self._choice: list[Unit] | None = None  # the next batch, if that is known
        # Units that were not trained yet, by version. Those that are partly made count as running.
        self._new_ready: Counter[int] = Counter()
        self._new_running: Counter[int] = Counter()

    # ---------------------------------------------------------------------------------------------------- producers

    @property
    def room(self) -> int:
        """How many more units are admitted.

        With a bound, a batch that was formed with fewer units counts as a whole one: what would be admitted in their
        place is not trained with it, but later.
        """
        gaps = 0 if self.rules.max_staleness is None else (self.formed - self.done) * self.rules.size
        return max(0, self.rules.limit - len(self.units) - max(0, gaps - self.num_in_batches))

    @property
    def num_running(self) -> int:
        """How many units are leased."""
        return len(self._running)

    @property
    def num_ready(self) -> int:
        """How many units wait for the trainer."""
        return self._new_ready.total()

    @property
    def num_in_batches(self) -> int:
        """How many units are in batches that were formed and are not trained."""
        return sum(map(len, self._batches))

    def batch(self, number: int) -> list[Unit]:
        """Return a batch that was formed and is not trained."""
        return self._batches[number - self.done]

    @property
    def is_settled(self) -> bool:
        """Whether no unit will be leased any more."""
        if self.closed:
            return True
        if self.rules.on_stale == "recycle" and (self._batches or (self._ready and not self.ended)):
            return False  # they may become too old, those of batches if the loop is left
        return self.ended or (self.source_over and not (self.pending or self._running))

    def lease(self, *item: Any) -> Unit:
        """Lease an item of the source, where there is room; without one, the first unit that is pending.

        What is partly made has the version that it was begun with, and is begun anew if that is too old by now.
        """
        unit = self._admit(item) if item else self.pending.popleft()
        version, partial = self.version, unit.partial
        if partial:
            version = partial[1]
            _uncount(self._new_running, version)
            if self._is_unfit(version):
                version, partial = self.version, ()
        lease = self._next_lease
        self._next_lease += 1
        unit = self._running[lease] = self._changed(unit, version=version, partial=partial, lease=lease)
        self._new_running[version] += 1
        return unit

    def running(self, lease: int) -> Unit:
        """Return the unit of a lease.

        Raises:
            LeaseLostError: if the lease has ended.
        """
        unit = self._running.get(lease)
        if unit is None:
            raise LeaseLostError(
                "this lease has ended: its item was put or dropped before, or was given back (by retry(), after its "
                "time limit, or as a state was loaded), and is another producer's now"
            )
        return unit

    def why_lost(self, lease: int) -> str:
        """Return why nobody will take what is made of a lease; "" if somebody may."""
        if (unit := self._running.get(lease)) is None:
            return "the lease has ended"
        if self.closed:
            return "the feed is closed"
        return "what is made of it is too old by now" if self._is_unfit(unit.version) else ""

    def put(self, samples: list[Any], version: int, cost: float, priority: float, lease: int | None = None) -> None:
        """Take the samples of a unit: of a lease, or new ones, where there is room.

        Raises:
            LeaseLostError: if the lease has ended.
        """
        if lease is None:
            unit = self._admit((), samples, version, cost, priority)
        else:
            unit = self._end_lease(lease)
            unit = self._changed(unit, samples=samples, version=version, cost=cost, priority=priority)
        self._accept(unit)

    def drop(self, lease: int) -> None:
        """Settle the unit of a lease without samples.

        Raises:
            LeaseLostError: if the lease has ended.
        """
        self._settle(self._end_lease(lease), "dropped")

    def give_back(self, lease: int, failed: bool, *made: Any) -> None:
        """Have another producer lease the unit; settle it if too many have failed. Ignore a lease that has ended.

        Args:
            lease: The lease.
            failed: It counts as a failure.
            made: What the other one goes on with, in place of the item.
        """
        if lease not in self._running:
            return
        unit = self._end_lease(lease)
        partial = (made[0], unit.version) if made else unit.partial
        unit = self._changed(unit, partial=partial, tries=unit.tries + failed)
        if unit.tries > self.rules.max_retries:
            self._settle(unit, "failed")
        else:
            self._wait_for_producer(unit)

    def _wait_for_producer(self, unit: Unit) -> None:
        """Have a unit be leased again. What is partly made is waited for all the while, as if a producer had it."""
        self.pending.append(unit)
        if unit.partial:
            self._new_running[unit.partial[1]] += 1

    def _admit(self, *details: Any) -> Unit:
        unit = self.units[self.next_id] = Unit(self.next_id, *details)
        self.next_id += 1
        return unit

    def _changed(self, unit: Unit, **changes: Any) -> Unit:
        changed = self.units[unit.id] = unit._replace(**changes)
        return changed

    def _end_lease(self, lease: int) -> Unit:
        unit = self.running(lease)
        del self._running[lease]
        _uncount(self._new_running, unit.version)
        self._choice = None
        self.ended_leases.append(lease)
        return unit

    def _accept(self, unit: Unit) -> None:
        """Have a unit wait for the trainer, unless it is too old."""
        if self._is_unfit(unit.version):
            self._turn_away(unit)
        else:
            self._ready.add(unit)
            self._new_ready[unit.version] += 1
            self._choice = None

    def _unready(self, unit: Unit) -> None:
        self._ready.remove(unit)
        _uncount(self._new_ready, unit.version)
        self._choice = None

    def _settle(self, unit: Unit, outcome: str) -> None:
        del self.units[unit.id]
        self.counts[outcome] += 1

    # ------------------------------------------------------------------------------------------------------ trainer

    @property
    def is_ending(self) -> bool:
        """Whether nothing will be put any more."""
        return self.closed or (self.source_over and not (self.pending or self._running))

    @property
    def is_over(self) -> bool:
        """Whether there is no batch, and none will come."""
        if self.ended:
            return True
        return self.is_ending and (not self._ready or (self.done == self.formed and not self.can_take()))

    def set_version(self, version: int) -> None:
        """Note that weights were updated; what is too old now is settled, or leased again."""
        self.version, self._choice = version, None
        for unit in [unit for unit in self._ready if self._is_unfit(unit.version)]:
            self._unready(unit)
            self._turn_away(unit)

    def can_take(self) -> bool:
        """Whether a batch can be formed now."""
        if self._choice is None:
            self._choice = self._choose()
        return self._choice is not None

    def take(self) -> list[Unit]:
        """Form the next batch, if `can_take`."""
        if not self.can_take() or (batch := self._choice) is None:
            raise RuntimeError("there is no batch")
        for unit in batch:
            self._unready(unit)
        self._batches.append(batch)
        self.formed += 1
        self._choice = None
        if self.formed - 1 == self.done:
            self._note_age(batch)
        return batch

    def can_answer(self, number: int) -> bool:
        """Whether the consumer can be given a batch of this number, or the end. From then on it can, whatever comes."""
        if number == self.formed and not self.ended and self.can_take():
            self.take()
        is_there = number < self.formed
        self.ended = self.ended or (not is_there and self.is_over)
        return is_there or self.ended

    def finish(self, done: int) -> None:
        """Note that the consumer asks for batch number `done`: those before are trained."""
        while self.done < min(done, self.formed):
            self.done += 1
            for unit in self._batches.popleft():
                self._settle(unit, "trained")
            if self._batches:
                self._note_age(self._batches[0])
        self._choice = None

    def begin(self) -> None:
        """Have the units of batches that are not trained wait again, before all others: their consumer has left."""
        others, self._ready = self._ready, ReadyUnits()
        for unit in chain.from_iterable(self._batches):
            self._accept(unit)
        for unit in others:
            self._ready.add(unit)
        self._batches.clear()
        self.formed, self.ended, self._choice = self.done, False, None

    def _note_age(self, batch: list[Unit]) -> None:
        """Note how old a batch is that the consumer asks for."""
        for unit in batch:
            self.ages[self.version - unit.version] += 1
            self.counts["late"] += self._is_stale(unit.version)

    # ----------------------------------------------------------------------------------------------------- the bound

    def _version_at(self, batch: int) -> int:
        """Return the version that will train a batch at the latest."""
        return self.version - (self.done - batch) // self.rules.steps

    def _is_stale(self, version: int) -> bool:
        most = self.rules.max_staleness
        return most is not None and self.version - version > most

    def _is_unfit(self, version: int) -> bool:
        return self.rules.on_stale != "keep" and self._is_stale(version)

    def _turn_away(self, unit: Unit) -> None:
        """Settle a unit that is too old, or have it leased again."""
        if self.rules.on_stale == "recycle" and unit.item:
            self.counts["recycled"] += 1
            self.pending.append(self._changed(unit, samples=(), partial=()))
        else:
            self._settle(unit, "stale")

    def _choose(self) -> list[Unit] | None:
        """Return the next batch; None if the trainer has to wait for it."""
        rules, ending = self.rules, self.is_ending
        if not self._ready or (self.num_ready < rules.size and not ending and rules.max_cost is None):
            return None
        if (musts := self._musts()) is None:
            return None
        batch: dict[int, Unit] = {}
        for version, count in musts:
            new = [unit for unit in self._ready if unit.version <= version]
            count -= sum(unit.id in batch for unit in new)
            missing = [unit for unit in new if unit.id not in batch]
            batch.update((unit.id, unit) for unit in missing[: max(0, min(count, rules.size - len(batch)))])
        rest = (unit for unit in self._ready if unit.id not in batch)
        batch.update([(unit.id, unit) for unit in islice(rest, rules.size - len(batch))])
        chosen = list(batch.values())
        within = self._within_cost(chosen)
        is_whole = len(within) == rules.size or len(within) < len(chosen)
        return within if (is_whole or ending) and len(within) >= self.parts else None

    def _musts(self) -> list[tuple[int, int]] | None:
        """Return how many units of each version, or older, have to be in the next batch, so that none gets too old.

        None if the next batch has to wait: for running units, or for the batches before it.
        """
        rules = self.rules
        if (most := rules.max_staleness) is None:
            return []
        musts, ready, all_new = [], 0, 0
        at = self._version_at(self.formed)
        for version in sorted(self._new_ready.keys() | self._new_running.keys()):
            new_ready, new_running = self._new_ready[version], 0 if self.closed else self._new_running[version]
            if not (new_ready or new_running) or version + most < self.version:  # too old in any case
                continue
            if version + most < at:  # not too old yet: trained soon, or never
                return None
            ready, all_new = ready + new_ready, all_new + new_ready + new_running
            later = self.done + rules.steps * (version + most - self.version) - self.formed  # batches, after this one
            if (count := all_new - later * rules.size) > 0:
                if count > ready < all_new:
                    return None
                musts.append((version, min(count, ready)))
        return musts

    def _within_cost(self, units: list[Unit]) -> list[Unit]:
        """Return the first units that cost no more together than a batch may; one for each part in any case."""
        if (most := self.rules.max_cost) is None:
            return units
        costs = [*accumulate(unit.cost for unit in units)]
        return units[: max(self.parts, bisect_right(costs, most))]

    # ------------------------------------------------------------------------------------------------------- states

    def state(self, done: int) -> Callable[[], dict[str, Any]]:
        """Return what writes the state as of now, as the batches before number `done` are trained.

        What is returned looks at each unit, which takes its time: it is called without the lock, while the ledger goes
        on. Units that run are pending in the state.
        """
        trained = list(islice(self._batches, max(0, done - self.done)))
        counts = self.counts.copy()
        gone = {unit.id for batch in trained for unit in batch}
        counts["trained"] += len(gone)
        units = list(self.units.values())
        ready = [*chain.from_iterable(islice(self._batches, len(trained), None)), *self._ready]
        state = {
            "done": self.done + len(trained),
            "version": self.version,
            "next_id": self.next_id,
            "source_over": self.source_over,
            "counts": dict(counts),
            "ages": dict(self.ages),
        }
        return lambda: {
            **state,
            "ready": [unit.id for unit in ready],
            "units": [unit[:-1] for unit in units if unit.id not in gone],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a state, in place of what there is. Leases that were given out before have ended."""
        self.version, self.next_id, self.source_over = state["version"], state["next_id"], state["source_over"]
        self.counts, self.ages = Counter(state["counts"]), Counter(state["ages"])
        self.units = {written[0]: Unit(*written) for written in state["units"]}
        self._running.clear()
        self._new_running.clear()
        self._ready = ReadyUnits()
        self._new_ready.clear()
        self._batches.clear()
        self.done = self.formed = state["done"]
        self.ended = False
        self.pending.clear()
        waiting = {*state["ready"]}
        for number, unit in self.units.items():
            if number not in waiting:
                self._wait_for_producer(unit)
        for number in state["ready"]:
            self._accept(self.units[number])
        self._choice = None


def _uncount(counts: Counter[int], version: int) -> None:
    counts[version] -= 1
    if not counts[version]:  # there are ever more versions
        del counts[version]
