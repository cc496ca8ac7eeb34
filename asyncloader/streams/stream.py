"""What all streams have in common: one reading at a time, states of what was given, epochs.

    part.take() ── asks the part within ──> part.take() ── ... ──> a shard is read
         └─> (sample, mark)                                            │
    part.give(mark) ── tells the part within ──> part.give(mark) ──> the shard's record of what was given

A chain of parts gives samples, and each sample has a mark, by which every part on its way knows it again. Samples wait
in buffers: to be shuffled, packed, put into batches of like lengths. Only when a sample leaves the outermost part is it
*given*, and its mark goes down the same way. A state has what was given, and no buffer: what waited is read again.

So that a run that goes on gives the same samples in the same order, each part keeps one rule: what is left of its
output, in its order, depends only on what is left of its input. What was given of the middle of an order is left out of
it, and the rest stays as it was.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, NoReturn, Self, TypeVar

from torch.utils.data import IterableDataset, get_worker_info

from asyncloader.errors import ConfigurationError, StateMismatchError

T_co = TypeVar("T_co", covariant=True)
Mark = Any
"""By which a part, and the parts within it, know a sample again."""
State = dict[str, Any]
"""Plain values: `torch.load` with ``weights_only=True`` loads them, and so does JSON."""

VERSION = 1


class Reading(NamedTuple):
    """Of which part of an epoch one reading is.

    Attributes:
        epoch: The epoch.
        worker: The number of this worker; 0 without workers.
        num_workers: How many workers there are, 1 at least.
        samples: The iterator that reads.
    """

    epoch: int
    worker: int
    num_workers: int
    samples: _Samples


class Stream(IterableDataset[T_co]):
    """An iterable dataset that states what it has given: the base of all parts of a chain.

    A subclass says how samples are taken (`take`), what becomes of marks (`give`), and what its state is. For use in
    any loader, with any workers, or without one: ``for sample in stream``. A stream has one reading at a time: another
    ``iter`` ends the one before.

    Each epoch is another order. Our loader tells the stream which it is; so does `set_epoch`. Where nobody does, an
    epoch that was read to its end is followed by the next one.
    """

    is_epoch_set = False  # by a call of `set_epoch` since our loader has begun an epoch
    counts_epochs = True  # what our loader looks at before it warns of copies that give one order in all epochs
    _of_reading: ClassVar[tuple[str, ...]] = ("_reading", "_iterator")
    """Attributes that belong to a reading: a copy for another process has none."""

    def __init__(self) -> None:
        self.epoch = 0
        self._loaded: State | None = None  # where the next reading begins
        self._reading: Reading | None = None  # the last one that was begun
        self._iterator: object = None  # the newest one
        self._has_ended = False  # the epoch, in a reading or by a state

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), **dict.fromkeys(self._of_reading)}

    def __copy__(self) -> Self:
        """Return a stream that is read by itself: threads that are workers have one each."""
        made = type(self).__new__(type(self))
        for name, value in self.__getstate__().items():
            is_parts = isinstance(value, list) and all(isinstance(each, Stream) for each in value)
            setattr(made, name, [*map(copy.copy, value)] if is_parts else value)
            if isinstance(value, Stream):
                setattr(made, name, copy.copy(value))
        return made

    # ---------------------------------------------------------------------------------------------- what a part does

    @abstractmethod
    def take(self) -> tuple[Any, Mark]:
        """Return the next sample, and its mark.

        Raises:
            StopIteration: at the end.
            Exception: for a sample, or a shard, that is bad. The next call goes on behind it.
        """

    @abstractmethod
    def give(self, mark: Mark) -> None:
        """Note that a sample was given."""

    @abstractmethod
    def begin(self, reading: Reading, state: State | None) -> None:
        """Begin to read; from a state of this part, if there is one. The parts within begin likewise."""

    @abstractmethod
    def state(self) -> State:
        """Return the state of this part, and of those within."""

    @abstractmethod
    def merged(self, states: Sequence[State]) -> State:
        """Return one state of this part of those that all workers, or ranks, have had."""

    @abstractmethod
    def sources(self, mark: Mark) -> Iterator[tuple[Any, ...]]:
        """Yield for each sample within what tells it apart: where it stands in the chain, its shard, its number."""

    num_replicas: int
    """How many ranks share the shards."""

    @property
    def keeps_order(self) -> bool:
        """Whether samples may be given in another order than they were taken in. Not where they were put together."""
        return True

    def fail(self, error: Exception, mark: Mark) -> NoReturn:
        """Raise the error of a sample that was taken of this part, and counts as given.

        Raises:
            Exception: the error, with a note that names shard and number.
        """
        self.give(mark)
        *_, shard, number = next(self.sources(mark))
        error = noted(error, f"for sample {number} of shard {shard}")
        raise error from error.__cause__

    # ------------------------------------------------------------------------------------------------------ iterating

    def __iter__(self) -> Iterator[T_co]:
        self._iterator = iterator = _Samples(self)
        return iterator

    def _start(self, samples: _Samples) -> None:
        """Begin a reading, in the worker and the epoch that this is."""
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        epoch = self.epoch + (self._has_ended and info is None)  # workers are told: some end where others do not
        state = self._loaded
        if state is not None and state["place"] not in (None, [worker, num_workers]):
            advice = "merge_state_dicts makes one state of those of all workers, for any number of them."
            raise StateMismatchError("[worker, num_workers]", state["place"], [worker, num_workers], advice)
        reading = Reading(epoch, worker, num_workers, samples)
        self.begin(reading, None if state is None else state["parts"])
        self.epoch, self._reading, self._loaded, self._has_ended = epoch, reading, None, False

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next reading is of. A state of another epoch is dropped."""
        if epoch != self.epoch or self._has_ended:
            self._loaded = self._reading = None
        self.epoch, self.is_epoch_set, self._has_ended = epoch, True, False

    # --------------------------------------------------------------------------------------------------------- states

    def state_dict(self) -> State:
        """Return what was given: which samples of each shard, and where each part of the chain is in its order."""
        if self._loaded is not None:
            return copy.deepcopy(self._loaded)
        place: list[int] | None = None
        parts: State | None = None
        if self._reading is not None:
            place, parts = [*self._reading[1:3]], self.state()
        return {"version": VERSION, "epoch": self.epoch, "ended": self._has_ended, "place": place, "parts": parts}

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
            state = self.merge_state_dicts(state["all"])
        # In a worker that had come to its end, nothing is left of an epoch that others may be in the middle of.
        is_over = state["ended"] and get_worker_info() is None
        self.epoch = state["epoch"] + is_over
        self._loaded = None if is_over else copy.deepcopy(state)
        self._reading, self._iterator, self._has_ended = None, None, False

    def merge_state_dicts(self, states: Sequence[State]) -> State:
        """Return one state of those that all workers, or all ranks, have taken of one epoch: for any number of workers.

        Raises:
            StateMismatchError: if one is missing, or they are of several epochs.
        """
        states = apart(states)
        epochs = {state["epoch"] for state in states}
        if len(epochs) != 1:
            raise StateMismatchError("epoch", sorted(epochs), self.epoch, "States of one epoch can be merged.")
        parts = [state["parts"] for state in states if state["parts"] is not None]
        return {
            "version": VERSION,
            "epoch": epochs.pop(),
            "ended": False,  # nothing may be left, but the epoch is the same one
            "place": None,
            "parts": self.merged(parts) if parts else None,
        }


