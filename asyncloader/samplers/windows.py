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

import copy
import itertools
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from asyncloader.errors import ConfigurationError, StateMismatchError
from asyncloader.protocols import probe
from asyncloader.samplers.elastic import ElasticSampler
from asyncloader.samplers.lengths import Lengths, LengthsLike
from asyncloader.samplers.ordered import ENDLESS, HasOrder, Order, ResumableSampler, Run, check_state, count_of


class WindowedBatchSampler(ResumableSampler[list[Any]]):
    """Plans units window by window, and deals them out to ranks. A cursor is a window, and a unit in it.

    Called from the thread that reads it.

    Args:
        lengths: The lengths of samples, or a function of their indices.
        sampler: The order of samples; None for one of all samples, shuffled or not.
        num_samples: How many samples there are; needed for a function of lengths.
        window: Samples that are planned at once, at most.
        shuffle: Shuffle what is planned; and the samples, without a sampler.
        num_replicas, rank: As of :class:`ElasticSampler`.
        seed: The same on all ranks.
        drop_last: Leave out the last units of an epoch where they are too few for one batch on each rank.
    """

    _beginning: ClassVar[Mapping[str, int]] = {"window": 0, "unit": 0}
    _measure: ClassVar[type[Lengths]] = Lengths
    """What is known of samples: their lengths, or their costs."""

    def __init__(
        self,
        lengths: LengthsLike,
        sampler: HasOrder | None,
        num_samples: int | None,
        window: int,
        shuffle: bool,
        num_replicas: int | None,
        rank: int | None,
        seed: int,
        drop_last: bool,
    ) -> None:
        super().__init__(num_replicas, rank, seed, drop_last)
        if sampler is not None and not isinstance(sampler, HasOrder):
            raise ConfigurationError(
                f"sampler should be one of asyncloader.samplers, whose order can be looked at anywhere, but is a "
                f"{type(sampler).__name__}"
            )
        of_sampler = None if sampler is None else sampler.num_indices()
        count = num_samples if num_samples is not None or not callable(lengths) else of_sampler
        self.lengths = self._measure(lengths, count)
        if of_sampler not in (None, self.lengths.count):
            raise ConfigurationError(
                f"there are {self.lengths.count} {self._measure.noun}s, but the sampler is one of {of_sampler} samples"
            )
        self.window = count_of("window", window)
        self.shuffle = shuffle
        self.sampler = sampler
        self._units_per_batch = 1
        self._samples_per_unit = 1  # where all units have as many
        self._least_windows = 1  # of an epoch
        self._tokens = self._space = 0  # in what was planned so far
        self._counted: tuple[Any, int] | None = None  # from which epoch and cursor on, and how many units there are

    def __repr__(self) -> str:
        place = "{window}:{unit}".format(**self._cursor_after(self._run.read))
        return f"<{type(self).__name__} rank {self.rank} of {self.num_replicas}, epoch {self.epoch}, {place}>"

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iterator is of; to be called before each. A state of another epoch is dropped."""
        super().set_epoch(epoch)
        inner: Any = self.sampler
        if inner is not None:
            inner.set_epoch(epoch)

    def left_after(self, state: dict[str, Any], next_epoch: int | None = None) -> int:
        """Return how many batches of this rank are left of an epoch after a state. For that these are planned.

        Args:
            state: A state, taken on any rank of any number of ranks.
            next_epoch: The epoch of the state is over, and this one is meant.
        """
        there = copy.copy(self)
        there.sampler = copy.deepcopy(self.sampler)
        there.load_state_dict(state)
        if next_epoch is not None:
            there.set_epoch(next_epoch)
        left = there._left(there._next if next_epoch is None else self._beginning)
        assert left is not None
        return left

    def preload(self, state: dict[str, Any]) -> None:
        """Tell the order of samples within of a state that a loader has been given, and which is loaded later."""
        if callable(preload := probe(self.sampler, "preload")) and state["sampler"] is not None:
            preload(state["sampler"])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iterator go on from a state, of whichever rank and number of ranks.

        Raises:
            StateMismatchError: if the state is of another sampler, lengths or order, or a later version.
        """
        inner: Any = self.sampler
        check_state(state, self)
        if (inner is None) != (state["sampler"] is None):
            was = state["sampler"] and state["sampler"].get("kind", "one")
            raise StateMismatchError("sampler", was, inner and type(inner).__name__)
        if inner is not None:
            inner.load_state_dict(state["sampler"])
        super().load_state_dict(state)
        self._counted = None  # the state of a mixture may have other weights
        self.lengths.say_what_is_compared()
        if planned := self._next["window"] + (self._next["unit"] > 0):
            windows = self._windows()  # a mixture is told what is past: there, its weights cannot be changed any more
            windows.order.indices_at(np.array([windows.begin(planned) - 1]))

    @abstractmethod
    def _plan(self, indices: NDArray[np.int64], *key: int) -> list[list[Any]]:
        """Plan a window: return the keys of the samples of each unit.

        Args:
            indices: The indices of its samples, in their order.
            key: The numbers that seed its random choices.
        """

    @abstractmethod
    def _check_length(self, index: int, length: int) -> None:
        """Raise a ConfigurationError if a sample is too long."""

    def _check_longest(self) -> None:
        if (longest := self.lengths.longest()) is not None:
            self._check_length(*longest)

    def _lengths_of(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        lengths = self.lengths(indices)
        longest = int(lengths.argmax())
        self._check_length(int(indices[longest]), int(lengths[longest]))
        return lengths

    def _share_of_tokens(self) -> float:
        """Return which share of the space that was planned so far are tokens; at first, one window is planned.

        The share of an empty epoch is 1.
        """
        if not self._space and (windows := self._windows()).count != 0:
            self._plan_at(windows, 0)
        return self._tokens / self._space if self._space else 1.0

    @abstractmethod
    def _state_identity(self) -> dict[str, Any]:
        planned = {f"{self._measure.noun}s": self.lengths.identity, "window": self.window, "shuffle": self.shuffle}
        return {**super()._state_identity(), **planned}

    def _more_state(self) -> dict[str, Any]:
        inner: Any = self.sampler
        return {"sampler": None if inner is None else inner._bare_state()}

    def _whole_state(self, bare: dict[str, Any]) -> dict[str, Any]:
        inner: Any = self.sampler
        return bare if inner is None else {**bare, "sampler": inner._whole_state(bare["sampler"])}

    def _deal(self, run: Run) -> Iterator[list[Any]]:
        units, each = self._units(run), self._units_per_batch
        while step := list(itertools.islice(units, each * self.num_replicas)):
            if len(step) == each * self.num_replicas:
                yield [*itertools.chain.from_iterable(step[self.rank * each : (self.rank + 1) * each])]
            elif not self.drop_last:
                yield self._share_out(step)[self.rank]

    def _share_out(self, units: list[list[Any]]) -> list[list[Any]]:
        """Divide the last units of an epoch, which are too few for a batch on each rank: return the keys of each."""
        return share_out(units, self.num_replicas)

    def _cursor_after(self, items: int) -> dict[str, int]:
        run, unit = self._run, items * self._units_per_batch * self.num_replicas
        if unit > run.ends[-1]:  # more than was planned: plan on, and leave the run itself as it is
            run = copy.deepcopy(run)
            for _ in self._units(run):
                if unit <= run.ends[-1]:
                    break
        passed = bisect_right(run.ends, unit) - 1  # windows
        within = unit - run.ends[passed] if passed < len(run.ends) - 1 else 0
        return {"window": run.start["window"] + passed, "unit": within + (0 if passed else run.start["unit"])}

    def _left(self, cursor: Mapping[str, int]) -> int | None:
        asked = self.epoch, dict(cursor)
        if self._counted is None or self._counted[0] != asked:
            windows = self._windows()
            if windows.count is None:
                return None
            planned = (self._plan_at(windows, number) for number in range(cursor["window"], windows.count))
            self._counted = asked, sum(map(len, planned)) - cursor["unit"]
        whole, left = divmod(self._counted[1], self._units_per_batch * self.num_replicas)
        return whole + (left > 0 and not self.drop_last)

    def _windows(self) -> Windows:
        """Return the windows of the epoch that is set."""
        if self.sampler is not None:
            order = self.sampler.order()
        else:
            own = ElasticSampler(self.lengths.count, 1, 0, self.shuffle, self.seed)
            own.set_epoch(self.epoch)
            order = own.order()
        return Windows(order, self.window, self._samples_per_unit, self._least_windows, drop_last=self.drop_last)

    def _plan_at(self, windows: Windows, number: int) -> list[list[Any]]:
        return self._plan(windows.indices(number), self.seed, self.epoch, number)

    def _units(self, run: Run) -> Iterator[list[Any]]:
        """Plan the next windows of a run, and yield the keys of each unit."""
        windows, first = self._windows(), run.start["window"] - 1
        while windows.count is None or first + len(run.ends) < windows.count:
            plan = self._plan_at(windows, first + len(run.ends))
            if len(run.ends) == 1:
                plan = plan[run.start["unit"] :]
            run.ends.append(run.ends[-1] + len(plan))
            yield from plan


class Windows:
    """An order in windows: as many as it takes, all alike in size, or of the size that is given if there is no end.

    Args:
        order: The order.
        size: The most samples of a window.
        multiple: Windows have a multiple of so many samples, at least once that; the last one has the rest as well.
        least: How many windows there are at least, as far as there are samples for so many.
        drop_last: Leave that rest out.
    """

    def __init__(self, order: Order, size: int, multiple: int = 1, least: int = 1, *, drop_last: bool = False) -> None:
        self.order = order
        self._multiple = multiple
        most = max(1, size // multiple)
        if order.length is None:
            self.count, self._end, self._shape = None, ENDLESS, (most, 1)
        else:
            pieces = order.length // multiple if drop_last else -(-order.length // multiple)
            self.count = max(-(-pieces // most), min(least, pieces))
            self._end, self._shape = min(order.length, pieces * multiple), (pieces, self.count)

    def indices(self, number: int) -> NDArray[np.int64]:
        """Return the indices in a window."""
        return self.order.indices_at(np.arange(self.begin(number), self.begin(number + 1)))

    def begin(self, number: int) -> int:
        """Return the position at which a window begins."""
        pieces, windows = self._shape
        return min(number * pieces // windows * self._multiple, self._end)

    def number_of(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the windows that positions are in."""
        pieces, windows = self._shape
        return ((positions // self._multiple + 1) * windows - 1) // pieces


def share_out(units: list[list[Any]], ranks: int) -> list[list[Any]]:
    """Divide the last units of an epoch among ranks: whole ones, or parts of them where there are too few.

    Where there are fewer samples than ranks, some come to several.
    """
    units = list(units)
    while len(units) < ranks:
        longest = max(range(len(units)), key=lambda unit: len(units[unit]))
        keys = units[longest]
        if len(keys) == 1:
            break
        units[longest : longest + 1] = [keys[: len(keys) // 2], keys[len(keys) // 2 :]]
    if len(units) < ranks:
        return [units[rank % len(units)] for rank in range(ranks)]
    bounds = [rank * len(units) // ranks for rank in range(ranks + 1)]
    return [[*itertools.chain.from_iterable(units[first:last])] for first, last in itertools.pairwise(bounds)]
