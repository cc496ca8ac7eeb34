"""Pack: samples put together into blocks that they fill, out of a window, under one budget or several."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from operator import gt, index
from typing import Any, Literal

import numpy as np

from asyncloader.checks import one_of
from asyncloader.errors import ConfigurationError
from asyncloader.samplers.ordered import count_of
from asyncloader.samplers.pack_collate import Block
from asyncloader.streams.stream import Mark, Reading, Stream, source_of
from asyncloader.streams.window import Waiting, Windowed

TooLong = Literal["raise", "drop", "cut"]


class Pack(Windowed[Block]):
    """Stream blocks of samples that fit together, filled as well as a window of samples allows.

    A block begins with the samples that have waited longest, for up to half of it. Then, again and again, that one
    of the window is added which takes most of what is left: of all budgets together, each weighted by its room ("dot
    product" packing; under one budget that is the longest sample that fits). Nothing is lost at the end of an epoch.

    A block is a list of samples. :func:`~asyncloader.samplers.pack_collate` lays blocks out as tensors: tokens,
    position ids, document ids, `cu_seqlens`.

    Args:
        stream: Gives the samples.
        budgets: What a block holds at most, by name: ``{"tokens": 8192, "images": 16}``.
        lengths: What a sample takes of each budget, by name; under one budget, the number.
        window: Of how many samples at once a block is chosen.
        too_long: For samples that exceed a budget: "raise"; "drop", which counts them as given; or, under one budget,
            "cut", which gives them in parts.
        split: Under one budget: fill each block to its end, by samples in their order. The last one is cut, and its
            rest begins the next block.
        cut: ``cut(sample, start, stop)`` returns a part of a sample, in units of the budget. By default that is a
            slice, or of a dictionary the slices of all rows that are as long as the sample.

    Raises:
        ConfigurationError: for what cannot work.
        ValueError: while iterating, for a sample that exceeds a budget, with ``too_long="raise"``.

    Example:
        >>> from asyncloader.streams import ShardedStream
        >>> words = ["aaaa", "bbb", "cc", "d", "eeeee"]
        >>> stream = ShardedStream([words], lambda shard, start: shard[start:])
        >>> [*Pack(stream, {"letters": 5}, len)]
        [['aaaa', 'd'], ['bbb', 'cc'], ['eeeee']]
    """

    budgets: dict[str, int]
    lengths: Callable[[Any], Mapping[str, int] | int]
    split: bool
    cut: Callable[[Any, int, int], Any]

    def __init__(
        self,
        stream: Stream[Any],
        budgets: Mapping[str, int],
        lengths: Callable[[Any], Mapping[str, int] | int],
        *,
        window: int = 1000,
        too_long: TooLong = "raise",
        split: bool = False,
        cut: Callable[[Any, int, int], Any] | None = None,
    ) -> None:
        super().__init__(stream, window)
        if not isinstance(budgets, Mapping) or not budgets:
            raise ConfigurationError(f'budgets should be numbers by name, as in {{"tokens": 8192}}, but is {budgets!r}')
        self.budgets = {name: count_of(f"the budget {name!r}", budget) for name, budget in budgets.items()}
        if not callable(lengths):
            raise ConfigurationError(f"lengths should be a function of a sample, but is {lengths!r}")
        one_of("too_long", too_long, TooLong)
        self._cuts = split or too_long == "cut"
        if self._cuts and len(self.budgets) > 1:
            raise ConfigurationError(f"samples can be cut under one budget, and there are {[*self.budgets]}")
        self.lengths, self.too_long, self.split = lengths, too_long, split
        self.cut = _slice if cut is None else cut
        self._capacity = [*self.budgets.values()]

    # -------------------------------------------------------------------------------------------------------- reading

    def begin(self, reading: Reading, state: Any) -> None:
        """Begin to read."""
        super().begin(reading, state)
        # How much was given of samples that were given in part.
        self._cut_at: dict[Any, int] = (
            {} if state is None else {(tuple(path), *place): start for path, *place, start in state}
        )
        self._by_cost: list[tuple[int, int]] = []  # costs in the window, and their numbers below 0
        self._costs = [np.empty(0, np.int64)] * len(self.budgets)  # those in the window that were looked at, by budget
        self._is_sorted = len(self.budgets) == 1 and not self.split

    def cost_of(self, sample: Any) -> list[int]:
        """Return what a sample takes of each budget."""
        found = self.lengths(sample)
        costs = [found[name] for name in self.budgets] if isinstance(found, Mapping) else [found]
        costs = [*map(index, costs)]
        if len(costs) != len(self.budgets) or min(costs) < 0:
            raise ValueError(f"lengths should return a number of 0 or more for each of {[*self.budgets]}, not {found}")
        if not self._cuts and any(map(gt, costs, self._capacity)):
            raise _TooLongError(
                f"a sample takes {dict(zip(self.budgets, costs, strict=True))}, and a block holds {self.budgets}: give "
                'larger budgets, or too_long="drop", or "cut" under one budget'
            )
        return costs

    def refuse(self, error: Exception, mark: Mark) -> None:
        """Raise the error of a sample, unless it is to be dropped."""
        if self.too_long == "drop" and isinstance(error, _TooLongError):
            self.streams[0].give(mark)
        else:
            super().refuse(error, mark)

    def add(self, waiting: Waiting) -> None:
        """Put a sample into the window, or the rest of one that was given in part."""
        if self._cut_at:
            waiting = waiting._replace(start=self._cut_at.get(source_of(waiting.mark), 0))
        self._put(self._count, waiting)
        self._count += 1

    def _put(self, number: int, waiting: Waiting) -> None:
        self._window[number] = waiting
        if self._is_sorted:
            insort(self._by_cost, (waiting.cost[0] - waiting.start, -number))

    def take(self) -> tuple[Block, Mark]:
        """Return a block, and for each of its samples where it was cut, and the mark."""
        self.fill()
        chosen = self._longest() if self._is_sorted else self._in_order() if self.split else self._fitting()
        block, marks, room, window = Block(), [], self._capacity[0], self._window
        for number in chosen:
            sample, mark, costs, start = window[number]
            stop = min(costs[0], start + room)
            room -= stop - start
            block.append(sample if stop - start == costs[0] else self._part(number, start, stop))
            marks.append((None if stop == costs[0] else stop, mark))
        for number, (cut_at, _) in zip(chosen, marks, strict=True):
            if cut_at is None:
                del window[number]
            else:
                self._put(number, window[number]._replace(start=cut_at))
        return block, marks

    def _part(self, number: int, start: int, stop: int) -> Any:
        """Return a part of a sample in the window. If it cannot be cut, the sample counts as given."""
        try:
            return self.cut(self._window[number].sample, start, stop)
        except Exception as error:
            bad = self._window.pop(number)
            self._by_cost = sorted((each.cost[0] - each.start, -number) for number, each in self._window.items())
            self.fail(error, [(None, bad.mark)])

    def _in_order(self) -> list[int]:
        """Return the first samples of the window that fill a block, of which the last one may be cut."""
        room, chosen = self._capacity[0], []
        for number, each in self._window.items():
            if room <= 0:
                break
            room -= each.cost[0] - each.start
            chosen.append(number)
        return chosen

    def _oldest(self) -> list[int]:
        """Return the samples that have waited longest, up to half of a block; the first one in any case.

        Otherwise short ones would wait for a thousand blocks, and a state has all that was given meanwhile.
        """
        used, chosen = [0] * len(self._capacity), list[int]()
        for number, each in self._window.items():
            used = [own + cost - each.start for own, cost in zip(used, each.cost, strict=True)]
            if chosen and any(2 * own > most for own, most in zip(used, self._capacity, strict=True)):
                break
            chosen.append(number)
        return chosen

    def _longest(self) -> list[int]:
        """Return the oldest samples, and again and again the longest one that fits; under one budget."""
        by_cost, room, chosen = self._by_cost, self._capacity[0], self._oldest()
        for number in chosen:
            each = self._window[number]
            cost, _ = by_cost.pop(bisect_left(by_cost, (each.cost[0] - each.start, -number)))
            room -= cost
        while (place := bisect_left(by_cost, (room, 1)) - 1) >= 0:
            cost, number = by_cost.pop(place)
            chosen.append(-number)
            room -= cost
        return sorted(chosen)

    def _fitting(self) -> list[int]:
        """Return the oldest samples, and again and again the one that fits best; under several budgets."""
        numbers = [*self._window]
        new = [self._window[number].cost for number in numbers[len(self._costs[0]) :]]
        costs = self._costs = [np.append(own, [each[b] for each in new]) for b, own in enumerate(self._costs)]
        chosen = [*range(len(self._oldest()))]
        room = [most - int(own[chosen].sum()) for most, own in zip(self._capacity, costs, strict=True)]
        places = np.arange(len(numbers))
        is_left = places >= len(chosen)
        while True:
            for own, left in zip(costs, room, strict=True):
                is_left &= own <= left
            places, costs = places[is_left], [own[is_left] for own in costs]  # nothing that is too large now fits later
            if not len(places):
                self._costs = [np.delete(own, chosen) for own in self._costs]
                return sorted(numbers[place] for place in chosen)
            scores = [own * (left / most**2) for own, left, most in zip(costs, room, self._capacity, strict=True)]
            best = int(sum(scores[1:], scores[0]).argmax())
            chosen.append(int(places[best]))
            room = [left - int(own[best]) for left, own in zip(room, costs, strict=True)]
            is_left = np.arange(len(places)) != best

    # --------------------------------------------------------------------------------------------------------- states

    def give(self, mark: Mark) -> None:
        """Note that a block was given."""
        for cut_at, each in mark:
            if cut_at is not None:
                self._cut_at[source_of(each)] = cut_at
                continue
            if self._cut_at:
                self._cut_at.pop(source_of(each), None)
            self.streams[0].give(each)

    def state(self) -> list[Any]:
        """Return how much was given of samples that were given in part."""
        return [[[*path], *place, start] for (path, *place), start in self._cut_at.items()]

    def merged(self, states: Sequence[Any]) -> list[Any]:
        """Return what any of several readers has given."""
        begun: dict[Any, int] = {}
        for path, *place, start in (each for state in states for each in state):
            key = (tuple(path), *place)
            begun[key] = max(start, begun.get(key, 0))
        return [[[*path], *place, start] for (path, *place), start in begun.items()]


class _TooLongError(ValueError):
    """A sample exceeds a budget."""


def _slice(sample: Any, start: int, stop: int) -> Any:
    """Return a part of a row, or of each row of a dictionary that is as long as its longest one."""
    if not isinstance(sample, Mapping):
        return sample[start:stop]
    lengths = {name: len(row) for name, row in sample.items() if hasattr(row, "__len__") and not isinstance(row, str)}
    length = len(sample["input_ids"]) if "input_ids" in lengths else max(lengths.values(), default=0)
    return {name: row[start:stop] if lengths.get(name) == length else row for name, row in sample.items()}