def apart(states: Sequence[State]) -> list[State]:
    """Return states, of which some may be several side by side, as states of one reader each."""
    return [each for state in states for each in state.get("all", [state])]


class Within(Stream[T_co]):
    """A part of a chain around one other: the base of those that change samples, their order, or put them together.

    Args:
        stream: The part within.
    """

    def __init__(self, stream: Stream[Any]) -> None:
        super().__init__()
        if not isinstance(stream, Stream):
            raise ConfigurationError(
                f"stream should be a part of asyncloader.streams, such as ShardedStream: {stream!r}"
            )
        self.stream, self.num_replicas = stream, stream.num_replicas

    def begin(self, reading: Reading, state: State | None) -> None:
        """Begin to read."""
        self.stream.begin(reading, None if state is None else state["stream"])

    def give(self, mark: Mark) -> None:
        """Note that a sample was given."""
        self.stream.give(mark)

    def state(self) -> State:
        """Return the state."""
        return {"kind": type(self).__name__, "stream": self.stream.state()}

    def merged(self, states: Sequence[State]) -> State:
        """Return one state of several."""
        check_kinds(self, states)
        return {"kind": type(self).__name__, "stream": self.stream.merged([state["stream"] for state in states])}

    def sources(self, mark: Mark) -> Iterator[tuple[Any, ...]]:
        """Yield what tells samples apart."""
        return self.stream.sources(mark)

    @property
    def keeps_order(self) -> bool:
        """Whether samples may be given in another order."""
        return self.stream.keeps_order


class _Samples(Iterator[Any]):
    """Iterates over a stream. What it returns is given: an interrupt before that loses nothing."""

    def __init__(self, stream: Stream[Any]) -> None:
        self._stream = stream
        self._has_begun = False
        self.is_left = False  # a part of the stream is read by another iterator

    def __next__(self) -> Any:
        stream = self._stream
        if stream._iterator is not self or self.is_left:
            raise RuntimeError(
                "this iterator was ended: another one over the same stream was begun, or a state was loaded"
            )
        if not self._has_begun:
            stream._start(self)
            self._has_begun = True
            self._epoch = stream.epoch
        elif stream._has_ended:
            raise StopIteration
        try:
            sample, mark = stream.take()
        except StopIteration:
            stream._has_ended = stream.epoch == self._epoch  # otherwise another one was set meanwhile
            raise
        stream.give(mark)
        return sample


def check_kinds(part: Stream[Any], states: Sequence[State]) -> None:
    """Raise an error if states are not of this kind of part.

    Raises:
        StateMismatchError: if they are not.
    """
    for state in states:
        if state.get("kind") != type(part).__name__:
            raise StateMismatchError("a part of the stream", state.get("kind"), type(part).__name__)


def noted(error: Exception, place: str) -> Exception:
    """Return an error with a note about its place. One that would look like the end of the stream becomes another."""
    if isinstance(error, StopIteration):
        error = RuntimeError(f"{type(error).__name__} was raised")
    error.add_note(f"Raised {place}.")
    return error
