"""What both kinds of iterators share: statistics, state, context managers, and a loop that turns."""

from __future__ import annotations

import asyncio
import copy
import os
import time
import weakref
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

from asyncloader.errors import LoaderClosedError
from asyncloader.iteration.checkpoint import Beginning, Record, check
from asyncloader.iteration.plan import set_epochs
from asyncloader.observe.meter import Meter
from asyncloader.observe.notices import warn
from asyncloader.observe.stats import LoaderStats

if TYPE_CHECKING:
    from asyncloader.loader import DataLoader

T_co = TypeVar("T_co", covariant=True)

_REPLICAS = (
    "For multiprocessing data-loading, this could be caused by not properly configuring the "
    "IterableDataset replica at each worker. Please see "
    "https://pytorch.org/docs/stable/data.html#torch.utils.data.IterableDataset for examples."
)

LONGEST_TURN_S = 0.002
"""`async for` over batches that are always ready lets its loop turn after this time. Seconds."""


class Faces(_BaseDataLoaderIter, Generic[T_co]):
    """What both kinds of iterators share: context managers, and a loop that turns."""

    _last_turn = 0.0
    _meter: Meter
    _record: Record
    _loader: weakref.ref[DataLoader[T_co]]

    def stats(self) -> LoaderStats:
        """Return where the time of this run has gone so far. Takes 20 us, in any thread."""
        return self._meter.stats()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as of the batches that were yielded: see :meth:`asyncloader.DataLoader.state_dict`."""
        return self._record.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state, with this iterator: what it was at is dropped, and its workers are started anew.

        Raises:
            StateMismatchError: if the state is of something else.
            LoaderClosedError: if the loader is gone.
        """
        loader = self._loader()
        if loader is None:
            raise LoaderClosedError("the loader of this iterator is gone; load the state into a new loader")
        check(state, loader)
        loader._epochs_when_loaded = set_epochs(self._index_sampler)
        self._begin_anew(loader, copy.deepcopy(state))

    def _begin_anew(self, loader: DataLoader[T_co], state: dict[str, Any]) -> None:
        raise NotImplementedError

    def _open_plan(self, loader: DataLoader[T_co], beginning: Beginning, **how: bool) -> None:
        """Put our reader of the sampler in the place of torch's, and tell the loader of this run."""
        plan, self._record = beginning.open(self, **how)
        self._sampler_iter = plan
        self._loader = weakref.ref(loader)
        loader._record = self._record

    def close(self) -> None:
        """End the run and let go of everything; wait for it, 3 s at most."""
        raise NotImplementedError

    async def aclose(self) -> None:
        """End the run as `close` does, without blocking the loop."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    def __iter__(self) -> Self:
        return self

    def __aiter__(self) -> Self:
        return self

    def _note_yielded(self) -> None:
        """Count a batch, and warn as torch does when an iterable dataset gives more than it said."""
        self._num_yielded += 1
        length = self._IterableDataset_len_called
        if length is not None and self._num_yielded > length and self._dataset_kind != _DatasetKind.Map:
            warn(
                f"Length of IterableDataset {self._dataset} was reported to be {length}"
                f"(when accessing len(dataloader)), but {self._num_yielded} samples have been fetched. "
                + (_REPLICAS if self._num_workers else "")
            )

    async def _let_the_loop_turn(self) -> None:
        now = time.monotonic()
        if now - self._last_turn > LONGEST_TURN_S:
            await asyncio.sleep(0)
            self._last_turn = time.monotonic()


def check_owner(pid: int) -> None:
    """Refuse to work in a fork of the process that made the iterator: its workers and its loop are not there."""
    if pid != os.getpid():
        raise LoaderClosedError(
            "this iterator belongs to the process that made it, not to a fork of it; call iter(loader) here"
        )
