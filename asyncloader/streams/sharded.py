"""ShardedStream: the samples of shards, dealt to ranks and workers; and which of them were given.

    shards of an epoch, shuffled    s7 s2 s9 s0 s4 s1 ...
    dealt to 2 ranks                 0  1  0  1  0  1
    and to 2 workers of each         0  0  1  1  0  0

Whose a shard is follows from its place in the order of the epoch, whatever was given. A state says with a bit for each
shard which of them are done, and which samples were given of the few that are underway. So a state of all workers and
ranks is what any of them has given, and any others leave that out.

Samples have positions: those of a shard follow those of the shard that was read before it. A run that goes on gives
them the same ones.
"""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from asyncloader.errors import ConfigurationError, StateMismatchError
from asyncloader.samplers.ordered import place_in_group
from asyncloader.streams.stream import Mark, Reading, State, Stream, function_of

T_co = TypeVar("T_co", covariant=True)


@dataclass(slots=True)
class _Shard:
    """What was given of a shard: all samples below a number, a few beyond it, and parts of others.

        0 1 2 3 4 5 6 7 8 9 ...
        x x x x . x . . x .          low = 4, beyond = {5, 8}

    Attributes:
        number: Its number.
        name: What tells `read` which one it is.
        first: The position of its first sample among all that are read; -1 before it is known.
        low: All below this one were given.
        beyond: Of those above it, these.
        cut: How much was given of samples that were given in part.
        end: How many there are; -1 as long as nobody knows.
    """

    number: int
    name: Any
    first: int = -1
    low: int = 0
    beyond: set[int] = field(default_factory=set)
    cut: dict[int, int] = field(default_factory=dict)
    end: int = -1

    def update(self, first: int, low: int, beyond: Iterable[int], cut: Iterable[tuple[int, int]]) -> None:
        """Add what a reader has given, to whom the first sample had this position."""
        for number, stop in cut:
            self.cut[number] = max(stop, self.cut.get(number, 0))
        beyond = self.beyond.union(beyond)
        self.first, self.low, self.beyond = first, max(self.low, low), set()
        for number in beyond:
            self.give(number)

    def give(self, number: int | tuple[int, int]) -> None:
        """Note that a sample was given; or of a pair, how much of one. May be called again with the same.

        Also by the handler of a signal that has come between any two lines of this, and takes a state: so each line
        looks at what it changes, and nothing is forgotten before it is noted elsewhere.
        """
        if number == self.low:  # most are
            self.low += number == self.low
        elif isinstance(number, tuple):
            number, stop = number
            self.cut[number] = stop
            return
        elif number > self.low:
            self.beyond.add(number)
        while (low := self.low) in self.beyond:
            self.low += low == self.low
            self.beyond.discard(low)
        if self.cut:
            self.cut.pop(number, None)

    def noted(self, error: Exception, how: str, number: int) -> Exception:
        """Return an error with a note that names a sample. One that looks like the end of a stream becomes another."""
        if isinstance(error, StopIteration):
            error = RuntimeError(f"{type(error).__name__} was raised")
        error.add_note(f"Raised {how} sample {number} of shard {self.number}, {self.name!r:.300}.")
        return error


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
        >>> next(samples), stream.state_dict()["parts"][0][1]["given"]
        ('a', [[0, 0, 1, [], []]])
        >>> [*samples]
        ['b', 'c', 'd']
    """

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
        self.shards: Sequence[Any] = shards
        self._read = function_of("read", read)
        self.num_replicas, self.rank = place_in_group(num_replicas, rank)
        self.shuffle: bool = shuffle
        self.seed: int = seed
        self._names = [len(shards), _checksum(shards)]

    # -------------------------------------------------------------------------------------------------------- reading

    def begin(self, reading: Reading, states: Sequence[State]) -> None:
        """Deal the shards, and begin to read those that are left."""
        self._done, self._next = 0, 0  # a bit for each shard; the position of the first sample of the next one
        self._given: dict[int, _Shard] = {}  # shards that are underway
        for state in states:
            if state["shards"] != self._names:
                raise StateMismatchError("[number of shards, checksum]", state["shards"], self._names)
            self._done |= int(state["done"], 16)
            self._next = state["next"] if reading.goes_on else 0
            for number, first, *own in state["given"]:
                self._shard(number).update(first if reading.goes_on else -1, *own)
        order = [*range(len(self.shards))]
        if self.shuffle:
            random.Random(f"{self.seed} {reading.epoch}").shuffle(order)
        for rank, num_replicas in reading.over:
            self._done |= sum(1 << number for number in order[rank::num_replicas])
        mine = order[reading.rank :: reading.num_replicas][reading.worker :: reading.num_workers]
        self._reader = self._samples([number for number in mine if not self._done >> number & 1])

    def _shard(self, number: int) -> _Shard:
        return self._given.setdefault(number, _Shard(number, self.shards[number]))

    def take(self) -> tuple[T_co, float, Mark]:
        """Return the next sample that was not given."""
        found = next(self._reader)
        if isinstance(found, Exception):
            raise found
        return found

    def _samples(self, numbers: Sequence[int]) -> Iterator[tuple[T_co, float, Mark] | Exception]:
        """Yield what is left of shards; an error in place of a sample, or of the rest of a shard."""
        for number in numbers:
            self._set_done_aside()
            shard = self._shard(number)
            shard.first = first = self._next if shard.first < 0 else shard.first
            index, end, skipped = shard.low, -1, frozenset(shard.beyond)
            try:
                for sample in self._read(shard.name, index):
                    at, index = index, index + 1
                    if at in skipped:
                        continue
                    if isinstance(sample, Exception):
                        shard.give(at)
                        yield shard.noted(sample, "in place of", at)
                    else:
                        yield sample, first + at, ((shard, at),)
                end = index
            except Exception as error:
                yield shard.noted(error, "and the rest of the shard left out, at", index)
            self._next = max(self._next, first + index)
            shard.end = end  # last: a state has no position of a shard that is done

    def _set_done_aside(self) -> None:
        for number, shard in [*self._given.items()]:
            if shard.low == shard.end or self._done >> number & 1:
                self._done |= 1 << number
                self._given.pop(number, None)

    def state(self) -> State:
        """Return which shards are done, and what was given of those that are underway."""
        self._set_done_aside()
        given = [
            [own.number, own.first, own.low, sorted(own.beyond), [*map(list, own.cut.items())]]
            for own in self._given.values()
        ]
        return {"shards": self._names, "done": f"{self._done:x}", "given": given, "next": self._next}


def _checksum(shards: Sequence[Any]) -> int | None:
    """Return a number that other shards, or another order of them, do not have; None if they have no names.

    Names count from the folder on that is common to all: data may be moved.
    """
    if not all(isinstance(shard, (str, int, os.PathLike)) for shard in shards):
        return None
    names = [*map(str, shards)]
    first = os.path.commonprefix(names).rfind("/") + 1  # noqa: RUF071  # of URLs, too, and of paths that are relative
    return zlib.crc32("\n".join(name[first:] for name in names).encode("utf-8", "surrogateescape"))
