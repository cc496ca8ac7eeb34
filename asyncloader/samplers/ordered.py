"""Samplers whose order can be looked at anywhere: the order is dealt out to ranks, states say how far it was read.

    seed, epoch ──> Order: position ──> index      the same on all ranks, nothing stored
                                    └─ rank r of R takes the positions r, r + R, r + 2 R ...

How far an epoch is, is therefore one number, the global cursor, whichever rank tells it.

    ResumableSampler      seed, epoch, ranks; iterators (`Run`), and states, which are read from a run
    └─ OrderedSampler     deals out an Order, sample by sample: a subclass says the order of an epoch, and nothing more
    └─ windows            deals out batches, which are planned window by window of such an order
"""

from __future__ import annotations

import contextlib
import copy
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch.utils.data import Sampler

from asyncloader import identity
from asyncloader.epochs import as_number
from asyncloader.errors import ConfigurationError, StateMismatchError

STATE_VERSION = 2
T_co = TypeVar("T_co", covariant=True)

ENDLESS = 1 << 62
"""Stands for the length of an order without an end."""
_FEWEST_AT_ONCE, _MOST_AT_ONCE = 64, 4096
"""Indices that are computed at once: 4,096 take some 0.3 ms, and 0.4 MB with all that numpy needs meanwhile."""
_SPAN = 1 << 16
"""Positions of all ranks that they are spread over: a mixture looks at those between as well."""
_lock = threading.Lock()
"""Held while indices are computed, or an order is changed: by no thread of a child that is forked meanwhile."""


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


class Order(NamedTuple):
    """The order of one epoch: a function from positions to indices.

    Attributes:
        length: How many positions it has; None if it has no end.
        indices_at: Returns the indices at some positions, an array of int64 for one.
        repeats: Positions beyond the end, which ranks are given so that all have equally many, are those from the
            beginning on. Otherwise the function knows such positions too.
    """

    length: int | None
    indices_at: Callable[[NDArray[np.int64]], NDArray[np.int64]]
    repeats: bool = True


