"""Mix: samples of several streams, in shares that are exact, of samples or of what they cost.

    turn          0 1 2 3 4 5 6 7 8 9 ...
    stream        a b a a c a b a a b ...      the one whose clock is behind
    given         x x x . x . . .              first that is not: 3; beyond it: 4

Each stream has a clock, which a sample puts forward by its cost over the stream's weight, and each turn has a stream. A
state has the first turn whose sample was not given, and what the clocks showed then; of those beyond that were given,
the streams and costs. So the stream of any turn is found again: nothing in the choice is random.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import dropwhile
from math import inf
from typing import Any, Literal, TypeVar

from asyncloader.checks import one_of
from asyncloader.errors import ConfigurationError
from asyncloader.samplers.mixture import check_weights, stages_of
from asyncloader.streams.stream import Mark, Reading, State, Stream, asked

T_co = TypeVar("T_co", covariant=True)
Stop = Literal["first", "all"]
Weights = Sequence[float]


@dataclass(slots=True)
class _Turn:
    """A turn: what holds then, which stream has had it, and at what cost."""

    position: int
    weights: list[float]
    clocks: list[float]
    number: int = -1  # it is the next one
    cost: float = 0
    is_given: bool = False


class Mix(Stream[T_co]):
    """Stream the samples of several streams, each with its share.

    Shares are exact: of the samples so far, no stream has given more than its part and one sample, and none less than
    its part of so many fewer as there are streams. With `by`, parts are of what samples cost. A stream that has ended
    is left out, or ends the epoch. Where other numbers of ranks or workers go on, shares are counted anew.

    At a resume, streams may be added at the end of the list, and weights may be others: what has been given stays so.
    Where ranks had ended the epoch, the shards of a new stream that would have been theirs come in the next one.

    Args:
        streams: Give the samples.
        weights: The weight of each stream: numbers of 0 or more, not all 0. Or a list of pairs ``(step, weights)``, of
            which each holds from that sample of the epoch on, counted over all workers and ranks, as if all were
            equally fast; or from where all streams have ended that have weights before. A stream of weight 0 gives
            nothing.
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
        super().__init__(*streams)
        if not streams:
            raise ConfigurationError("streams should be a list of parts of asyncloader.streams, and there are none")
        one_of("stop", stop, Stop)
        self.stop = stop
        self._by = by
        self.weights: list[tuple[int, list[float]]] = [(at, [*own]) for at, own in stages_of(weights)]
        for _, own in self.weights:
            check_weights(own, len(streams))

    # -------------------------------------------------------------------------------------------------------- reading

    def begin(self, reading: Reading, states: Sequence[State]) -> None:
        """Begin to read: where a reader was; or with shares anew, for what is left of the streams."""
        given = sum(state["low"] + len(state["beyond"]) for state in states)
        if reading.depth == 1:  # other ranks have given about as much
            given *= reading.num_replicas
        before = given + max((state["before"] for state in states), default=0)
        anew = {"before": before, "low": 0, "beyond": [], "weights": [], "clocks": []}
        state = states[0] if states and reading.goes_on else anew
        self._before: int = state["before"]  # samples before this reading, of all workers and ranks
        per_position = reading.num_workers * reading.num_replicas
        self._stages = [(-(-(at - self._before) // per_position), own) for at, own in self.weights]
        self._known = {position: turn for position, *turn in state["beyond"]}  # those that were given before
        self._turns = deque([_Turn(state["low"], state["weights"], state["clocks"])])
        self._left = [*range(len(self.streams))]  # streams that have not ended
        self._look_at_weights()

    def _look_at_weights(self) -> None:
        """See which weights hold at the next turn, until which one, and for which streams. Other weights, other clocks.

        Where no stream is left that has any, those of a later step hold at once.
        """
        turn = self._turns[-1]
        while True:
            weights = [own for at, own in self._stages if at <= turn.position][-1]
            self._until = min((at for at, _ in self._stages if at > turn.position), default=inf)
            self._numbers = [number for number in self._left if weights[number]]
            if self._numbers or self._until == inf or not self._left:
                break
            turn.position = int(self._until)
        if weights != turn.weights:
            turn.weights, turn.clocks = weights, [0.0] * len(weights)

    def take(self) -> tuple[T_co, float, Mark]:
        """Return the next sample of the stream whose turn it is."""
        while True:
            while (at := self._turns[-1].position) in self._known:
                self.give(self._had(*self._known[at]))
                del self._known[at]  # in this order: the handler of a signal may take a state in between
            if not self._numbers:
                raise StopIteration
            number = min(self._numbers, key=self._turns[-1].clocks.__getitem__)
            try:
                sample, _, mark = self.streams[number].take()
            except StopIteration:
                self._left = [each for each in self._left if each != number and self.stop == "all"]
                self._look_at_weights()
                continue
            turn = self._had(number, asked(self._cost_of, sample, mark) if self._by else 1)
            return sample, turn.position, (*mark, (self, turn))

    def _had(self, number: int, cost: float) -> _Turn:
        """Return the turn that a stream has had; the next one follows."""
        turn = self._turns[-1]
        turn.number, turn.cost, clocks = number, cost, [*turn.clocks]
        clocks[number] += cost / (turn.weights[number] or inf)
        self._turns.append(_Turn(turn.position + 1, turn.weights, clocks))
        while self._turns[0].is_given:  # here alone: to take a state changes nothing
            self._turns.popleft()
        if turn.position + 1 >= self._until:
            self._look_at_weights()
        return turn

    def _cost_of(self, sample: Any) -> float:
        cost = float(self._by(sample))  # type: ignore[misc]  # there is one
        if not 0 <= cost < inf:
            raise ValueError(f"the cost of a sample should be a number of 0 or more, but is {cost!r}")
        return cost

    def give(self, turn: _Turn) -> None:
        """Note that the sample of a turn was given."""
        turn.is_given = True

    def state(self) -> State:
        """Return the first turn whose sample was not given, what clocks showed then, and those given beyond."""
        first, *others = dropwhile(lambda turn: turn.is_given, self._turns)
        beyond = [[turn.position, turn.number, turn.cost] for turn in others if turn.is_given]
        beyond += [[position, *turn] for position, turn in self._known.items()]
        clocks = {"weights": first.weights, "clocks": first.clocks}
        return {"before": self._before, "low": first.position, "beyond": beyond, **clocks}
