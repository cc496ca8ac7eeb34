"""Samplers whose order can be looked at anywhere: the order is dealt out to ranks, states say how far it was read.

    seed, epoch ──> Order: position ──> index      the same on all ranks, nothing stored
                                    └─ rank r of R takes the positions r, r + R, r + 2 R ...

How far an epoch is, is therefore one number, the global cursor, whichever rank tells it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

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
    ranks = num_replicas or (dist.get_world_size() if in_group else 1)
    own = rank if rank is not None else (dist.get_rank() if in_group else 0)
    if not 0 <= own < ranks:
        raise ConfigurationError(f"Invalid rank {own}, rank should be in the interval [0, {ranks - 1}]")
    return ranks, own


class ResumableSampler(Sampler[T_co], ABC):
    """Deals an epoch out to ranks; its states are for any number of ranks.

    Args:
        num_replicas: Ranks that share an epoch; by default those of the process group, or 1 without one.
        rank: Which of them this is; by default that of the process group, or 0.
        seed: The same on all ranks.
        drop_last: Whether to leave out, at the end of an epoch, what cannot be divided evenly.

    Raises:
        ConfigurationError: if the rank is not one of the ranks.
    """

    def __init__(self, num_replicas: int | None, rank: int | None, seed: int, drop_last: bool) -> None:
        self.num_replicas, self.rank = place_in_group(num_replicas, rank)
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        self._begin_at(None)

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iterator is of; to be called before each. A state of another epoch is dropped."""
        if epoch != self.epoch:
            self._begin_at(None)
        self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """Return how far the newest iterator has been read.

        A loader with workers reads ahead of what it yields. :class:`asyncloader.DataLoader` takes that into account;
        for torch's use `state_after`.
        """
        return self._state_at(self._cursor())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iterator go on from a state, of whichever rank and number of ranks.

        Raises:
            StateMismatchError: if the state is of another sampler, data or order, or a later version.
        """
        check_state(state, self)
        self.epoch = state["epoch"]
        self._begin_at(state["cursor"])

    @abstractmethod
    def _begin_at(self, cursor: Any) -> None:
        """Let the next iterator begin where a state's cursor is, or with None at the beginning of the epoch."""

    @abstractmethod
    def _cursor(self) -> Any:
        """Return how far the newest iterator is, if all ranks have taken as much as this one."""

    @abstractmethod
    def _state_identity(self) -> dict[str, Any]:
        """Return what must be the same for a state to mean the same samples; what others return is added to this."""
        return {"seed": self.seed, "drop_last": self.drop_last}

    def _state_at(self, cursor: Any) -> dict[str, Any]:
        return {
            "version": STATE_VERSION,
            "epoch": self.epoch,
            "cursor": cursor,
            "world": self.num_replicas,
            **identity.of(self),
        }


class OrderedSampler(ResumableSampler[int], HasOrder):
    """Deals an order that can be looked at anywhere out to ranks, sample by sample.

    Where the samples cannot be divided evenly, those from the beginning of the epoch's order are repeated at its end,
    unless they are to be dropped. Called from the thread that reads it.
    """

    def __repr__(self) -> str:
        length = self._num_positions()
        return (
            f"<{type(self).__name__} rank {self.rank} of {self.num_replicas}, epoch {self.epoch}, "
            f"{self._cursor()} of {'endless' if length is None else length} samples>"
        )

    def __len__(self) -> int:
        """Return the samples of this rank in a whole epoch.

        Raises:
            TypeError: if it has no end.
        """
        length = self._num_positions()
        if length is None:
            raise TypeError(f"this {type(self).__name__} has no end, and so no length")
        return len(self._positions(0, length))

    def __iter__(self) -> Iterator[int]:
        run = self._run = _Run(self._resume_at)
        self._resume_at = 0
        order = self.order()
        length = ENDLESS if order.length is None else order.length
        positions = self._positions(run.start, length)
        at_once = max(64, min(_MOST_AT_ONCE, _SPAN // self.num_replicas))
        for first in range(0, len(positions), at_once):
            piece = positions[first : first + at_once]
            # Positions beyond the end begin anew.
            for index in order.indices_at(np.arange(piece.start, piece.stop, piece.step) % length).tolist():
                run.read += 1
                yield index

    def state_after(self, samples: int) -> dict[str, Any]:
        """Return the state after so many samples of the newest iterator, counted on this rank."""
        return self._state_at(self._run.start + samples * self.num_replicas)

    def left_after(self, state: dict[str, Any], next_epoch: int | None = None) -> int:
        """Return how many samples of this rank are left of an epoch after a state, of whichever number of ranks.

        Args:
            state: Where the epoch is.
            next_epoch: The epoch of the state is over, and this one is meant.
        """
        cursor = state["cursor"] if next_epoch is None else 0
        return len(self._positions(cursor, self._num_positions() or ENDLESS))

    @abstractmethod
    def _num_positions(self) -> int | None:
        """Return the length of the order, without making it."""

    _resume_at: int

    def _begin_at(self, cursor: int | None) -> None:
        self._resume_at = cursor or 0
        self._run = _Run(self._resume_at)

    def _cursor(self) -> int:
        return self._run.start + self._run.read * self.num_replicas

    def _positions(self, start: int, length: int) -> range:
        """Return the positions of this rank in the order of the epoch, from a global cursor on."""
        left = max(0, length - start)
        each = left // self.num_replicas if self.drop_last else -(-left // self.num_replicas)
        return range(start + self.rank, start + each * self.num_replicas, self.num_replicas)


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


class _Run:
    """One iterator: where it began, and what was read of it."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.read = 0
