"""Pack: samples put together into blocks that they fill, out of a window, under one budget or several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import gt, index
from typing import Any, Literal

import numpy as np

from asyncloader.checks import one_of
from asyncloader.errors import ConfigurationError
from asyncloader.samplers.ordered import count_of
from asyncloader.samplers.pack_collate import Block
from asyncloader.streams.stream import Mark, Reading, State, Stream
from asyncloader.streams.window import Waiting, Windowed

TooLong = Literal["raise", "drop", "cut"]


class Pack(Windowed[Block]):
    """Stream blocks of samples that fit together, filled as well as a window of samples allows.

    A block begins with the sample that has waited longest. Then, again and again, that one of the window is added which
    takes most of what is left: of all budgets together, each weighted by its room ("dot product" packing; under one
    budget that is the longest sample that fits). Nothing is lost at the end of an epoch.

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
        self._begun: dict[tuple[int, ...], int] = {}  # how much was given of samples that were given in part

    # -------------------------------------------------------------------------------------------------------- reading

    def begin(self, reading: Reading, state: State | None) -> None:
        """Begin to read."""
        super().begin(reading, state)
        self._begun = {} if state is None else {tuple(place): start for *place, start in state["begun"]}
        self._costs = [np.empty(0, np.int64)] * len(self.budgets)  # of the samples that have been looked at, by budget

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

    def add(self, sample: Any, mark: Mark) -> None:
        """Put a sample into the window; the rest of one that was given in part, in front."""
        try:
            super().add(sample, mark)
        except _TooLongError:
            if self.too_long == "drop":
                return
            raise
        if self._begun and (start := self._begun.get(self._place(mark))):
            self._window.insert(0, self._window.pop()._replace(start=start))

    def take(self) -> tuple[Block, Mark]:
        """Return a block, and for each of its samples the mark, and where it was cut."""
        self.fill()
        places = self._in_order() if self.split else self._fitting()
        if not self._cuts:
            chosen = self.pop(places)
            return Block(each.sample for each in chosen), [(each.mark, None) for each in chosen]
        block, marks, room = Block(), [], self._capacity[0]
        rest: list[Waiting] = []
        for place in places:
            each = self._window[place]
            stop = min(each.cost[0], each.start + room)
            block.append(self._part(place, each.start, stop))
            room -= stop - each.start
            if stop == each.cost[0]:
                marks.append((each.mark, None))
            else:
                marks.append((each.mark, stop))
                rest = [each._replace(start=stop)]
        self.pop(places)
        self._window[:0] = rest
        return block, marks

    def _part(self, place: int, start: int, stop: int) -> Any:
        """Return a part of a sample in the window. If it cannot be cut, the sample counts as given."""
        sample, mark, costs, _ = self._window[place]
        if (start, stop) == (0, costs[0]):
            return sample
        try:
            return self.cut(sample, start, stop)
        except Exception as error:
            del self._window[place]
            self._begun.pop(self._place(mark), None)
            self.stream.fail(error, mark)

    def _in_order(self) -> range:
        """Return the places of the samples that fill a block, of which the last one may be cut."""
        room, count = self._capacity[0], 0
        while room > 0 and count < len(self._window):
            room -= self._window[count].cost[0] - self._window[count].start
            count += 1
        return range(count)

    def _fitting(self) -> list[int]:
        """Return the places of samples that fill a block: of the first one, and of those that fit best."""
        window, room = self._window, [*self._capacity]
        new = window[len(self._costs[0]) :]
        self._costs = [np.append(own, [each.cost[b] for each in new]) for b, own in enumerate(self._costs)]
        costs = [own.copy() for own in self._costs]
        if self._cuts:
            costs = [np.minimum([each.cost[0] - each.start for each in window], room[0])]
        places, chosen, best = np.arange(len(window)), [], 0
        while True:
            chosen.append(int(places[best]))
            for b, own in enumerate(costs):
                room[b] -= int(own[best])
                own[best] = self._capacity[b] + 1  # it does not fit again
            fits = costs[0] <= room[0]
            for own, left in zip(costs[1:], room[1:], strict=True):
                fits &= own <= left
            places, costs = places[fits], [own[fits] for own in costs]  # nothing that is too large now fits later
            if not len(places):
                self._costs = [np.delete(own, chosen) for own in self._costs]
                return sorted(chosen)
            scores = [own * (left / most**2) for own, left, most in zip(costs, room, self._capacity, strict=True)]
            best = int(sum(scores[1:], scores[0]).argmax())

    # --------------------------------------------------------------------------------------------------------- states

    def give(self, mark: Mark) -> None:
        """Note that a block was given."""
        for each, stop in mark:
            if stop is None:
                self._note_given(each)
            else:
                self._begun[self._place(each)] = stop

    def _note_given(self, mark: Mark) -> None:
        if self._begun:
            self._begun.pop(self._place(mark), None)
        self.stream.give(mark)

    def _place(self, mark: Mark) -> tuple[int, ...]:
        (place,) = self.stream.sources(mark)
        return place

    def state(self) -> State:
        """Return how much was given of samples that were given in part."""
        return {**super().state(), "begun": [[*place, start] for place, start in self._begun.items()]}

    def merged(self, states: Sequence[State]) -> State:
        """Return what any of several readers has given."""
        begun: dict[tuple[int, ...], int] = {}
        for state in states:
            for *place, start in state["begun"]:
                begun[tuple(place)] = max(start, begun.get(tuple(place), 0))
        return {**super().merged(states), "begun": [[*place, start] for place, start in begun.items()]}

    def sources(self, mark: Mark) -> Iterator[tuple[Any, ...]]:
        """Yield what tells samples apart."""
        return super().sources([each for each, _ in mark])


class _TooLongError(ValueError):
    """A sample exceeds a budget."""


def _slice(sample: Any, start: int, stop: int) -> Any:
    """Return a part of a row, or of each row of a dictionary that is as long as its longest one."""
    if not isinstance(sample, Mapping):
        return sample[start:stop]
    lengths = {name: len(row) for name, row in sample.items() if hasattr(row, "__len__") and not isinstance(row, str)}
    length = len(sample["input_ids"]) if "input_ids" in lengths else max(lengths.values(), default=0)
    return {name: row[start:stop] if lengths.get(name) == length else row for name, row in sample.items()}
