"""Mix: samples of several streams, in shares that are exact, of samples or of what they cost.

    position      0 1 2 3 4 5 6 7 8 9 ...
    stream        a b a a c a b a a b ...      whichever has used least of its share so far

Each position has a stream. A state has which positions were given, and of those beyond the first one that was not,
their streams and costs; what streams have used before that; and the states of the streams. That is enough to find the
stream of any position again: the choices depend on what came before, and on nothing random.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

from asyncloader.checks import one_of
from asyncloader.errors import ConfigurationError
from asyncloader.samplers.mixture import stages_of
from asyncloader.streams.stream import Mark, Reading, State, Stream

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

    by: Callable[[T_co], float] | None

    def __init__(
        self,
        streams: Sequence[Stream[T_co]],
        weights: Weights | Sequence[tuple[int, Weights]],
        *,
        stop: Stop = "all",
        by: Callable[[T_co], float] | None = None,
    ) -> None:
        super().__init__(*streams)
        if not streams:
            raise ConfigurationError("streams should be a list of parts of asyncloader.streams, and there are none")
        one_of("stop", stop, Stop)
        self.stop, self.by = stop, by
        self.weights: list[tuple[int, list[float]]] = _checked(weights, len(streams))

    # -------------------------------------------------------------------------------------------------------- reading

    def begin(self, reading: Reading, state: State | None) -> None:
        """Begin to read."""
        state = state or _ANEW
        self._before: int = state["before"]  # samples before this reading, of all workers and ranks
        self._per_position = reading.num_workers * reading.num_replicas
        self._given = {position: (number, cost) for position, number, cost in state["beyond"]}  # behind `_shares_given`
        self._known = dict(self._given)  # positions that this reading leaves out when it comes to them
        # As of the next sample, and as of the first position that was not given.
        self._shares, self._shares_given = (_Shares(self, state["low"], state["used"], state["weights"]) for _ in "12")
        self._left = [*range(len(self.streams))]  # streams that have not ended

    def step(self, position: int) -> int:
        """Return about which sample a position is, of all workers and ranks."""
        return self._before + position * self._per_position

    def take(self) -> tuple[T_co, Mark]:
        """Return the next sample of the stream that has used least of its share."""
        shares = self._shares
        while (known := self._known.pop(shares.position, None)) is not None:
            shares.add(*known)
        while (number := shares.least(self._left)) is not None:
            try:
                sample, mark = self.streams[number].take()
            except StopIteration:
                self._left = [] if self.stop == "first" else [each for each in self._left if each != number]
                continue
            position, cost = shares.position, 1 if self.by is None else self._cost_of(sample, number, mark)
            shares.add(number, cost)
            return sample, (position, number, cost, mark)
        step = self.step(shares.position)
        if any(own[number] for at, own in self.weights if at > step for number in self._left):
            raise ConfigurationError(
                "streams that have weights at a later step never get there: all that have weights now have ended (at "
                f"about step {step})"
            )
        raise StopIteration

    def _cost_of(self, sample: Any, number: int, mark: Mark) -> float:
        try:
            cost = float(self.by(sample))  # type: ignore[misc]  # there is one
            if not (0 <= cost < math.inf):
                raise ValueError(f"the cost of a sample should be a number of 0 or more, but is {cost!r}")
        except Exception as error:
            self.streams[number].fail(error, mark)
        return cost

    def give(self, mark: Mark) -> None:
        """Note that a sample was given."""
        position, number, cost, within = mark
        self.streams[number].give(within)
        self._given[position] = (number, cost)
        while (known := self._given.pop(self._shares_given.position, None)) is not None:
            self._shares_given.add(*known)

    # --------------------------------------------------------------------------------------------------------- states

    def state(self) -> State:
        """Return which positions were given, and what streams had used before the first one that was not."""
        low = self._shares_given
        beyond = [[position, *known] for position, known in sorted(self._given.items())]
        places = {"before": self._before, "low": low.position, "beyond": beyond}
        return {**places, "used": [*low.used], "weights": [*low.weights]}

    def merged(self, states: Sequence[State]) -> State:
        """Return a state in which shares begin anew, for what is left of the streams."""
        given = sum(state["low"] + len(state["beyond"]) for state in states)
        return {**_ANEW, "before": max(state["before"] for state in states) + given}


_ANEW: State = {"before": 0, "low": 0, "beyond": [], "used": [], "weights": []}
"""A state of the beginning."""


class _Shares:
    """What streams have used of their shares before a position, since the weights hold that hold there.

    Args:
        mix: Has the weights.
        position: The position.
        used: What each stream had used there.
        weights: By which weights. Where others hold, shares begin anew.
    """

    def __init__(self, mix: Mix[Any], position: int, used: Sequence[float], weights: Weights) -> None:
        self._mix, self.position, self._end = mix, position, -1.0
        self.used, self.weights = [*used], [*weights]

    def _look(self) -> None:
        """See which weights hold at the position, and up to which one they do."""
        stages, step = self._mix.weights, self._mix.step(self.position)
        per_position = self._mix.step(1) - self._mix.step(0)
        self._end = min(
            (self.position + -(-(at - step) // per_position) for at, _ in stages if at > step), default=math.inf
        )
        weights = [own for at, own in stages if at <= step][-1]
        if weights != self.weights:
            self.weights, self.used = weights, [0] * len(weights)

    def add(self, number: int, cost: float) -> None:
        """Go on by one position, which a stream has used."""
        if self.position >= self._end:
            self._look()
        self.used[number] += cost
        self.position += 1

    def least(self, numbers: Sequence[int]) -> int | None:
        """Return which of some streams has used least of its share; None if none has one."""
        if self.position >= self._end:
            self._look()
        weights, used = self.weights, self.used
        return min((n for n in numbers if weights[n]), key=lambda n: used[n] / weights[n], default=None)


def _checked(weights: Any, count: int) -> list[tuple[int, list[float]]]:
    """Return from which sample on which weights hold."""
    stages = [(at, [*own]) for at, own in stages_of(weights)]
    for _, own in stages:
        if len(own) != count or not all(math.isfinite(each) and each >= 0 for each in own) or not sum(own):
            raise ConfigurationError(f"weights should be {count} numbers of 0 or more, not all 0, but are {own}")
    return stages
