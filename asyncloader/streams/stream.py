"""What all streams have in common: readings, states of what was given, epochs.

    part.take() ── asks the part within ──> part.take() ── ... ──> a shard is read
         └─> (sample, mark)                                            │
    part.give(mark) ── tells the part within ──> part.give(mark) ──> the shard's record of what was given

A chain of parts gives samples, and each sample has a mark, by which every part on its way knows it again. Samples wait
in buffers: to be shuffled, packed, put into batches of like lengths. Only when a sample leaves the outermost part is it
*given*, and its mark goes down the same way. A state has what was given, and no buffer: what waited is read again.

So that a run that goes on gives the same samples in the same order, each part keeps one rule: what is left of its
output, in its order, depends only on what is left of its input. What was given of the middle of an order is left out of
it, and the rest stays as it was.

A stream says how to read, and is read by a copy of its chain, a *reading*. So streams can be pickled and copied, and be
in several chains, at any time.
"""

from __future__ import annotations

import asyncio
import copy
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import zip_longest
from time import perf_counter
from typing import Any, NamedTuple, NoReturn, Self, TypeVar

from torch.utils.data import IterableDataset, get_worker_info

from asyncloader.errors import ConfigurationError, StateMismatchError

T_co = TypeVar("T_co", covariant=True)
Mark = Any
"""By which a part, and the parts within it, know a sample again: a tuple, whose last entry is the mark of the part
within, or a list of several such marks. That of a shard has where the shard's stream is in the chain, the number of the
shard, and that of the sample in it."""
State = dict[str, Any]
"""Plain values: `torch.load` with ``weights_only=True`` loads them, and so does JSON."""

VERSION = 2
NOTHING: State = {"ranks": None, "workers": None, "parts": None}
"""Of a state: nothing was given."""
_AHEAD_S = 2e-3
"""For so long a thread takes samples at once, for ``async for``: a turn of the loop costs as much as some of them."""


class Reading(NamedTuple):
    """Of which part of an epoch a reading is.

    Attributes:
        epoch: The epoch.
        rank: The rank that reads.
        num_replicas: How many ranks share the shards.
        worker: The number of this worker; 0 without workers.
        num_workers: How many workers there are, 1 at least.
        is_of_ranks: It goes on from a state of all ranks: what is left is dealt to ranks anew.
        is_of_workers: The same of the workers of this rank.
        path: Where a part is in the chain.
    """

    epoch: int
    rank: int
    num_replicas: int
    worker: int
    num_workers: int
    is_of_ranks: bool
    is_of_workers: bool
    path: tuple[int, ...] = ()


