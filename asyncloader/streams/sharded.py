"""ShardedStream: the samples of shards, dealt to ranks and workers; and which of them were given.

    shards of an epoch, shuffled    s7 s2 s9 s0 s4 s1 ...
    dealt to 2 ranks of 2 workers    0  1  0  1  0  1        rank
                                     0  0  1  1  0  0        worker

What is given of a shard is known to all who have read it. A state of all workers and ranks is what any of them has
given; whatever is left of it can be dealt anew, to other numbers. So a state says, with a bit for each shard, which of
them nothing was left of

    begun   when shards were dealt to ranks: the same on all of them
    dealt   when those of this rank were dealt to its workers
    done    now

and which samples were given of the few that are underway.
"""

from __future__ import annotations

import os
import random
import reprlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from asyncloader.errors import ConfigurationError, StateMismatchError
from asyncloader.samplers.ordered import place_in_group
from asyncloader.streams.given import Given
from asyncloader.streams.stream import Mark, Reading, State, Stream, noted

T_co = TypeVar("T_co", covariant=True)

_END: Any = object()
_short = reprlib.Repr()
_short.maxother = _short.maxstring = 300
_ANEW: State = {"begun": "", "dealt": "", "done": "", "given": []}
"""Of a state: nothing was given."""


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
        >>> next(samples), stream.state_dict()["parts"]["own"]["given"]
        ('a', [[0, 1]])
        >>> [*samples]
        ['b', 'c', 'd']
    """

    shards: Sequence[Any]
    read: Callable[[Any, int], Iterable[T_co | Exception]]
    num_replicas: int
    rank: int
    shuffle: bool
    seed: int

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
        self._names = [len(shards), _checksum(shards)]

    # -------------------------------------------------------------------------------------------------------- reading

    def begin(self, reading: Reading, state: State | None) -> None:
        """Deal the shards that are left, and begin to read."""
        if state is not None:
            self._check_names(state)
        state = state or _ANEW
        self._given = {number: Given(*own) for number, *own in state["given"]}  # of the shards that are underway
        begun, dealt, self._done = (self._marked(state[key]) for key in ("begun", "dealt", "done"))
        if reading.is_of_workers:
            dealt = self._done
        if reading.is_of_ranks:
            begun = self._done
        self._before = {"begun": _text(begun), "dealt": _text(dealt)}
        numbers = np.flatnonzero(~begun).tolist()
        if self.shuffle:
            random.Random(f"{self.seed} {reading.epoch}").shuffle(numbers)
        of_rank = [number for number in numbers[reading.rank :: reading.num_replicas] if not dealt[number]]
        mine = of_rank[reading.worker :: reading.num_workers]
        self._left = [number for number in reversed(mine) if not self._done[number]]
        self._path = reading.path
        self._reader: Iterator[Any] | None = None
        self._index, self._skipped = 0, frozenset[int]()  # of the next sample; of samples that were given before

    def take(self) -> tuple[T_co, Mark]:
        """Return the next sample that was not given."""
        while True:
            reader = self._open() if self._reader is None else self._reader
            index = self._index
            try:
                sample = next(reader, _END)
            except Exception as error:
                self._reader = None
                raise self._noted(error, f"at sample {index}, and the rest is left out, of") from error.__cause__
            if sample is _END:
                self._reader, self._given[self._number].end = None, index
                self._look_whether_done(self._number)
                continue
            self._index = index + 1
            if index in self._skipped:
                continue
            mark = self._path, self._number, index
            if isinstance(sample, Exception):
                self.give(mark)
                raise self._noted(sample, f"in place of sample {index} of")
            return sample, mark

    def _open(self) -> Iterator[Any]:
        if not self._left:
            raise StopIteration
        self._number = number = self._left.pop()
        given = self._given.setdefault(number, Given())
        self._index, self._skipped = given.low, frozenset(given.beyond)
        try:
            self._reader = reader = iter(self.read(self.shards[number], given.low))
            return reader
        except Exception as error:
            raise self._noted(error, f"at sample {given.low}, and the rest is left out, of") from error.__cause__

    def _noted(self, error: Exception, place: str) -> Exception:
        return noted(error, f"{place} shard {self._number}, {_short.repr(self.shards[self._number])}")

    def give(self, mark: Mark) -> None:
        """Note that a sample was given."""
        _, number, index = mark
        given = self._given[number]
        given.add(index)
        if given.end >= 0:
            self._look_whether_done(number)

    def _look_whether_done(self, number: int) -> None:
        if self._given[number].low >= self._given[number].end:
            self._done[number] = True
            del self._given[number]

    def finish(self) -> None:
        """Note that all shards of this reading were given."""
        self._done[self._left] = True

    # --------------------------------------------------------------------------------------------------------- states

    def state(self) -> State:
        """Return which shards are done, what was given of those that are underway, and what was before this reading."""
        given = [[number, *given.state()] for number, given in self._given.items()]
        return {"shards": self._names, **self._before, "done": _text(self._done), "given": given}

    def merged(self, states: Sequence[State]) -> State:
        """Return what was given by any of several readers."""
        given: dict[int, Given] = {}
        done = self._marked("")
        for state in states:
            self._check_names(state)
            done |= self._marked(state["done"])
            for number, *own in state["given"]:
                given.setdefault(number, Given()).update(*own)
        left = [[number, *own.state()] for number, own in given.items() if not done[number]]
        return {**states[0], "done": _text(done), "given": left}

    def _check_names(self, state: State) -> None:
        if state["shards"] != self._names:
            raise StateMismatchError("[number of shards, checksum]", state["shards"], self._names)

    def _marked(self, text: str) -> NDArray[np.bool_]:
        """Return for each shard whether its bit is set."""
        bits = bytes.fromhex(text).ljust(len(self.shards) // 8 + 1, b"\0")
        return np.unpackbits(np.frombuffer(bits, np.uint8), count=len(self.shards)).astype(np.bool_)


def _text(marked: NDArray[np.bool_]) -> str:
    """Return a bit for each shard, in hexadecimal digits, without zeros at the end."""
    return np.packbits(marked).tobytes().rstrip(b"\0").hex()


def _checksum(shards: Sequence[Any]) -> int | None:
    """Return a number that other shards, or another order of them, do not have; None if they have no names.

    Names count from the folder on that is common to all: data may be moved.
    """
    if not all(isinstance(shard, (str, int, os.PathLike)) for shard in shards):
        return None
    names = [*map(str, shards)]
    first = os.path.commonprefix(names).rfind("/") + 1  # noqa: RUF071  # of URLs, too, and of paths that are relative
    return zlib.crc32("\n".join(name[first:] for name in names).encode("utf-8", "surrogateescape"))
