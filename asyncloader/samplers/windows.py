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
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncloader.errors import ConfigurationError, StateMismatchError
from asyncloader.samplers.elastic import ElasticSampler
from asyncloader.samplers.lengths import Lengths, LengthsLike
from asyncloader.samplers.ordered import HasOrder, Order, ResumableSampler, check_state


class Units:
    """The samples of a window, unit by unit.

    Args:
        keys: The keys of all samples, unit after unit.
        sizes: How many samples each unit has.
    """

    def __init__(self, keys: list[Any], sizes: NDArray[np.int64]) -> None:
        self.all_keys = keys
        self._bounds = [0, *np.cumsum(sizes).tolist()]

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def keys(self, unit: int) -> list[Any]:
        """Return the keys of the samples in a unit."""
        return self.all_keys[self._bounds[unit] : self._bounds[unit + 1]]


class WindowedBatchSampler(ResumableSampler[list[Any]]):
    """Plans units window by window, and deals them out to ranks.

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

    def __init__(
        self,
        lengths: LengthsLike,
        sampler: HasOrder | None,
        *,
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
        self.lengths = Lengths(lengths, num_samples if num_samples is not None or not callable(lengths) else of_sampler)
        if of_sampler not in (None, self.lengths.count):
            raise ConfigurationError(
                f"there are {self.lengths.count} lengths, but the sampler is one of {of_sampler} samples"
            )
        self.window = count_of("window", window)
        self.shuffle = shuffle
        self.sampler = sampler
        self._units_per_batch = 1
        self._tokens = self._space = 0  # in what was planned so far
        self._num_units: tuple[int, int] | None = None  # the epoch, and how many it has

    def __repr__(self) -> str:
        place = "{window}:{unit}".format(**self._cursor())
        return f"<{type(self).__name__} rank {self.rank} of {self.num_replicas}, epoch {self.epoch}, {place}>"

    def __len__(self) -> int:
        """Return the batches of this rank in the whole epoch that is set. For that the whole epoch is planned, once.

        Raises:
            TypeError: if the epoch has no end.
        """
        if self._num_units is None or self._num_units[0] != self.epoch:
            windows = Windows(self._order(), self.window)
            if windows.count is None:
                raise TypeError(f"this {type(self).__name__} has no end, and so no length")
            self._num_units = (self.epoch, sum(len(self._plan_at(windows, n)) for n in range(windows.count)))
        return self._batches_of(self._num_units[1])

    def __iter__(self) -> Iterator[list[Any]]:
        run = self._run = _Run(self._resume_at)
        self._resume_at = (0, 0)
        units = self._units(run)
        first = self.rank * self._units_per_batch
        while step := list(itertools.islice(units, self._units_per_batch * self.num_replicas)):
            if len(step) == self._units_per_batch * self.num_replicas:
                mine = step[first : first + self._units_per_batch]
                batch = [key for plan, unit in mine for key in plan.keys(unit)]
            elif self.drop_last:
                return
            else:
                batch = _share_out([plan.keys(unit) for plan, unit in step], self.num_replicas)[self.rank]
            run.read += 1
            yield batch

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iterator is of; to be called before each. A state of another epoch is dropped."""
        super().set_epoch(epoch)
        inner: Any = self.sampler
        if inner is not None:
            inner.set_epoch(epoch)

    def state_after(self, batches: int) -> dict[str, Any]:
        """Return the state after so many batches of the newest iterator, counted on this rank."""
        run = self._run
        unit = batches * self._units_per_batch * self.num_replicas
        if unit > run.num_units:
            run = _Run(run.start, run.ends)
            for _ in self._units(run):
                if run.num_units >= unit:
                    break
        return self._state_at(run.cursor(unit))

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
            there._begin_at(None)
        windows, (window, unit) = Windows(there._order(), self.window), there._resume_at
        assert windows.count is not None
        return self._batches_of(sum(len(there._plan_at(windows, n)) for n in range(window, windows.count)) - unit)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iterator go on from a state, of whichever rank and number of ranks.

        Raises:
            StateMismatchError: if the state is of another sampler, lengths or order, or a later version.
        """
        check_state(state, self)
        inner: Any = self.sampler
        if (inner is None) != (state["sampler"] is None):
            was = state["sampler"] and state["sampler"].get("kind", "one")
            raise StateMismatchError("sampler", was, inner and type(inner).__name__)
        if inner is not None:
            inner.load_state_dict(state["sampler"])
        super().load_state_dict(state)
        self.lengths.say_what_is_compared()
        window, unit = self._resume_at
        if window or unit:  # a mixture is told what is past: there, its weights cannot be changed any more
            Windows(self._order(), self.window).look_before(window + (unit > 0))

    @abstractmethod
    def _plan(self, indices: NDArray[np.int64], *key: int) -> Units:
        """Plan the units of a window.

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
        """Return which share of the space that was planned so far are tokens; at first, one window is planned."""
        if not self._space:
            self._plan_at(Windows(self._order(), self.window), 0)
        return self._tokens / self._space

    @abstractmethod
    def _state_identity(self) -> dict[str, Any]:
        planned = {"lengths": self.lengths.identity, "window": self.window, "shuffle": self.shuffle}
        return {**super()._state_identity(), **planned}

    def _batches_of(self, units: int) -> int:
        """Return how many batches of this rank so many units make."""
        whole, left = divmod(units, self._units_per_batch * self.num_replicas)
        return whole + (left > 0 and not self.drop_last)

    def _order(self) -> Order:
        if self.sampler is not None:
            return self.sampler.order()
        own = ElasticSampler(self.lengths.count, 1, 0, self.shuffle, self.seed)
        own.set_epoch(self.epoch)
        return own.order()

    def _plan_at(self, windows: Windows, number: int) -> Units:
        return self._plan(windows.indices(number), self.seed, self.epoch, number)

    def _units(self, run: _Run) -> Iterator[tuple[Units, int]]:
        """Plan the next windows of a run, and yield each unit, as its window's plan and its number in that."""
        windows = Windows(self._order(), self.window)
        while windows.count is None or run.start[0] + len(run.ends) < windows.count:
            plan = self._plan_at(windows, run.start[0] + len(run.ends))
            begin = 0 if run.ends else run.start[1]
            run.add(len(plan))
            yield from ((plan, number) for number in range(begin, len(plan)))

    _resume_at: tuple[int, int]

    def _begin_at(self, cursor: dict[str, int] | None) -> None:
        self._resume_at = (0, 0) if cursor is None else (cursor["window"], cursor["unit"])
        self._run = _Run(self._resume_at)

    def _cursor(self) -> dict[str, int]:
        return self._run.cursor(self._run.read * self._units_per_batch * self.num_replicas)

    def _state_at(self, cursor: dict[str, int]) -> dict[str, Any]:
        inner: Any = self.sampler
        return {**super()._state_at(cursor), "sampler": None if inner is None else inner.state_dict()}