class Stream(IterableDataset[T_co]):
    """An iterable dataset that states what it has given: the base of all parts of a chain.

    A subclass says how samples are taken (`take`), what becomes of marks (`give`), and what its state is. For use in
    any loader, with any workers, or without one: ``for sample in stream``, or ``async for``, which reads in a thread. A
    stream has one place: another ``iter`` ends the one before.

    Each epoch is another order. Our loader tells the stream which it is; so does `set_epoch`. Where nobody does, an
    epoch that was read to its end is followed by the next one.

    Args:
        streams: The parts within.
    """

    is_epoch_set: bool = False  # by a call of `set_epoch` since our loader has begun an epoch
    counts_epochs = True  # what our loader looks at before it warns of copies that give one order in all epochs
    is_remote = False  # loaders read it by `for`: nothing is gained by overlapping
    keeps_order: bool = True
    """Whether samples may be given in another order than they were taken in. Not where they were put together."""
    num_replicas: int
    """How many ranks share the shards."""
    rank: int

    def __init__(self, *streams: Stream[Any]) -> None:
        for stream in streams:
            if not isinstance(stream, Stream):
                raise ConfigurationError(
                    f"what is within should be a part of asyncloader.streams, such as ShardedStream: {stream!r}"
                )
            self.num_replicas, self.rank = streams[0].num_replicas, streams[0].rank
            if (stream.num_replicas, stream.rank) != (self.num_replicas, self.rank):
                raise ConfigurationError("streams that are mixed should be those of one rank, of as many ranks")
            self.keeps_order = self.keeps_order and stream.keeps_order
        self.streams: Sequence[Stream[Any]] = streams
        self.epoch: int = 0
        self._loaded: State | None = None  # where the next reading begins
        self._iterator: _Samples | None = None  # the newest one
        self._begun: _Samples | None = None  # the last one of which a sample was asked
        self._has_ended = False  # the epoch, in a reading or by a state

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_iterator": None, "_begun": None}

    # ---------------------------------------------------------------------------------------------- what a part does

    @abstractmethod
    def take(self) -> tuple[Any, Mark]:
        """Return the next sample, and its mark.

        Raises:
            StopIteration: at the end.
            Exception: for a sample, or a shard, that is bad. The next call goes on behind it.
        """

    def give(self, mark: Mark) -> None:
        """Note that a sample was given."""
        self.streams[0].give(mark)

    def begin(self, reading: Reading, state: Any) -> None:
        """Begin to read; from a state of this part, without those within, if there is one: otherwise it is None."""

    def state(self) -> Any:
        """Return the state of this part, without those within."""

    def merged(self, states: Sequence[Any]) -> Any:
        """Return one state of this part of those that all workers, or ranks, have had."""

    def finish(self) -> None:
        """Note that all was given."""
        for stream in self.streams:
            stream.finish()

    def must_keep_order(self) -> None:
        """Raise an error if a part within has put samples together, as this one is about to change their order.

        Raises:
            ConfigurationError: if so.
        """
        if not self.keeps_order:
            raise ConfigurationError(
                f"{type(self).__name__} gives samples in an order of its own, and is around a part that puts samples "
                "together (Pack, Bucket), whose blocks a state knows only in their order: have it within that part"
            )

    def fail(self, error: Exception, mark: Mark) -> NoReturn:
        """Raise the error of a sample that was taken of this part, and counts as given.

        Raises:
            Exception: the error, with a note that names shard and number.
        """
        self.give(mark)
        _, shard, number = source_of(mark)
        error = noted(error, f"for sample {number} of shard {shard}")
        raise error from error.__cause__

    def opened(self, reading: Reading, state: State | None) -> Self:
        """Return a copy of this part that reads, with copies of those within."""
        part, within = copy.copy(self), [] if state is None else state["within"]
        self._check([] if state is None else [state])
        part.streams = [
            stream.opened(reading._replace(path=(*reading.path, number)), own)
            for number, (stream, own) in enumerate(zip_longest(self.streams, within))
        ]
        part.begin(reading, None if state is None else state["own"])
        return part

    def state_of_chain(self) -> State:
        """Return the state of this part, with those within."""
        within = [stream.state_of_chain() for stream in self.streams]
        return {"kind": type(self).__name__, "own": self.state(), "within": within}

    def _merged_chain(self, states: Sequence[State]) -> State:
        self._check(states)
        within = zip(*(state["within"] for state in states), strict=True)
        merged = [stream._merged_chain(own) for stream, own in zip(self.streams, within, strict=False)]
        return {**states[0], "own": self.merged([state["own"] for state in states]), "within": merged}

    def _check(self, states: Sequence[State]) -> None:
        """Raise an error if states are not of this kind of part, or of more streams, or of several numbers of them."""
        here = [type(self).__name__, len(self.streams)]
        found = [[state["kind"], len(state["within"])] for state in states]
        for kind, count in found:
            if kind != here[0] or count > here[1] or count != found[0][1]:
                advice = "A stream that is wanted no more stays in its place, with weight 0."
                raise StateMismatchError("[part, number of streams in it]", found, here, advice)

    # ------------------------------------------------------------------------------------------------------ iterating

    def __iter__(self) -> Iterator[T_co]:
        self._iterator = samples = _Samples(self)
        return samples

    def __aiter__(self) -> AsyncIterator[T_co]:
        self._iterator = samples = _AsyncSamples(self)
        return samples

    def _start(self) -> Self:
        """Begin a reading, in the worker and the epoch that this is."""
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        epoch = self.epoch + (self._has_ended and info is None)  # workers are told: some end where others do not
        state: State = self._loaded or NOTHING
        self._places = {"ranks": [self.rank, self.num_replicas], "workers": [worker, num_workers]}
        for name, function in (("ranks", "asyncloader.streams.merge"), ("workers", "merge_state_dicts")):
            if state[name] not in (None, now := self._places[name]):
                advice = f"{function} makes one state of those of all {name}, for any number of them."
                raise StateMismatchError(f"[number, count] of {name}", state[name], now, advice)
        of_all = state["ranks"] is None, state["workers"] is None
        part = self.opened(Reading(epoch, self.rank, self.num_replicas, worker, num_workers, *of_all), state["parts"])
        self.epoch, self._loaded, self._has_ended = epoch, None, False
        return part

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next reading is of. A state of another epoch is dropped."""
        if epoch != self.epoch or self._has_ended:
            self._loaded = self._begun = None
        self.epoch, self.is_epoch_set, self._has_ended = epoch, True, False

    # --------------------------------------------------------------------------------------------------------- states

    def state_dict(self) -> State:
        """Return what was given: which samples of each shard, and where each part of the chain is in its order."""
        if self._loaded is not None:
            return copy.deepcopy(self._loaded)
        parts = None if self._begun is None else self._begun.state()
        places = NOTHING if parts is None else {**self._places, "parts": parts}
        return {"version": VERSION, "epoch": self.epoch, "ended": self._has_ended, **places}

    def load_state_dict(self, state: State) -> None:
        """Let the next reading go on behind what was given. Behind the end of an epoch, the next one begins.

        Args:
            state: A state of `state_dict`, of `merge_state_dicts` or of :func:`~asyncloader.streams.merge`.

        Raises:
            StateMismatchError: if the state is of a later version. If it is of another chain, the reading says so.
        """
        if state.get("version") != VERSION:
            raise StateMismatchError("version", state.get("version"), VERSION)
        if "all" in state:
            state = self._merged_ranks(state["all"])
        # In a worker that had come to its end, nothing is left of an epoch that others may be in the middle of.
        is_over = state["ended"] and get_worker_info() is None
        self.epoch = state["epoch"] + is_over
        self._loaded = None if is_over else copy.deepcopy(state)
        self._begun, self._iterator, self._has_ended = None, None, False

    def merge_state_dicts(self, states: Sequence[State]) -> State:
        """Return one state of those that all workers of a rank have taken of one epoch: for any number of workers.

        Raises:
            StateMismatchError: if they are of several ranks or epochs.
        """
        return {**self._merged_workers(states), "ended": False}  # nothing may be left, but the epoch is the same one

    def _merged_workers(self, states: Sequence[State]) -> State:
        begun = [state for state in states if state.get("ranks")]  # others have given nothing since a merge, if at all
        if not begun:
            return self._merged_ranks(states[0]["all"]) if "all" in states[0] else states[0]
        for name in ("epoch", "ranks"):
            if any(state[name] != begun[0][name] for state in begun):
                advice = "States of the workers of one rank, of one epoch, can be merged."
                raise StateMismatchError(name, [state[name] for state in begun], getattr(self, name, None), advice)
        ended, parts = all(state["ended"] for state in begun), self._merged_chain([state["parts"] for state in begun])
        return {**begun[0], "ended": ended, "workers": None, "parts": parts}

    def _merged_ranks(self, ranks: Sequence[Sequence[State]]) -> State:
        """Return one state of those of all ranks.

        A rank that has ended its epoch has given all of its shards. One that has ended the epoch before, or has given
        nothing since a merge, has given nothing.

        Args:
            ranks: For each rank, in their order, the states of its workers.
        """
        states = [self._merged_workers(workers) for workers in ranks]
        epochs = [state["epoch"] for state in states if state["epoch"] is not None]
        merged: State = {"version": VERSION, "epoch": max(epochs, default=self.epoch), "ended": False, **NOTHING}
        known = [state for state in states if state["epoch"] == merged["epoch"] and state["parts"]]
        base = min(known, key=lambda state: not state["ranks"], default=merged)  # one that was given from, if there is
        parts = [base["parts"]] if base["parts"] and not base["ranks"] else []
        for rank, state in enumerate(states):
            if state["ranks"] not in (None, [rank, len(states)]):
                advice = "merge is to be given one state of each rank, in the order of ranks."
                raise StateMismatchError("[number, count] of ranks", state["ranks"], [rank, len(states)], advice)
            behind = 0 if state["epoch"] is None else merged["epoch"] - state["epoch"]
            if behind > state["ended"]:
                raise StateMismatchError("epoch", epochs, merged["epoch"], "States of one epoch can be merged.")
            if not behind and (state["ranks"] or state["ended"]):
                parts.append(state["parts"] or self._all_of(rank, len(states), base))
        return {**merged, "parts": self._merged_chain(parts)} if parts else merged

    def _all_of(self, rank: int, num_replicas: int, base: State) -> State:
        """Return the parts of the state of a rank that has given all, from those of another rank, or of all before."""
        reading = Reading(base["epoch"], rank, num_replicas, 0, 1, not base["ranks"], True)
        part = self.opened(reading, base["parts"])
        part.finish()
        return part.state_of_chain()


class _Samples(Iterator[Any]):
    """Iterates over a stream. What it returns is given: an interrupt before that loses nothing."""

    def __init__(self, stream: Stream[Any]) -> None:
        self._stream = stream
        self._part: Stream[Any] | None = None  # what reads
        self._lock = threading.RLock()  # held to take samples in a thread, and to look at the part; again by a handler

    def _reading(self) -> Stream[Any]:
        """Return what reads. The first call begins the reading.

        Raises:
            StopIteration: behind the end.
            RuntimeError: if another reading was begun.
        """
        stream = self._stream
        if stream._iterator is not self:
            raise RuntimeError(
                "this iterator was ended: another one over the same stream was begun, or a state was loaded"
            )
        if self._part is None:
            self._part, stream._begun = stream._start(), self
            self._epoch = stream.epoch
        elif stream._has_ended:
            raise StopIteration
        return self._part

    def __next__(self) -> Any:
        part = self._reading()
        try:
            sample, mark = part.take()
        except StopIteration:
            self._end()
            raise
        part.give(mark)
        return sample

    def _end(self) -> None:
        """Note the end of the epoch; unless another one was set meanwhile."""
        self._stream._has_ended = self._stream.epoch == self._epoch

    def state(self) -> State | None:
        """Return the state of what reads."""
        with self._lock:
            return None if self._part is None else self._part.state_of_chain()


class _AsyncSamples(_Samples, AsyncIterator[Any]):
    """The same for ``async for``: a thread takes samples, some at once. Until a call returns them, they are not given.

    A call that is cancelled leaves to the next one what its thread takes.
    """

    def __init__(self, stream: Stream[Any]) -> None:
        super().__init__(stream)
        self._taken: deque[tuple[Any, Mark]] = deque()  # in place of a sample, an error, whose mark is None

    async def __anext__(self) -> Any:
        try:
            while not self._taken:
                await asyncio.to_thread(self._take_some, self._reading())
            part = self._reading()
        except StopIteration:
            raise StopAsyncIteration from None
        with self._lock:
            sample, mark = self._taken.popleft()
            if mark is not None:
                part.give(mark)
                return sample
        if isinstance(sample, StopIteration):
            self._end()
            raise StopAsyncIteration
        raise sample

    def _take_some(self, part: Stream[Any]) -> None:
        until = perf_counter() + _AHEAD_S
        with self._lock:
            while not self._taken or (self._taken[-1][1] is not None and perf_counter() < until):
                try:
                    self._taken.append(part.take())
                except Exception as error:
                    self._taken.append((error, None))


def source_of(mark: Mark) -> tuple[tuple[int, ...], int, int]:
    """Return the place of a stream of shards in the chain, the shard and the number of a sample; of several, the last.

    Args:
        mark: The mark of a sample, of any part.
    """
    while not isinstance(mark[-1], int):
        mark = mark[-1]
    path, shard, number = mark
    return path, shard, number


def noted(error: Exception, place: str) -> Exception:
    """Return an error with a note about its place. One that would look like the end of the stream becomes another."""
    if isinstance(error, StopIteration):
        error = RuntimeError(f"{type(error).__name__} was raised")
    error.add_note(f"Raised {place}.")
    return error
