"""What all streams have in common: readings, states of what was given, epochs.

    part.take() ── asks the part within ──> part.take() ── ... ──> a shard is read
         └─> (sample, position, mark)
    give(mark) ── the shard's record of what was given; the turns of a Mix

A chain of parts gives samples, and each sample has a mark: notes for those parts that keep a record of what was given.
Samples wait in buffers: to be shuffled, packed, put into batches of like lengths. Only when a sample leaves the
outermost part is it *given*, and each part gets its notes back. A state has these records, and no buffer: what waited
is read again.

So that a run that goes on gives the same samples in the same order, each part keeps one rule: what is left of its
output, in its order, depends only on what is left of its input. What was given of the middle of an order is left out of
it, and the rest stays as it was.

A stream says how to read, and is read by a copy of its chain, a *reading*. So streams can be pickled and copied, and be
in several chains, at any time; iterators over it do not disturb each other, and its state is that of the one that was
asked last. States of several readings of one epoch, of workers and of ranks, stand side by side in
one state: whoever begins from it leaves out what any of them has given.
"""

from __future__ import annotations

import asyncio
import copy
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from time import perf_counter
from typing import Any, NamedTuple, Self, TypeVar

from torch.utils.data import IterableDataset, get_worker_info

from asyncloader.errors import ConfigurationError, StateMismatchError

F = TypeVar("F")
T_co = TypeVar("T_co", covariant=True)
Mark = tuple[Any, ...]
"""Notes of a sample: pairs of a part, or of a record of one, and of what its `give` is called with. The first one has
the record of the shard, and the number of the sample in it."""
State = dict[str, Any]
"""Plain values: `torch.load` with ``weights_only=True`` loads them, and so does JSON.

"place": who has to go on from it: [number, count] of the rank, then of the worker; [] for anybody.
"parts": the states of the outermost part: of each reading one.
"over": [number, count] of ranks that have given all of their shards.
"""

VERSION = 4
_AHEAD_S = 2e-3
"""For so long a thread takes samples at once, for ``async for``: a turn of the loop costs as much as some of them."""


class Reading(NamedTuple):
    """Of which part of an epoch a reading is.

    Attributes:
        over: Ranks that have given all of their shards, each with how many ranks there were.
        depth: Of how many entries the place is that the states were of: 2 for one reader, 1 for the workers of a rank,
            0 for all ranks.
        epoch: The epoch.
        rank: The rank that reads.
        num_replicas: How many ranks share the shards.
        worker: The number of this worker; 0 without workers.
        num_workers: How many workers there are, 1 at least.
    """

    over: Sequence[tuple[int, int]]
    depth: int
    epoch: int
    rank: int
    num_replicas: int
    worker: int
    num_workers: int

    @property
    def goes_on(self) -> bool:
        """Whether it goes on where one reader was, at the positions of that one.

        Otherwise these are made anew: several have given what was given, or one of several.
        """
        return self.depth == 2