class Windows:
    """An order in windows: as many as it takes, all alike in size, or of the size that is given if there is no end."""

    def __init__(self, order: Order, size: int) -> None:
        self._order = order
        self._size = size
        self.length = order.length
        self.count = None if order.length is None else -(-order.length // size)

    def indices(self, number: int) -> NDArray[np.int64]:
        """Return the indices in a window."""
        return self._order.indices_at(np.arange(self.begin(number), self.begin(number + 1)))

    def look_before(self, number: int) -> None:
        """Look at the last position before a window."""
        self._order.indices_at(np.array([self.begin(number) - 1]))

    def number_of(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the windows that positions are in."""
        if self.count is None or self._order.length is None:
            return positions // self._size
        return ((positions + 1) * self.count - 1) // self._order.length

    def begin(self, number: int) -> int:
        """Return the position at which a window begins."""
        if self.count is None or self._order.length is None:
            return number * self._size
        return number * self._order.length // self.count


class _Run:
    """One iterator: the window and unit where it began, how many units its windows have, and what was read of it.

    Attributes:
        ends: For each window that was planned, up to which unit the run is at its end.
        read: Batches.
    """

    def __init__(self, start: tuple[int, int], ends: Sequence[int] = ()) -> None:
        self.start = start
        self.ends = list(ends)
        self.read = 0

    @property
    def num_units(self) -> int:
        return self.ends[-1] if self.ends else 0

    def add(self, units: int) -> None:
        """Note how many units the next window has."""
        self.ends.append(self.num_units + units if self.ends else units - self.start[1])

    def cursor(self, unit: int) -> dict[str, int]:
        """Return window and unit where the run is after so many units, or at its end."""
        window = bisect_right(self.ends, unit)
        first, begin = self.start
        if window == len(self.ends):
            return {"window": first + window, "unit": 0 if window else begin}
        return {"window": first + window, "unit": unit - (self.ends[window - 1] if window else -begin)}


def _share_out(units: list[list[Any]], ranks: int) -> list[list[Any]]:
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


def count_of(name: str, value: Any) -> int:
    """Return a number that counts something.

    Raises:
        ConfigurationError: if it does not.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ConfigurationError(f"{name} should be an integer of at least 1, but got {value!r}")
    return int(value)
