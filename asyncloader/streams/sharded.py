"""ShardedStream: the samples of shards, dealt to ranks and workers; and which of them were given.

    shards of an epoch, shuffled    s7 s2 s9 s0 s4 s1 ...
    dealt to 2 ranks of 2 workers    0  1  0  1  0  1        rank
                                     0  0  1  1  0  0        worker

What is given of a shard is known to all who have read it. A state of all workers and ranks is what any of them has
given; whatever is left of it can be dealt anew, to other numbers. So a state has three records:

    begun   what was given when shards were dealt to ranks: the same on all of them
    dealt   and what of this rank's, when these were dealt to its workers
    given   and since then
"""

from __future__ import annotations

import os
import random
import reprlib
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from asyncloader.errors import ConfigurationError, StateMismatchError
from asyncloader.samplers.ordered import place_in_group
from asyncloader.streams.given import Given
from asyncloader.streams.stream import Mark, Reading, State, Stream, check_kinds, noted

T_co = TypeVar("T_co", covariant=True)

_UNKNOWN = -1
_END: Any = object()
_short = reprlib.Repr()
_short.maxother = _short.maxstring = 300


class Shard:
    """What was given of one shard.

    Attributes:
        given: The numbers of samples.
        length: How many samples the shard has, if its end was seen.
    """

    __slots__ = ("given", "length")

    def __init__(self, length: int = _UNKNOWN, low: int = 0, *beyond: int) -> None:
        self.given = Given(low, beyond)
        self.length = length

    @property
    def is_done(self) -> bool:
        """Whether nothing is left of it."""
        return self.given.low == self.length

    def update(self, other: Shard) -> None:
        """Note what another reader has given."""
        self.given.update(other.given)
        self.length = max(self.length, other.length)

    def state(self) -> list[int]:
        """Return plain values."""
        return [self.length, *self.given.state()]