def place_in_group(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Return the number of ranks and which of them this is: as they are given, or else those of the process group.

    Raises:
        ConfigurationError: if the rank is not one of the ranks.
    """
    in_group = dist.is_available() and dist.is_initialized()
    ranks, own = (dist.get_world_size(), dist.get_rank()) if in_group else (1, 0)
    ranks = ranks if num_replicas is None else count_of("num_replicas", num_replicas)
    own = own if rank is None else count_of("rank", rank, least=None)
    if not 0 <= own < ranks:
        raise ConfigurationError(f"Invalid rank {own}, rank should be in the interval [0, {ranks - 1}]")
    return ranks, own


def count_of(name: str, value: Any, *, least: int | None = 1) -> int:
    """Return an integer, of numpy's and torch's too, as Python's own.

    Raises:
        ConfigurationError: if it is none, or below the least that is allowed.
    """
    number = None if isinstance(value, bool) else as_number(value)
    if number is None or (least is not None and number < least):
        bound = "" if least is None else f" of at least {least}"
        raise ConfigurationError(f"{name} should be an integer{bound}, but got {value!r}")
    return number


def length_of(samples: Any) -> int:
    """Return how many samples there are: of a dataset, or as a number of any kind.

    Raises:
        ConfigurationError: for a sampler: an order is made here.
    """
    if isinstance(samples, Sampler):
        raise ConfigurationError(
            f"the order of a {type(samples).__name__} would be ignored: give the dataset, or its length"
        )
    number = as_number(samples)
    return len(samples) if number is None else number


class Run:
    """One iterator of a sampler: where it began, and how much of it was read. States are read from it.

    Attributes:
        start: The cursor that it began at.
        epoch: The epoch that it is of.
        is_begun: It was begun; otherwise it stands for an iterator that is still to be made.
        read: How many items were read of it.
        within: For a sampler around another one: the run of that one.
        ends: For a sampler that plans windows: its units up to the end of each window that it has planned.
    """

    def __init__(self, start: Any, epoch: int, *, is_begun: bool) -> None:
        self.start = start
        self.epoch = epoch
        self.is_begun = is_begun
        self.read = 0
        self.within: Run | None = None
        self.ends: list[int] = [0]


class ResumableSampler(Sampler[T_co], ABC):
    """Deals an epoch out to ranks; its states are for any number of ranks.

    Subclasses say how an epoch is dealt out from a cursor on, what cursor is reached after so many items, and how many
    are left; a cursor is plain data that means the same on all ranks. Attributes that are plain values (numbers, texts)
    are part of states, and a state with others is refused: those that say which samples come, and so should be all but
    what has a name with an underscore. Called from the thread that reads the sampler.

    :class:`asyncloader.DataLoader` sets the next epoch by itself where nobody has set one since the last one began.
    With other loaders, `set_epoch` is to be called before each epoch.

    Args:
        num_replicas: Ranks that share an epoch; by default those of the process group, or 1 without one.
        rank: Which of them this is; by default that of the process group, or 0.
        seed: The same on all ranks.
        drop_last: Whether to leave out, at the end of an epoch, what cannot be divided evenly.

    Raises:
        ConfigurationError: if the rank is not one of the ranks, or a number is no integer.
    """

    _beginning: ClassVar[Any] = 0
    num_replicas: int
    rank: int
    """The cursor at which epochs begin."""
    _may_differ: ClassVar[frozenset[str]] = frozenset({"num_replicas", "rank", "epoch", "is_epoch_set", "dataset"})
    """Attributes that are no part of states."""
    is_epoch_set: bool = False
    """Whether `set_epoch` or `load_state_dict` was called since our loader has begun an epoch."""
    _next: Any
    """The cursor at which the next iterator begins; None for the beginning of the epoch."""
    _run: Run
    """The newest iterator, or what stands for the next one."""

    def __init__(
        self,
        *,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self.num_replicas, self.rank = place_in_group(num_replicas, rank)
        self.seed: int = count_of("seed", seed, least=None)
        self.drop_last = drop_last
        self.epoch: int = 0
        self._reading = 0
        self._is_begun = False  # something of the reading may have been read
        self._is_announced = False  # a loader has begun the reading, whose first item is still to be read
        self._begin_at(None)

    def __iter__(self) -> Iterator[T_co]:
        return self._deal()

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} rank {self.rank} of {self.num_replicas}, epoch {self.epoch}, "
            f"at {self._cursor_after(self._run, self._run.read)}>"
        )

    def __len__(self) -> int:
        """Return the items of this rank in a whole epoch: the one that is set.

        Raises:
            TypeError: if it has no end.
        """
        count = self._left(self._beginning)
        if count is None:
            raise TypeError(f"this {type(self).__name__} has no end, and so no length")
        return count

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iterator is of; to be called before each. A state of another epoch is dropped."""
        number = count_of("epoch", epoch, least=None)
        if number != self.epoch:
            self.epoch = number
            self._reading += self._is_begun
            self._is_begun = self._is_announced = False
            self._begin_at(None)
        self.is_epoch_set = True

    def state_dict(self) -> dict[str, Any]:
        """Return how far the newest iterator has been read.

        A loader with workers reads ahead of what it yields. :class:`asyncloader.DataLoader` takes that into account;
        for torch's use `state_after`.
        """
        return self.state_after(self._run.read)

    def state_after(self, items: int) -> dict[str, Any]:
        """Return the state after so many samples, or batches, of the newest iterator, counted on this rank."""
        return self._whole_state(self._bare_state(self._run, items))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iterator go on from a state, of whichever rank and number of ranks.

        Raises:
            StateMismatchError: if the state is of another sampler, data or order, or a later version.
        """
        self._check_state(state)
        self.epoch, self.is_epoch_set = state["epoch"], True
        self._reading += 1
        self._is_begun, self._is_announced = state["is_begun"], False
        self._begin_at(copy.copy(state["cursor"]))

    def announce_reading(self) -> None:
        """Begin a reading, whose first item is read later: a loader that begins an epoch calls it."""
        if self._next is None:
            self.begin_reading()
            self._is_announced = True
        self._begin_at(self._next)

    def begin_reading(self) -> None:
        """Let what is read from now on be another reading: of the next epoch, or of the same one from its beginning."""
        self._reading += self._is_begun
        self._is_begun = True

    def _check_state(self, state: dict[str, Any]) -> None:
        """See whether a state is one of a sampler like this.

        Raises:
            StateMismatchError: if it is not; it says what differs.
        """
        if state.get("version") != STATE_VERSION:
            raise StateMismatchError("version", state.get("version"), STATE_VERSION)
        identity.check(state, identity.of(self))

    def _begin_run(self) -> Run:
        """Return the run of an iterator that is read for the first time."""
        if self._next is None and not self._is_announced:
            self.begin_reading()
        self._is_begun, self._is_announced = True, False
        self._begin_at(self._next)
        self._next = None
        return self._run

    def _begin_at(self, cursor: Any) -> None:
        """Let the next iterator begin at a cursor; None for the beginning of the epoch."""
        self._next = cursor
        self._run = self._new_run(self._beginning if cursor is None else cursor)

    def _new_run(self, start: Any) -> Run:
        return Run(start, self.epoch, is_begun=self._is_begun)

    def _bare_state(self, run: Run, items: int) -> dict[str, Any]:
        """Return the state after so many items of a run, without what may be changed later for items after these.

        A loader takes it after each batch.
        """
        return {
            "version": STATE_VERSION,
            "epoch": run.epoch,
            "is_begun": run.is_begun,
            "cursor": self._cursor_after(run, items),
            "world": self.num_replicas,
            **identity.of(self),
        }

    def _whole_state(self, bare: dict[str, Any]) -> dict[str, Any]:
        """Return a state with what it lacks, as it is now."""
        return bare

    def _state_identity(self) -> dict[str, Any]:
        """Return what must be the same for a state to mean the same samples."""
        return {
            name: value
            for name, value in vars(self).items()
            if not name.startswith("_") and name not in self._may_differ and isinstance(value, identity.SCALARS)
        }

    def _copy(self) -> Self:
        """Return a sampler of its own, which loads states without a change to this one."""
        return copy.copy(self)

    @abstractmethod
    def _deal(self) -> Iterator[T_co]:
        """Begin a run and yield the items of this rank, counting each before it is yielded."""

    @abstractmethod
    def _cursor_after(self, run: Run, items: int) -> Any:
        """Return where a run is if all ranks have taken so many items."""

    @abstractmethod
    def _left(self, cursor: Any) -> int | None:
        """Return how many items of this rank are left of the epoch from a cursor on; None if it has no end."""


class OrderedSampler(ResumableSampler[int]):
    """Deals an order that can be looked at anywhere out to ranks, sample by sample. A cursor is a position in it.

    A subclass says the order of an epoch (`order`), and nothing more: states, epochs, ranks and lengths follow. Its
    attributes that are plain values are part of states, and a state with others is refused.

    Where the samples cannot be divided evenly, those from the beginning of the epoch's order are repeated at its end,
    unless they are to be dropped. Called from the thread that reads it.

    Args:
        num_replicas: Ranks that share an epoch; by default those of the process group, or 1 without one.
        rank: Which of them this is; by default that of the process group, or 0.
        seed: The same on all ranks.
        drop_last: Whether to leave out, at the end of an epoch, what cannot be divided evenly.

    Raises:
        ConfigurationError: if the rank is not one of the ranks, or a number is no integer.

    Example:
        >>> class Strided(OrderedSampler):
        ...     def __init__(self, length, stride, **place):
        ...         super().__init__(**place)
        ...         self.length, self.stride = length, stride
        ...
        ...     def order(self):
        ...         return Order(self.length, lambda positions: (positions * self.stride + self.epoch) % self.length)
        >>> list(Strided(7, 3, num_replicas=2, rank=1))
        [3, 2, 1, 0]
    """

    _version = 0
    """How often the order was changed while it was read."""
    _planned = 0
    """Up to which position a sampler around this one has planned the epoch."""

    @abstractmethod
    def order(self) -> Order:
        """Return the order of the epoch that is set: a function of `seed` and `epoch`, the same on all ranks."""

    def num_indices(self) -> int | None:
        """Return below which number all of its indices are, if that is known: batch samplers compare it."""
        return self.order().length

    def _deal(self) -> Iterator[int]:
        run = self._begin_run()
        order = self.order()
        positions = self._positions(run.start, order.length)
        turn = order.length if order.length and order.repeats else ENDLESS
        at_once, version = _FEWEST_AT_ONCE, -1
        while (begin := run.read) < len(positions):
            with _lock:
                at_once = min(2 * at_once, self._most_at_once) if version == self._version else _FEWEST_AT_ONCE
                version = self._version
                part = positions[begin : begin + at_once]
                piece = order.indices_at(np.arange(part.start, part.stop, part.step) % turn).tolist()
            for index in piece:
                run.read += 1  # first of all: from here on `_changed_from` refuses this position
                if version != self._version:  # it may have changed just before: it is looked up once more
                    run.read -= 1
                    break
                yield index

    @property
    def _most_at_once(self) -> int:
        """How many indices of this rank are computed at once, at most."""
        return max(_FEWEST_AT_ONCE, min(_MOST_AT_ONCE, _SPAN // self.num_replicas))

    @contextlib.contextmanager
    def _changed_from(self, at: int) -> Iterator[None]:
        """Change the order of the epoch from a position on, in what is inside. In any thread.

        A thread that reads meanwhile has claimed its position before this looks: then it is refused. Or it claims one
        afterwards, and sees the new version: then it waits for the lock, and reads what has changed.

        Raises:
            ConfigurationError: if samples beyond that position were read, or planned by a sampler around this one.
        """
        with _lock:
            self._version += 1
            first = max(self._planned, self._cursor_after(self._run, self._run.read)) if self._is_begun else 0
            if at < first:
                raise ConfigurationError(
                    f"weights can change from sample {first} on, but not from {at}: those before it are drawn already"
                )
            yield

    def _begin_at(self, cursor: int | None) -> None:
        super()._begin_at(cursor)
        self._planned = 0

    def _cursor_after(self, run: Run, items: int) -> int:
        return int(run.start + items * self.num_replicas)

    def _left(self, cursor: int) -> int | None:
        length = self.order().length
        return None if length is None else len(self._positions(cursor, length))

    def _positions(self, start: int, length: int | None) -> range:
        """Return the positions of this rank in an order of some length, from a global cursor on."""
        left = max(0, (ENDLESS if length is None else length) - start)
        each = left // self.num_replicas if self.drop_last else -(-left // self.num_replicas)
        return range(start + self.rank, start + each * self.num_replicas, self.num_replicas)


def bare_state(sampler: Any, run: Run | None = None) -> Any:
    """Return a sampler's state of now, without what `whole_state` adds.

    A state of a class of the user's, which may say more, is whole.

    Args:
        sampler: Any sampler with a state.
        run: The iterator of it that is meant, as `newest_run` gives it; by default the newest one.
    """
    if not (isinstance(sampler, ResumableSampler) and type(sampler).state_dict is ResumableSampler.state_dict):
        return sampler.state_dict()
    run = run or sampler._run
    return sampler._bare_state(run, run.read)


def newest_run(sampler: Any) -> Run | None:
    """Return the newest iterator of a sampler of ours; None for others."""
    return sampler._run if isinstance(sampler, ResumableSampler) else None


def whole_state(sampler: Any, bare: Any) -> Any:
    """Return a state with what was changed in the sampler since then, and holds for items after it."""
    return sampler._whole_state(bare) if isinstance(sampler, ResumableSampler) else bare
