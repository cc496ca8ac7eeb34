"""Samplers whose order can be looked at anywhere: the order is dealt out to ranks, states say how far it was read.

    seed, epoch ──> Order: position ──> index      the same on all ranks, nothing stored
                                    └─ rank r of R takes the positions r, r + R, r + 2 R ...

How far an epoch is, is therefore one number, the global cursor, whichever rank tells it.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from numbers import Integral
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch.utils.data import Sampler

from asyncloader import identity
from asyncloader.errors import ConfigurationError, StateMismatchError

STATE_VERSION = 1
T_co = TypeVar("T_co", covariant=True)

ENDLESS = 1 << 62
"""Stands for the length of an order without an end."""
_MOST_AT_ONCE = 4096
"""Indices that are computed at once: some 0.3 ms, and 0.4 MB with all that numpy needs meanwhile."""
_SPAN = 1 << 16
"""Positions of all ranks that they are spread over: a mixture looks at those between as well."""


class Order(NamedTuple):
    """The order of one epoch: a function from positions to indices.

    Attributes:
        length: How many positions it has; None if it has no end.
        indices_at: Returns the indices at some positions.
    """

    length: int | None
    indices_at: Callable[[NDArray[np.int64]], NDArray[np.int64]]


class HasOrder(ABC):
    """A sampler whose order other samplers can be given: it can be looked at anywhere."""

    @abstractmethod
    def order(self) -> Order:
        """Return the order of the epoch that is set, which does not change afterwards."""

    @abstractmethod
    def num_indices(self) -> int:
        """Return below which number all of its indices are."""


def place_in_group(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Return the number of ranks and which of them this is: as they are given, or else those of the process group.

    Raises:
        ConfigurationError: if the rank is not one of the ranks.
    """
    in_group = dist.is_available() and dist.is_initialized()
    ranks = (
        (dist.get_world_size() if in_group else 1) if num_replicas is None else count_of("num_replicas", num_replicas)
    )
    own = (dist.get_rank() if in_group else 0) if rank is None else count_of("rank", rank, least=None)
    if not 0 <= own < ranks:
        raise ConfigurationError(f"Invalid rank {own}, rank should be in the interval [0, {ranks - 1}]")
    return ranks, own


