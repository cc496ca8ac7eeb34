"""Batch samplers that plan: an order is cut into windows, a window is planned as units, ranks are dealt units.

    order      | window 0           | window 1           | ...      positions of the epoch, all ranks'
    planned    [u][u][u][u][u][u][u] [u][u][u][u][u][u]   ...      units: batches of like length, or blocks
    dealt       0  1  2  3  0  1  2   3  0  1  2  3  0    ...      here to four ranks, one unit a batch

The plan of a window depends on the order, the window's number, seed and epoch alone. Two numbers therefore say which
unit is next, the window and the unit in it, and these are the state: from there on any number of ranks can deal out
what is left, each taking any number of units for a batch. Nothing is known of windows that are not planned yet.

At the end of an epoch less may be left than all ranks take in one step. Then it is divided among them once more, so
that each has a last batch and no sample is left out or comes twice.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from asyncloader.errors import ConfigurationError
from asyncloader.samplers.elastic import ElasticSampler
from asyncloader.samplers.lengths import Lengths, LengthsLike
from asyncloader.samplers.ordered import ENDLESS, OrderedSampler, ResumableSampler, Run, count_of


class Units:
    """The units of a window, one behind the other, in an array: 8 bytes a sample, a fifth of what lists take.

    Args:
        keys: The indices of samples.
        units: The number of the unit that each of them is in. Within a unit they stay in the order given.
    """

    def __init__(self, keys: NDArray[np.int64], units: NDArray[np.int64]) -> None:
        self._keys = keys[np.argsort(units, kind="stable")]
        self._ends = np.cumsum(np.bincount(units))

    def __len__(self) -> int:
        """Return how many units there are."""
        return len(self._ends)

    def keys_of(self, number: int) -> list[Any]:
        """Return the keys of a unit, for a dataset."""
        keys: list[Any] = self._keys[self._ends[number - 1] if number else 0 : self._ends[number]].tolist()
        return keys


class EpochPlan:
    """An order in windows: as many as it takes, all alike in size, or of the size that is given if there is no end.

    Where units have a known number of samples, windows have a multiple of that, and the last one has the rest as well,
    unless it is dropped.

    Attributes:
        epoch: The epoch that it is the order of.
        count: How many windows there are; None if there is no end.
        end: The position behind the last one.
        kept: Units of windows that were planned and will be read.

    Args:
        sampler: The sampler that plans.
    """

    count: int | None
    end: int

    def __init__(self, sampler: WindowedBatchSampler) -> None:
        self.epoch: int = sampler.epoch
        self.kept: dict[int, Units] = {}
        self._order = order = sampler.sampler.order()
        self._multiple = multiple = sampler._samples_per_unit or 1
        most = max(1, sampler.window // multiple)
        if order.length is None:
            self.count, self.end, self._shape = None, ENDLESS, (most, 1)
        else:
            pieces = order.length // multiple if sampler.drop_last else -(-order.length // multiple)
            self.count = max(-(-pieces // most), min(sampler._least_windows, pieces))
            self.end, self._shape = min(order.length, pieces * multiple), (pieces, max(1, self.count))

    def begin(self, number: int) -> int:
        """Return the position at which a window begins."""
        pieces, windows = self._shape
        return min(number * pieces // windows * self._multiple, self.end)

    def indices(self, number: int) -> NDArray[np.int64]:
        """Return the indices in a window."""
        return self._order.indices_at(np.arange(self.begin(number), self.begin(number + 1)))


class WindowedBatchSampler(ResumableSampler[list[Any]]):
    """Plans units window by window, and deals them out to ranks. A cursor is a window, and a unit in it.

    A subclass plans a window (`_plan`). The length of an epoch is known when all of it is planned; that plan is kept,
    and read later. Called from the thread that reads it.

    Args:
        lengths: The lengths of samples.
        sampler: The order of samples; None for one of all samples, shuffled or not.
        window: Samples that are planned at once, at most.
        shuffle: Shuffle what is planned; and the samples, without a sampler.
        num_replicas, rank: As of :class:`ElasticSampler`.
        seed: The same on all ranks.
        drop_last: Leave out the last units of an epoch where they are too few for one batch on each rank.
    """

    _beginning: ClassVar[Mapping[str, int]] = {"window": 0, "unit": 0}
    _measure: ClassVar[str] = "length"
    sampler: ElasticSampler | OrderedSampler
    """What is known of samples: their lengths, or their costs."""
    _units_per_batch = 1
    _samples_per_unit: int | None = None
    """Where all units but the last one have as many: then their number is known without a plan."""
    _least_windows = 1
    """Of an epoch."""

    def __init__(
        self,
        lengths: LengthsLike,
        sampler: OrderedSampler | None,
        window: int,
        shuffle: bool,
        num_replicas: int | None,
        rank: int | None,
        seed: int,
        drop_last: bool,
    ) -> None:
        if sampler is not None and not isinstance(sampler, OrderedSampler):
            raise ConfigurationError(
                f"sampler should be an OrderedSampler, whose order can be looked at anywhere, but is a "
                f"{type(sampler).__name__}"
            )
        of_sampler = None if sampler is None else sampler.num_indices()
        self.lengths: Lengths = Lengths(lengths, self._measure)
        if of_sampler not in (None, self.lengths.count):
            raise ConfigurationError(
                f"there are {self.lengths.count} {self._measure}s, but the sampler is one of {of_sampler} samples"
            )
        self.window: int = count_of("window", window)
        self.shuffle = shuffle
        self.sampler = ElasticSampler(self.lengths.count, 1, 0, shuffle, seed) if sampler is None else sampler
        self._tokens = self._space = 0  # in what was planned so far
        self._newest_plan: tuple[Any, EpochPlan | None] = None, None  # and what it is a plan of
        super().__init__(num_replicas=num_replicas, rank=rank, seed=seed, drop_last=drop_last)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes without the plan: copies in other processes make their own."""
        return {**vars(self), "_newest_plan": (None, None)}

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iterator is of; to be called before each. A state of another epoch is dropped."""
        self.sampler.set_epoch(epoch)
        super().set_epoch(epoch)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iterator go on from a state, of whichever rank and number of ranks.

        Raises:
            StateMismatchError: if the state is of another sampler, lengths or order, or a later version.
        """
        self._check_state(state)
        self.sampler.load_state_dict(state["sampler"])
        super().load_state_dict(state)

    def begin_reading(self) -> None:
        """Let what is read from now on be another reading, of this sampler and of the order within."""
        super().begin_reading()
        self.sampler._next, self.sampler._is_announced = None, False
        self.sampler.announce_reading()

    @abstractmethod
    def _plan(self, indices: NDArray[np.int64], *key: int) -> Units:
        """Plan a window: return its units.

        Args:
            indices: The indices of its samples, in their order.
            key: The numbers that seed its random choices.
        """

    def _check_length(self, index: int, length: int) -> None:
        """Raise a ConfigurationError if a sample is too long."""

    def _lengths_of(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the lengths of these samples, none of which may be too long."""
        lengths = self.lengths(indices)
        if len(lengths):
            longest = int(lengths.argmax())
            self._check_length(int(indices[longest]), int(lengths[longest]))
        return lengths

    def _share_of_tokens(self) -> float:
        """Return which share of the space that was planned so far are tokens; at first, one window is planned.

        The share of an empty epoch is 1.
        """
        if not self._space and (plan := self._epoch_plan()).count != 0:
            self._plan_window(plan, 0)
        return self._tokens / self._space if self._space else 1.0

    def _check_state(self, state: dict[str, Any]) -> None:
        super()._check_state(state)
        self.sampler._check_state(state["sampler"])

    def _state_identity(self) -> dict[str, Any]:
        return {f"{self._measure}s": self.lengths.identity, **super()._state_identity()}

    def _bare_state(self, run: Run, items: int) -> dict[str, Any]:
        assert run.within is not None
        return {**super()._bare_state(run, items), "sampler": self.sampler._bare_state(run.within, 0)}

    def _whole_state(self, bare: dict[str, Any]) -> dict[str, Any]:
        return {**bare, "sampler": self.sampler._whole_state(bare["sampler"])}

    def _copy(self) -> Self:
        there = super()._copy()
        there.sampler = self.sampler._copy()
        return there

    def _new_run(self, start: Any) -> Run:
        run = super()._new_run(start)
        run.within = self.sampler._new_run(0)
        return run

    def _deal(self) -> Iterator[list[Any]]:
        run = self._begin_run()
        units, each = self._units(run), self._units_per_batch
        while step := list(itertools.islice(units, each * self.num_replicas)):
            if len(step) == each * self.num_replicas:
                run.read += 1
                own = step[self.rank * each : (self.rank + 1) * each]
                yield [key for window, number in own for key in window.keys_of(number)]
            elif not self.drop_last:
                run.read += 1
                yield share_out([window.keys_of(number) for window, number in step], self.num_replicas)[self.rank]

    def _units(self, run: Run) -> Iterator[tuple[Units, int]]:
        """Plan the next windows of a run, and yield each unit: its window, and its number there."""
        plan, first = self._epoch_plan(), run.start["unit"]
        number = run.start["window"]
        # An order that can be changed stays as it is before the run, too.
        self.sampler._is_begun, self.sampler._planned = True, plan.begin(number)
        while plan.count is None or number < plan.count:
            self.sampler._planned = plan.begin(number + 1)  # before the order is looked at, which stays as it is then
            window = self._plan_window(plan, number)
            run.ends.append(run.ends[-1] + len(window))
            yield from ((window, unit) for unit in range(first, len(window)))
            number, first = number + 1, 0

    def _cursor_after(self, run: Run, items: int) -> dict[str, int]:
        if not items:  # the window may not be planned yet
            return dict(run.start)
        unit = run.start["unit"] + items * self._units_per_batch * self.num_replicas  # from the first window on
        if items > run.read:
            raise ConfigurationError(f"{run.read} batches were yielded: what comes after {items} is not known yet")
        passed = bisect_right(run.ends, unit) - 1  # windows
        within = unit - run.ends[passed] if passed < len(run.ends) - 1 else 0  # at the end, a step may be short
        return {"window": run.start["window"] + passed, "unit": within}

    def _left(self, cursor: Mapping[str, int]) -> int | None:
        plan = self._epoch_plan()
        if plan.count is None:
            return None
        if self._samples_per_unit:
            units = -((plan.begin(cursor["window"]) - plan.end) // self._samples_per_unit)
        else:
            plan.kept = {number: self._plan_window(plan, number) for number in range(cursor["window"], plan.count)}
            units = sum(map(len, plan.kept.values()))
        units -= cursor["unit"]
        whole, left = divmod(units, self._units_per_batch * self.num_replicas)
        return whole + (left > 0 and not self.drop_last)

    def _epoch_plan(self) -> EpochPlan:
        """Return the plan of the epoch that is set: the same one as long as the order within stays as it is."""
        of_what = self.epoch, self.sampler.epoch, self.sampler._reading, self.sampler._version
        known, plan = self._newest_plan
        if plan is None or known != of_what:
            plan = EpochPlan(self)
            self._newest_plan = of_what, plan
        return plan

    def _plan_window(self, plan: EpochPlan, number: int) -> Units:
        """Return the units of a window, which is planned now, or was."""
        return plan.kept.get(number) or self._plan(plan.indices(number), self.seed, plan.epoch, number)


def share_out(units: list[list[Any]], ranks: int) -> list[list[Any]]:
    """Divide the last units of an epoch among ranks: whole ones, or parts of them where there are too few.

    Where there are fewer samples than ranks, some come to several.
    """
    units = list(units)
    while len(units) < ranks and len(longest := max(units, key=len)) > 1:
        at, half = units.index(longest), len(longest) // 2
        units[at : at + 1] = [longest[:half], longest[half:]]
    if len(units) < ranks:
        return [units[rank % len(units)] for rank in range(ranks)]
    bounds = [rank * len(units) // ranks for rank in range(ranks + 1)]
    return [[*itertools.chain.from_iterable(units[first:last])] for first, last in itertools.pairwise(bounds)]
