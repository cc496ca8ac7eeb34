"""Mix: samples of several streams, in shares that are exact, of samples or of what they cost.

    position      0 1 2 3 4 5 6 7 8 9 ...
    stream        a b a a c a b a a b ...      whichever has used least of its share so far

Each position has a stream. A state has which positions were given, and of those beyond the first one that was not,
their streams and costs; what streams have used before that; and the states of the streams. That is enough to find the
stream of any position again: the choices depend on what came before, and on nothing random.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeVar

from asyncloader.checks import one_of
from asyncloader.errors import ConfigurationError, StateMismatchError
from asyncloader.samplers.mixture import stages_of
from asyncloader.streams.stream import Mark, Reading, State, Stream, check_kinds

T_co = TypeVar("T_co", covariant=True)
Stop = Literal["first", "all"]
Weights = Sequence[float]


class Mix(Stream[T_co]):
    """Stream the samples of several streams, each with its share.

    Shares are exact: of the samples so far, each stream has given its part, but for one sample; with `by`, its part of
    what they cost. A stream that has ended is left out, or ends the epoch.

    At a resume, streams may be added at the end of the list, and weights may be others: what has been given stays so.

    Args:
        streams: Give the samples.
        weights: The weight of each stream: numbers of 0 or more, not all 0. Or a list of pairs ``(step, weights)``, of
            which each holds from that sample of the epoch on, counted over all workers and ranks, as if all were
            equally fast. A stream of weight 0 gives nothing.
        stop: "all": a stream that has ended is left out, until all have. "first": the first one that ends, ends the
            epoch.
        by: The cost of a sample, a number of 0 or more: shares are shares of cost. Where samples of one stream are
            longer than those of another, ``by=len`` gives shares of tokens; without it they are of samples.

    Raises:
        ConfigurationError: for what cannot work.

    Example:
        >>> from asyncloader.streams import ShardedStream
        >>> long, short = (ShardedStream([[text] * 9], lambda shard, start: shard[start:]) for text in ("aaaa", "b"))
        >>> samples = iter(Mix([long, short], [0.5, 0.5], by=len))
        >>> "".join(next(samples) for _ in range(7))
        'aaaabbbbaaaab'
    """

    def __init__(
        self,
        streams: Sequence[Stream[T_co]],
        weights: Weights | Sequence[tuple[int, Weights]],
        *,
        stop: Stop = "all",
        by: Callable[[T_co], float] | None = None,
    ) -> None:
        super().__init__()
        self.streams = [*streams]
        if not self.streams or not all(isinstance(stream, Stream) for stream in self.streams):
            raise ConfigurationError(f"streams should be a list of parts of asyncloader.streams: {streams!r}")
        if len(set(map(id, self.streams))) < len(self.streams):
            raise ConfigurationError("streams should differ: each has one position")
        one_of("stop", stop, Stop)
        self.stop, self.by, self.num_replicas = stop, by, self.streams[0].num_replicas
        self.weights = _checked(weights, len(self.streams))
        self._left: list[int] = []  # streams that have not ended

    # -------------------------------------------------------------------------------------------------------- reading

    def begin(self, reading: Reading, state: State | None) -> None:
        """Begin to read."""
        known = _ANEW if state is None else state
        within = [*known["streams"], *[None] * (len(self.streams) - len(known["streams"]))]
        if state is not None:
            check_kinds(self, [state])
        if len(within) > len(self.streams):
            advice = "Leave a stream that is wanted no more in its place, with weight 0."
            raise StateMismatchError("the number of streams", len(within), len(self.streams), advice)
        for stream, own in zip(self.streams, within, strict=True):
            stream.begin(reading, own)
        self._before: int = known["before"]  # samples before this reading, of all workers and ranks
        self._low: int = known["low"]  # the first position that was not given
        self._beyond = {position: (number, cost) for position, number, cost in known["beyond"]}  # given behind it
        self._known = dict(self._beyond)  # positions that this reading leaves out when it comes to them
        self._num_workers = reading.num_workers
        self._used_below, self._used = (_Used(self, self._low, known["used"], known["weights"]) for _ in range(2))
        self._left = [*range(len(self.streams))]
        self._position = self._low

    def step(self, position: int) -> int:
        """Return about which sample a position is, of all workers and ranks."""
        return self._before + position * self._num_workers * self.num_replicas

    def take(self) -> tuple[T_co, Mark]:
        """Return the next sample of the stream that has used least of its share."""
        while (known := self._known.pop(self._position, None)) is not None:
            self._used.add(*known)
            self._position += 1
        while (number := self._used.least(self._left)) is not None:
            try:
                sample, mark = self.streams[number].take()
            except StopIteration:
                self._left = [] if self.stop == "first" else [each for each in self._left if each != number]
                continue
            cost = 1 if self.by is None else self._cost_of(sample, number, mark)
            position = self._position
            self._used.add(number, cost)
            self._position += 1
            return sample, (position, number, cost, mark)
        if self._left and self.stop == "all" and self._used.has_more(self._left):
            raise ConfigurationError(
                f"streams that have weights at a later step never get there: all that have weights now have ended "
                f"(at about step {self.step(self._position)})"
            )
        raise StopIteration

    def _cost_of(self, sample: Any, number: int, mark: Mark) -> float:
        assert self.by is not None
        try:
            cost = float(self.by(sample))
            if not (0 <= cost < math.inf):
                raise ValueError(f"the cost of a sample should be a number of 0 or more, but is {cost!r}")
        except Exception as error:
            self.streams[number].fail(error, mark)
        return cost

    def give(self, mark: Mark) -> None:
        """Note that a sample was given."""
        position, number, cost, within = mark
        self.streams[number].give(within)
        self._beyond[position] = (number, cost)
        while (known := self._beyond.pop(self._low, None)) is not None:
            self._used_below.add(*known)
            self._low += 1

    # --------------------------------------------------------------------------------------------------------- states

    def state(self) -> State:
        """Return which positions were given, and the states of the streams."""
        below = self._used_below
        return {
            "kind": type(self).__name__,
            "streams": [stream.state() for stream in self.streams],
            "before": self._before,
            "low": self._low,
            "used": [*below.used],
            "weights": [*below.weights],
            "beyond": [[position, *known] for position, known in sorted(self._beyond.items())],
        }

    def merged(self, states: Sequence[State]) -> State:
        """Return a state in which shares begin anew, for what is left of the streams."""
        check_kinds(self, states)
        numbers = [len(state["streams"]) for state in states]
        if len({*numbers}) > 1 or numbers[0] > len(self.streams):
            raise StateMismatchError("the number of streams", numbers, len(self.streams))
        within = zip(*(state["streams"] for state in states), strict=True)
        merged = [stream.merged(own) for stream, own in zip(self.streams, within, strict=False)]
        given = sum(state["low"] + len(state["beyond"]) for state in states)
        before = max(state["before"] for state in states) + given
        return {**_ANEW, "kind": type(self).__name__, "streams": merged, "before": before}

    def sources(self, mark: Mark) -> Iterator[tuple[Any, ...]]:
        """Yield what tells samples apart."""
        _, number, _, within = mark
        return ((number, *place) for place in self.streams[number].sources(within))

    @property
    def keeps_order(self) -> bool:
        """Whether samples may be given in another order."""
        return all(stream.keeps_order for stream in self.streams)


_ANEW: State = {"streams": [], "before": 0, "low": 0, "used": [], "weights": [], "beyond": []}
"""A state of the beginning."""


class _Used:
    """What streams have used of their shares up to a position, since the weights hold that hold there.

    Args:
        mix: Has the weights.
        position: The position.
        used: What each stream had used there.
        weights: By which weights. If others hold now, shares begin anew.

    Attributes:
        weights: Those that hold.
    """

    def __init__(self, mix: Mix[Any], position: int, used: Sequence[float], weights: Weights) -> None:
        self._mix, self._position = mix, position
        self.used: list[float]
        self._find_stage()
        if [*weights] == self.weights:
            self.used = [*used]

    def _find_stage(self) -> None:
        stages = self._mix.weights
        step = self._mix.step(self._position)
        self._stage = max(index for index, (start, _) in enumerate(stages) if start <= step)
        self.weights = stages[self._stage][1]
        self._is_last = self._stage + 1 == len(stages)
        self.used = [0] * len(self._mix.streams)

    def add(self, number: int, cost: float) -> None:
        """Go on by one position, which a stream has used."""
        self.used[number] += cost
        self._position += 1
        if not self._is_last and self._mix.weights[self._stage + 1][0] <= self._mix.step(self._position):
            self._find_stage()

    def has_more(self, numbers: Sequence[int]) -> bool:
        """Whether some streams have weights at a later step."""
        return any(own[number] for _, own in self._mix.weights[self._stage + 1 :] for number in numbers)

    def least(self, numbers: Sequence[int]) -> int | None:
        """Return which of some streams has used least of its share; None if none has one."""
        weights, used = self.weights, self.used
        return min((n for n in numbers if weights[n]), key=lambda n: used[n] / weights[n], default=None)


def _checked(weights: Any, count: int) -> list[tuple[int, list[float]]]:
    """Return from which sample on which weights hold."""
    stages = [(at, [*own]) for at, own in stages_of(weights)]
    for _, own in stages:
        if len(own) != count or not all(math.isfinite(each) and each >= 0 for each in own) or not sum(own):
            raise ConfigurationError(f"weights should be {count} numbers of 0 or more, not all 0, but are {own}")
    return stages