def count_of(name: str, value: Any, *, least: int | None = 1) -> int:
    """Return an integer, of numpy's too, as Python's own.

    Raises:
        ConfigurationError: if it is none, or below the least that is allowed.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or (least is not None and value < least):
        bound = "" if least is None else f" of at least {least}"
        raise ConfigurationError(f"{name} should be an integer{bound}, but got {value!r}")
    return int(value)


class Run:
    """An iterator of a sampler: where it began, and how much of it was read. Only the newest one tells states.

    Attributes:
        start: The cursor that it began at.
        epoch: The epoch that it is of.
        read: How many items were read of it.
        ends: For a run that plans windows: its units up to the end of each window; 0 before the first one.
    """

    def __init__(self, start: Any, epoch: int) -> None:
        self.start = start
        self.epoch = epoch
        self.read = 0
        self.ends = [0]


class ResumableSampler(Sampler[T_co], ABC):
    """Deals an epoch out to ranks; its states are for any number of ranks.

    Subclasses say how an epoch is dealt out, and what cursor is reached after so many items; a cursor is plain data
    that means the same on all ranks. Called from the thread that reads the sampler.

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
    """The cursor at which epochs begin."""
    _next: Any
    """The cursor at which the next iterator begins."""
    is_epoch_set = False
    """Whether `set_epoch` or `load_state_dict` was called since our loader has begun an epoch."""

    def __init__(self, num_replicas: int | None, rank: int | None, seed: int, drop_last: bool) -> None:
        self.num_replicas, self.rank = place_in_group(num_replicas, rank)
        self.seed = count_of("seed", seed, least=None)
        self.drop_last = drop_last
        self.epoch = 0
        self._begin_at(self._beginning)

    def __iter__(self) -> Iterator[T_co]:
        run = self._run = Run(self._next, self.epoch)
        self._next = self._beginning
        for item in self._deal(run):
            run.read += 1
            yield item

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
        if epoch != self.epoch:
            self._begin_at(self._beginning)
        self.epoch, self.is_epoch_set = count_of("epoch", epoch, least=None), True

    def state_dict(self) -> dict[str, Any]:
        """Return how far the newest iterator has been read.

        A loader with workers reads ahead of what it yields. :class:`asyncloader.DataLoader` takes that into account;
        for torch's use `state_after`.
        """
        return self.state_after(self._run.read)

    def state_after(self, items: int) -> dict[str, Any]:
        """Return the state after so many samples, or batches, of the newest iterator, counted on this rank."""
        return self._whole_state(self._bare_state(items))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iterator go on from a state, of whichever rank and number of ranks.

        Raises:
            StateMismatchError: if the state is of another sampler, data or order, or a later version.
        """
        check_state(state, self)
        self.epoch, self.is_epoch_set = state["epoch"], True
        self._begin_at(copy.copy(state["cursor"]))

    def _bare_state(self, items: int | None = None) -> dict[str, Any]:
        """Return the state after so many items, or now, without what may be changed later for items that come after it.

        A loader takes it after each batch.
        """
        return {
            "version": STATE_VERSION,
            "epoch": self.epoch,
            "cursor": self._cursor_after(self._run.read if items is None else items),
            "world": self.num_replicas,
            **identity.of(self),
            **self._more_state(),
        }

    def _whole_state(self, bare: dict[str, Any]) -> dict[str, Any]:
        """Return a state with what it lacks, as it is now."""
        return bare

    def forget_iterator(self) -> None:
        """Let the state be that in which the next iterator begins, though the newest one was left before its end."""
        self._begin_at(self._next)

    def _begin_at(self, cursor: Any) -> None:
        """Let the next iterator begin at a cursor."""
        self._next = cursor
        self._run = Run(cursor, self.epoch)

    @abstractmethod
    def _deal(self, run: Run) -> Iterator[T_co]:
        """Yield the items of this rank from the start of a run on."""

    @abstractmethod
    def _cursor_after(self, items: int) -> Any:
        """Return where the newest run is if all ranks have taken so many items."""

    @abstractmethod
    def _left(self, cursor: Any) -> int | None:
        """Return how many items of this rank are left of the epoch from a cursor on; None if it has no end."""

    @abstractmethod
    def _state_identity(self) -> dict[str, Any]:
        """Return what must be the same for a state to mean the same samples; what others return is added to this."""
        return {"seed": self.seed, "drop_last": self.drop_last}

    def _more_state(self) -> dict[str, Any]:
        """Return what else belongs in a state, and need not be the same."""
        return {}


class OrderedSampler(ResumableSampler[int], HasOrder):
    """Deals an order that can be looked at anywhere out to ranks, sample by sample. A cursor is a position in it.

    Where the samples cannot be divided evenly, those from the beginning of the epoch's order are repeated at its end,
    unless they are to be dropped. Called from the thread that reads it.
    """

    def __repr__(self) -> str:
        length = self._num_positions()
        return (
            f"<{type(self).__name__} rank {self.rank} of {self.num_replicas}, epoch {self.epoch}, "
            f"{self._cursor_after(self._run.read)} of {'endless' if length is None else length} samples>"
        )

    def left_after(self, state: dict[str, Any], next_epoch: int | None = None) -> int:
        """Return how many samples of this rank are left of an epoch after a state, of whichever number of ranks.

        Args:
            state: Where the epoch is.
            next_epoch: The epoch of the state is over, and this one is meant.
        """
        return len(self._positions(state["cursor"] if next_epoch is None else 0))

    @abstractmethod
    def _num_positions(self) -> int | None:
        """Return the length of the order, without making it; None if it has no end."""

    def _deal(self, run: Run) -> Iterator[int]:
        order = self.order()
        positions, at_once = self._positions(run.start), self._most_at_once
        for first in range(0, len(positions), at_once):
            piece = positions[first : first + at_once]
            # Positions beyond the end begin anew.
            places = np.arange(piece.start, piece.stop, piece.step) % (order.length or ENDLESS)
            yield from order.indices_at(places).tolist()

    @property
    def _most_at_once(self) -> int:
        """How many indices of this rank are computed at once, at most."""
        return max(64, min(_MOST_AT_ONCE, _SPAN // self.num_replicas))

    def _cursor_after(self, items: int) -> int:
        return int(self._run.start + items * self.num_replicas)

    def _left(self, cursor: int) -> int | None:
        return None if self._num_positions() is None else len(self._positions(cursor))

    def _positions(self, start: int) -> range:
        """Return the positions of this rank in the order of the epoch, from a global cursor on."""
        length = self._num_positions()
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
    if run is None or run is sampler._run:
        return sampler._bare_state()
    newest, epoch = sampler._run, sampler.epoch  # somebody else has begun to read the sampler, for a look at a batch
    sampler._run, sampler.epoch = run, run.epoch
    try:
        return sampler._bare_state()
    finally:
        sampler._run, sampler.epoch = newest, epoch


def newest_run(sampler: Any) -> Run | None:
    """Return the newest iterator of a sampler of ours; None for others."""
    return sampler._run if isinstance(sampler, ResumableSampler) else None


def whole_state(sampler: Any, bare: Any) -> Any:
    """Return a state with what was changed in the sampler since then, and holds for items after it."""
    return sampler._whole_state(bare) if isinstance(sampler, ResumableSampler) else bare


def check_state(state: dict[str, Any], sampler: Any) -> None:
    """See whether a state is one of a sampler like this.

    Raises:
        StateMismatchError: if it is not; it says what differs.
    """
    if state.get("version") != STATE_VERSION:
        raise StateMismatchError("version", state.get("version"), STATE_VERSION)
    if "kind" not in state:  # states of earlier versions did not say it: those of each kind have keys of their own
        keys, others = sampler.state_dict().keys() - {"kind"}, state.keys()
        if keys != others:
            raise StateMismatchError("kind", f"one with {sorted(others)}", f"{type(sampler).__name__} ({sorted(keys)})")
    identity.check(state, identity.of(sampler))