class Stream(IterableDataset[T_co]):
    """An iterable dataset that states what it has given: the base of all parts of a chain.

    A subclass says how samples are taken (`take`). If what is left of its output depends on more than what is left of
    its input, it puts a note into each mark, and has a record (with `give`) of those that come back: its state.

    For use in any loader, with any workers, or without one: ``for sample in stream``, or ``async for``, which reads in
    a thread.

    Each epoch is another order. Our loader tells the stream which it is; so does `set_epoch`. Where nobody does, an
    epoch that was read to its end is followed by the next one.

    Args:
        streams: The parts within.
    """

    is_epoch_set: bool = False  # by a call of `set_epoch` since an epoch was begun
    counts_epochs = True  # what our loader looks at before it warns of copies that give one order in all epochs
    is_remote = False  # loaders read it by `for`: nothing is gained by overlapping
    keeps_order: bool = True
    """Whether samples may be given in another order than they were taken in. Not where they were put together."""
    num_replicas: int
    """How many ranks share the shards."""
    rank: int
    path: str
    """Of a part that reads: where it is in the chain. Within the outermost part, "0", are "0.0", "0.1" and so on."""
    place: list[list[int]]
    """Of the outermost part of those that read: the number of the rank and how many there are, and of the worker."""

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
        self._begun: _Samples | None = None  # the iterator that a state is of: the last of which a sample was asked

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_begun": None}

    # ---------------------------------------------------------------------------------------------- what a part does

    @abstractmethod
    def take(self) -> tuple[Any, float, Mark]:
        """Return the next sample; its position, a number that rises along what this part gives; and its mark.

        Raises:
            StopIteration: at the end.
            Exception: for a sample, or a shard, that is bad. The next call goes on behind it.
        """

    def begin(self, reading: Reading, states: Sequence[Any]) -> None:
        """Begin to read, behind what was given by all readings that these are the states of."""

    def state(self) -> Any:
        """Return the state of this part, without those within."""

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

    def opened(self, reading: Reading, states: Sequence[Any], path: str = "0") -> Self:
        """Return a copy of this part that reads, with copies of those within."""
        part = copy.copy(self)
        part.path, name = path, type(self).__name__
        for kind, _, within in states:
            if kind != name or len(within) > len(self.streams):
                advice = "A stream that is wanted no more stays in its place, with weight 0."
                raise StateMismatchError(f"part {path} of the chain", kind, name, advice)
        part.streams = [
            stream.opened(
                reading, [within[number] for *_, within in states if number < len(within)], f"{path}.{number}"
            )
            for number, stream in enumerate(self.streams)
        ]
        part.begin(reading, [own for _, own, _ in states])
        return part

    def states(self) -> list[Any]:
        """Return what this part is, its state, and the same of those within."""
        return [type(self).__name__, self.state(), [stream.states() for stream in self.streams]]

    # ------------------------------------------------------------------------------------------------------ iterating

    def __iter__(self) -> Iterator[T_co]:
        return _Samples(self)

    def __aiter__(self) -> AsyncIterator[T_co]:
        return _AsyncSamples(self)

    def _start(self) -> Self:
        """Begin a reading, in the worker and the epoch that this is."""
        info = get_worker_info()
        rank, worker = [self.rank, self.num_replicas], [0, 1] if info is None else [info.id, info.num_workers]
        state = self._loaded or nothing_of(self.epoch)
        if (place := state["place"]) != [rank, worker][: len(place)]:
            advice = (
                "asyncloader.streams.merge makes one state of those of all ranks, and merge_state_dicts of those of "
                "all workers, for any number of them."
            )
            raise StateMismatchError("[number, count] of ranks, then of workers", place, [rank, worker], advice)
        part = self.opened(Reading(state["over"], len(place), state["epoch"], *rank, *worker), state["parts"])
        part.epoch, part.place = state["epoch"], [rank, worker]
        return part

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next reading is of. A state of another epoch is dropped."""
        if epoch != self.epoch:
            self._loaded = self._begun = None
        self.epoch, self.is_epoch_set = epoch, True

    # --------------------------------------------------------------------------------------------------------- states

    def state_dict(self) -> State:
        """Return what was given: which samples of each shard, and where each part of the chain is in its order."""
        if self._loaded is not None:
            return copy.deepcopy(self._loaded)
        return self._begun.state() if self._begun else nothing_of(self.epoch)

    def load_state_dict(self, state: State) -> None:
        """Let the next reading go on behind what was given. A state of the end of an epoch is one of the next.

        Args:
            state: A state of `state_dict`, of `merge_state_dicts` or of :func:`~asyncloader.streams.merge`.

        Raises:
            StateMismatchError: if the state is of a later version. If it is of another chain, the reading says so.
        """
        if state.get("version") != VERSION:
            raise StateMismatchError("version", state.get("version"), VERSION)
        self.epoch, self._loaded = state["epoch"], copy.deepcopy(state)

    def merge_state_dicts(self, states: Sequence[State]) -> State:
        """Return one state of those that all workers of a rank have taken of one epoch: for any number of workers.

        Raises:
            StateMismatchError: if they are of several ranks or epochs.
        """
        merged = side_by_side(states, 1)
        for state in states:
            if state["epoch"] != merged["epoch"] or state["place"][:1] not in ([], merged["place"]):
                advice = "States of the workers of one rank, of one epoch, can be merged."
                raise StateMismatchError("epoch, or rank,", state["epoch"], merged["epoch"], advice)
        return merged


class _Samples(Iterator[Any]):
    """Iterates over a stream. What it has returned is given: an interrupt loses nothing."""

    def __init__(self, stream: Stream[Any]) -> None:
        self._stream = stream
        self._part: Any = None  # what reads
        self._is_over = False
        self._ahead: deque[tuple[Any, float, Mark]] = deque()  # taken, not given; or an error, without a mark
        self._returned: Mark = ()  # of the last sample, which parts are told of when the next one is asked for
        # Held to take samples, and to look at the part; again by the handler of a signal.
        self._lock = threading.RLock()

    def _begin(self) -> None:
        """Become the iterator that the stream's state is of. The first call begins the reading.

        Raises:
            StopIteration: behind the end.
        """
        stream = self._stream
        if self._is_over:
            raise StopIteration
        if self._part is None:
            self._part = stream._start()
            self._ahead.clear()
            stream._begun = self  # before this forgets what was loaded: an interrupt in between finds either
            stream._loaded, stream.is_epoch_set = None, False
        stream._begun = self

    def __next__(self) -> Any:
        mark: Mark = ()
        try:
            with self._lock:
                if self._stream._begun is not self:
                    self._begin()
                for record, what in self._returned:  # as `give` does: a call less for each sample
                    record.give(what)
                sample, _, mark = self._ahead.popleft() if self._ahead else self._part.take()
                if not mark:
                    raise sample
                self._returned = mark
                return sample
        except StopIteration:
            self._end()
            raise
        except Exception:
            raise  # parts go on behind it
        except BaseException:  # an interrupt, anywhere within: what was taken and not returned is read again
            if self._returned is mark:
                self._returned = ()
            if self._stream._begun is self:
                self._stream._loaded = self._stream.state_dict()
                self._stream._begun = None
            self._part = None
            raise

    def _end(self) -> None:
        """Have the stream go on to the next epoch, unless one was set meanwhile. Workers are told: others may go on."""
        if not self._is_over and get_worker_info() is None:
            self._stream.epoch += not self._stream.is_epoch_set
            self._stream._begun = None
        self._is_over = True

    def state(self) -> State:
        """Return the state of what reads."""
        with self._lock:
            give(self._returned)
            return {**nothing_of(self._part.epoch), "place": self._part.place, "parts": [self._part.states()]}


class _AsyncSamples(_Samples, AsyncIterator[Any]):
    """The same for ``async for``: a thread takes samples, some at once. Until a call returns them, they are not given.

    A call that is cancelled leaves to the next one what its thread takes.
    """

    async def __anext__(self) -> Any:
        try:
            while not self._ahead:
                self._begin()
                await asyncio.to_thread(self._take_some)
            return next(self)
        except StopIteration:
            raise StopAsyncIteration from None

    def _take_some(self) -> None:
        until = perf_counter() + _AHEAD_S
        with self._lock:
            try:
                while not self._ahead or perf_counter() < until:
                    self._ahead.append(self._part.take())
            except Exception as error:
                self._ahead.append((error, 0, ()))


def nothing_of(epoch: int) -> State:
    """Return the state of the beginning of an epoch."""
    return {"version": VERSION, "epoch": epoch, "place": [], "parts": [], "over": []}


def side_by_side(states: Sequence[State], depth: int) -> State:
    """Return one state of those of one epoch that have been read since they were merged, or of any if none has.

    Args:
        states: Of all workers of a rank, or of all ranks.
        depth: Of how many entries the place of the new one is: 1 for a rank, 0 for all.
    """
    begun = [state for state in states if len(state["place"]) > depth] or states[:1]
    return {**begun[0], "place": begun[0]["place"][:depth], "parts": [part for each in begun for part in each["parts"]]}


def give(mark: Mark) -> None:
    """Note that a sample was given. May be done again, as after an interrupt."""
    for record, what in mark:
        record.give(what)


def function_of(name: str, fn: F) -> F:
    """Return what was given as a function, if it is one."""
    if not callable(fn):
        raise ConfigurationError(f"{name} should be a function, but is {fn!r}")
    return fn


def asked(fn: Callable[[Any], Any], sample: Any, mark: Mark) -> Any:
    """Return what a function makes of a sample. If it raises, the sample counts as given.

    Raises:
        Exception: what the function raises, with a note that names shard and number.
    """
    try:
        return fn(sample)
    except Exception as error:
        give(mark)
        shard, number = mark[0]
        raise shard.noted(error, "for", number) from error.__cause__