class ShardedStream(Stream[T_co]):
    """Stream the samples of shards: each rank, and each of its workers, reads shards of its own, one after the other.

    A state has for each shard how far it was given, and which samples beyond that. One rank's state goes on on the same
    number of ranks; :func:`~asyncloader.streams.merge` makes one of those of all ranks, for any number of them.

    What `read` raises ends the shard for this run, and is raised with a note that names shard and place. The stream can
    be asked for more after that (with ``on_error="skip"`` our loader does), and goes on with the next shard. A sample
    that is bad by itself is an exception that `read` *yields*: it is raised in its place, and the shard is read on.

    Args:
        shards: What tells `read` which shard to read: paths, URLs, ranges of a table. The same on all ranks, in one
            order. At least as many as there are workers on all ranks together, since a shard has one reader at a time.
        read: ``read(shard, start)`` yields the samples of a shard from the one of number ``start`` on. The same ones
            each time. See :mod:`asyncloader.streams.reading` for some.
        num_replicas: Ranks that share the shards; by default those of the process group, or 1 without one.
        rank: Which of them this is; by default that of the process group, or 0.
        shuffle: Read shards in another order in each epoch.
        seed: Of that order; the same on all ranks.

    Raises:
        ConfigurationError: for what cannot work.

    Example:
        >>> stream = ShardedStream(["ab", "cd"], lambda shard, start: shard[start:], shuffle=False)
        >>> samples = iter(stream)
        >>> next(samples), stream.state_dict()["parts"]["given"]
        ('a', [[0, -1, 1]])
        >>> [*samples]
        ['b', 'c', 'd']
    """

    _of_reading = (*Stream._of_reading, "_reader", "_samples")

    def __init__(
        self,
        shards: Sequence[Any],
        read: Callable[[Any, int], Iterable[T_co | Exception]],
        *,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if isinstance(shards, (str, bytes)) or not isinstance(shards, Sequence):
            raise ConfigurationError(f"shards should be a list of what `read` is given, but is {shards!r}")
        if not callable(read):
            raise ConfigurationError(f"read should be a function of a shard and a number, but is {read!r}")
        self.shards, self.read = shards, read
        self.num_replicas, self.rank = place_in_group(num_replicas, rank)
        self.shuffle, self.seed = shuffle, seed
        self._shards = [len(shards), _checksum(shards)]
        self._left: list[int] = []  # numbers of shards, in the order of this reading, backwards
        self._begun: dict[int, Shard] = {}
        self._dealt: dict[int, Shard] = {}
        self._given: dict[int, Shard] = {}  # of the shards that it has come to
        self._reader: Iterator[Any] | None = None
        self._samples: Any = None  # refers to the iterator that reads
        self._number = self._index = 0  # of the shard that is read, and of the next sample in it

    # -------------------------------------------------------------------------------------------------------- reading

    def begin(self, reading: Reading, state: State | None) -> None:
        """Deal the shards that are left, and begin to read."""
        self._check(state)
        if (before := self._samples and self._samples()) is reading.samples:
            raise ConfigurationError("the same ShardedStream is in this chain twice, and has one place")
        if before is not None:
            before.is_left = True
        self._samples = weakref.ref(reading.samples)
        self._begun, self._dealt, self._given = (_shards(state, key) for key in ("begun", "dealt", "given"))
        numbers = [number for number in range(len(self.shards)) if not _is_done(number, self._begun)]
        if self.shuffle:
            random.Random(f"{self.seed} {reading.epoch}").shuffle(numbers)
        of_rank = [number for number in numbers[self.rank :: self.num_replicas] if not _is_done(number, self._dealt)]
        mine = of_rank[reading.worker :: reading.num_workers]
        self._left = [number for number in reversed(mine) if not _is_done(number, self._given)]
        self._reader = None

    def _check(self, state: State | None) -> None:
        if state is None:
            return
        check_kinds(self, [state])
        if state["shards"] != self._shards:
            raise StateMismatchError("[number of shards, checksum]", state["shards"], self._shards)
        if state["ranks"] not in (None, [self.rank, self.num_replicas]):
            advice = "asyncloader.streams.merge makes one state of those of all ranks, for any number of them."
            raise StateMismatchError("[rank, num_replicas]", state["ranks"], [self.rank, self.num_replicas], advice)

    def take(self) -> tuple[T_co, Mark]:
        """Return the next sample that was not given."""
        while True:
            if self._reader is None:
                self._open()
            shard, index = self._given[self._number], self._index
            try:
                assert self._reader is not None
                sample = next(self._reader, _END)
            except Exception as error:
                self._reader = None
                raise self._noted(error, f"at sample {index}, and the rest is left out, of") from error.__cause__
            if sample is _END:
                shard.length, self._reader = index, None
                continue
            self._index += 1
            if index in shard.given:
                continue
            if isinstance(sample, Exception):
                shard.given.add(index)
                raise self._noted(sample, f"in place of sample {index} of")
            return sample, (self._number, index)

    def _open(self) -> None:
        if not self._left:
            raise StopIteration
        self._number = number = self._left.pop()
        if number not in self._given:
            self._given[number] = shard = Shard()
            for before in (self._begun, self._dealt):
                shard.update(before.get(number, shard))
        self._index = self._given[number].given.low
        try:
            self._reader = iter(self.read(self.shards[self._number], self._index))
        except Exception as error:
            raise self._noted(error, f"at sample {self._index}, and the rest is left out, of") from error.__cause__

    def _noted(self, error: Exception, place: str) -> Exception:
        return noted(error, f"{place} shard {self._number}, {_short.repr(self.shards[self._number])}")

    def give(self, mark: Mark) -> None:
        """Note that a sample was given."""
        number, index = mark
        self._given[number].given.add(index)

    # --------------------------------------------------------------------------------------------------------- states

    def state(self) -> State:
        """Return what was given of each shard, and what was before this reading."""
        return {
            "kind": type(self).__name__,
            "shards": self._shards,
            "ranks": [self.rank, self.num_replicas],
            "begun": _plain(self._begun),
            "dealt": _plain(self._dealt),
            "given": _plain(self._given),
        }

    def merged(self, states: Sequence[State]) -> State:
        """Return what was given by any of several readers. Of all ranks, or of all workers of one."""
        check_kinds(self, states)
        known = [state for state in states if state["ranks"] is not None]  # others have given nothing since a merge
        ranks = [state["ranks"] for state in known]
        others = {"kind": type(self).__name__, "shards": states[0]["shards"], "given": []}
        if ranks and ranks[0][1] > 1 and all(each == ranks[0] for each in ranks):
            dealt = _plain(_union(known, ("dealt", "given")))
            return {**others, "ranks": ranks[0], "begun": known[0]["begun"], "dealt": dealt}
        found = {*map(tuple, ranks)}
        if found != {(rank, len(found)) for rank in range(len(found))}:
            advice = "States of all ranks are needed, each of which has given a batch, or those of one rank's workers."
            raise StateMismatchError("[rank, num_replicas]", ranks, [self.rank, self.num_replicas], advice)
        return {**others, "ranks": None, "begun": _plain(_union(states, ("begun", "dealt", "given"))), "dealt": []}

    def sources(self, mark: Mark) -> Iterator[tuple[Any, ...]]:
        """Yield the shard of a sample, and its number in there."""
        yield mark


def _shards(state: State | None, key: str) -> dict[int, Shard]:
    return {} if state is None else {number: Shard(*entry) for number, *entry in state[key]}


def _plain(shards: dict[int, Shard]) -> list[list[int]]:
    return [[number, *shard.state()] for number, shard in shards.items()]


def _union(states: Sequence[State], keys: Sequence[str]) -> dict[int, Shard]:
    """Return what was given by any of several readers."""
    found: dict[int, Shard] = {}
    for state in states:
        for key in keys:
            for number, shard in _shards(state, key).items():
                found.setdefault(number, Shard()).update(shard)
    return found


def _is_done(number: int, shards: dict[int, Shard]) -> bool:
    return number in shards and shards[number].is_done


def _checksum(shards: Sequence[Any]) -> int | None:
    """Return a number that other shards, or another order of them, do not have; None if they have no names."""
    if not all(isinstance(shard, (str, int, os.PathLike)) for shard in shards):
        return None
    return zlib.crc32("\n".join(map(str, shards)).encode())
