"""Pack: samples put together into blocks that they fill, out of a window, under one budget or several."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from math import prod
from operator import gt, index, le, length_hint, mul, sub
from typing import Any, Literal

from asyncloader.checks import one_of
from asyncloader.errors import ConfigurationError
from asyncloader.samplers.ordered import count_of
from asyncloader.samplers.pack_collate import Block
from asyncloader.streams.stream import Mark, Reading, Stream, asked, function_of
from asyncloader.streams.window import Waiting, Windowed

TooLong = Literal["raise", "drop", "cut"]
_MOST_MISSES = 128
"""A block is full when so many samples did not fit: under several budgets, more of them fill a block by 0.3 % more."""


def _slice(sample: Any, start: int, stop: int) -> Any:
    """Return a part of a row of tokens, or of all rows of a dictionary that are as long as its "input_ids"."""
    if not isinstance(sample, Mapping):
        return sample[start:stop]
    length = len(sample["input_ids"])
    is_row = {name: length_hint(row, -1) == length and not isinstance(row, str) for name, row in sample.items()}
    return {name: row[start:stop] if is_row[name] else row for name, row in sample.items()}


class Pack(Windowed[Block]):
    """Stream blocks of samples that fit together, filled as well as a window of samples allows.

    A block begins with the samples that have waited longest, for up to half of it. Then, again and again, the longest
    one of the window is added that fits; under several budgets that is the one that takes most of all of them together.
    Nothing is lost at the end of an epoch.

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
            slice, or of a dictionary the slices of all rows that are as long as its "input_ids".

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
        cut: Callable[[Any, int, int], Any] = _slice,
    ) -> None:
        super().__init__(stream, window)
        if not isinstance(budgets, Mapping) or not budgets:
            raise ConfigurationError(f'budgets should be numbers by name, as in {{"tokens": 8192}}, but is {budgets!r}')
        self.budgets: dict[str, int] = {
            name: count_of(f"the budget {name!r}", budget) for name, budget in budgets.items()
        }
        one_of("too_long", too_long, TooLong)
        self._may_cut = split or too_long == "cut"
        if self._may_cut and len(self.budgets) > 1:
            raise ConfigurationError(f"samples can be cut under one budget, and there are {[*self.budgets]}")
        self._lengths, self.too_long = function_of("lengths", lengths), too_long
        self.split: bool = split
        self._cut = cut
        # A sample costs one budget more, of which the others are equal shares: that is its size.
        most = prod(self.budgets.values())
        self._weights = [most // each for each in self.budgets.values()]
        self._capacity = [most * len(self.budgets), *self.budgets.values()]

    # -------------------------------------------------------------------------------------------------------- reading

    def begin(self, reading: Reading, states: Sequence[Any]) -> None:
        """Begin to read."""
        super().begin(reading, states)
        self._by_size: list[tuple[int, int]] = []  # sizes of those in the window, and their numbers below 0

    def cost_of(self, sample: Any) -> list[int] | None:
        """Return the size of a sample, and what it takes of each budget; None if it is too long, and to be dropped."""
        found = self._lengths(sample)
        costs = [found[name] for name in self.budgets] if isinstance(found, Mapping) else [found]
        costs = [*map(index, costs)]
        if len(costs) != len(self.budgets) or min(costs) < 0:
            raise ValueError(f"lengths should return a number of 0 or more for each of {[*self.budgets]}, not {found}")
        if not self._may_cut and any(map(gt, costs, self.budgets.values())):
            if self.too_long == "drop":
                return None
            raise ValueError(
                f"a sample takes {dict(zip(self.budgets, costs, strict=True))}, and a block holds {self.budgets}: give "
                'larger budgets, or too_long="drop", or "cut" under one budget'
            )
        return [sum(map(mul, costs, self._weights)), *costs]

    def put(self, number: int, waiting: Waiting) -> None:
        """Put a sample into the window, or what is left of it."""
        shard, place = waiting.mark[0]
        if not waiting.start and (start := shard.cut.get(place, 0)):  # a part was given before this reading
            waiting = waiting._replace(cost=[cost - start for cost in waiting.cost], start=start)
        super().put(number, waiting)
        insort(self._by_size, (waiting.cost[0], -number))

    def take(self) -> tuple[Block, float, Mark]:
        """Return a block. A sample that is cut begins the next one: it is the oldest one of the window."""
        self.fill()
        window, by_size, room = self._window, [*self._by_size], self._capacity[0]
        block, notes, rest = Block(), list[Any](), None
        chosen = sorted(self._choose(by_size))
        for number in chosen:
            each = window[number]
            taken = min(each.cost[0], room)
            stop, is_whole = each.start + taken, taken == each.cost[0]
            block.append(each.sample if is_whole and not each.start else self._part(number, stop))
            if is_whole:
                notes += each.mark
            else:  # the last one
                shard, place = each.mark[0]
                notes.append((shard, (place, stop)))
                rest = each._replace(cost=[cost - taken for cost in each.cost], start=stop)
            room -= taken
        for done in chosen[:-1] if rest else chosen:
            del window[done]
        self._by_size = by_size
        if rest:
            self.put(number, rest)  # where it was
        return block, 0, tuple(notes)

    def _choose(self, by_size: list[tuple[int, int]]) -> list[int]:
        """Take the samples of a block out of the order of sizes, and return their numbers.

        First those that have waited longest, up to half of a block: otherwise short ones would wait for a thousand
        blocks, and a state has all that was given meanwhile.
        """
        window, room, chosen = self._window, self._capacity, list[int]()
        for number, each in window.items():
            size = each.cost[0]
            would_fill = 2 * (room[0] - size) < self._capacity[0] or any(map(gt, each.cost, room))
            if chosen and (room[0] <= 0 if self.split else would_fill):
                break
            del by_size[bisect_left(by_size, (size, -number))]
            chosen.append(number)
            room = [*map(sub, room, each.cost)]
        at, misses = 0 if self.split else len(by_size), 0
        while misses < _MOST_MISSES and (at := bisect_left(by_size, (room[0], 1), 0, at) - 1) >= 0:
            _, number = by_size[at]
            cost = window[-number].cost
            if all(map(le, cost, room)):
                del by_size[at]
                chosen.append(-number)
                room = [*map(sub, room, cost)]
            else:
                misses += 1
        return chosen

    def _part(self, number: int, stop: int) -> Any:
        """Return a part of a sample in the window. If it cannot be cut, the sample counts as given."""
        each = self._window[number]
        try:
            return asked(lambda sample: self._cut(sample, each.start, stop), each.sample, each.mark)
        except Exception:
            del self._window[number]
            self._by_size.remove((each.cost[0], -number))
            raise
