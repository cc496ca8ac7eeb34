"""StatefulDataLoader, for programs that were written for torchdata's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from multiprocessing.context import BaseContext
from typing import Any, TypeVar

import torch
from torch.utils.data import Dataset, IterableDataset, Sampler

from asyncloader.errors import StateMismatchError
from asyncloader.loader import DataLoader
from asyncloader.protocols import SuppliesKeys
from asyncloader.run.rng_snapshot import KNOWN_SAMPLERS
from asyncloader.run.state import read_state
from asyncloader.samplers.ordered import ResumableSampler
from asyncloader.stateful.samplers import BatchSampler, RandomSampler

T_co = TypeVar("T_co", covariant=True)


class StatefulDataLoader(DataLoader[T_co]):
    """Our loader, with the order of torchdata's StatefulDataLoader (0.11).

    Where that order is torch's, as without ``shuffle``, both classes of ours are the same. States are ours;
    `load_state_dict` takes torchdata's as well, as that of :class:`asyncloader.DataLoader` does.

    Args:
        dataset: As in torch, and so on.
        batch_size: See :class:`asyncloader.DataLoader`.
        shuffle: See there; drawn as torchdata does, by `asyncloader.stateful.RandomSampler`.
        sampler: See there.
        batch_sampler: See there.
        num_workers: See there.
        collate_fn: See there.
        pin_memory: See there.
        drop_last: See there.
        timeout: See there.
        worker_init_fn: See there.
        multiprocessing_context: See there.
        generator: See there.
        options: The others of :class:`asyncloader.DataLoader`, ``snapshot_every_n_steps`` among them.
    """

    _waiting: dict[str, Any] | None = None
    """A state that was loaded, and is for another number of workers than there are."""

    def __init__(
        self,
        dataset: Dataset[T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: str | BaseContext | None = None,
        generator: torch.Generator | None = None,
        **options: Any,
    ) -> None:
        has_order = isinstance(dataset, (IterableDataset, SuppliesKeys))
        if shuffle and sampler is None and batch_sampler is None and not has_order:
            shuffle, sampler = None, RandomSampler(dataset, generator=generator)  # type: ignore[arg-type]
        super().__init__(
            dataset, batch_size, shuffle, sampler, batch_sampler, num_workers, collate_fn, pin_memory, drop_last,
            timeout, worker_init_fn, multiprocessing_context, generator, **options)  # fmt: skip
        is_lazy = sampler is None or type(sampler) in KNOWN_SAMPLERS or isinstance(sampler, ResumableSampler)
        if self.batch_size is not None and not is_lazy:
            # Past the guard of torch's, which refuses to have it set.
            vars(self)["batch_sampler"] = BatchSampler(self.sampler, self.batch_size, self.drop_last)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next ``iter`` or ``aiter`` go on from a state.

        Args:
            state: Of this loader, one that was made alike, or torchdata's (0.8 to 0.11). A state for another number of
                workers is refused by ``iter``, as in torchdata: the number may still be set.

        Raises:
            StateMismatchError: if it was taken of something else; it says what differs.
        """
        self._waiting = None
        try:
            super().load_state_dict(state)
        except StateMismatchError as error:
            if error.field != "num_workers":
                raise
            self._waiting, self._iterator = state, None  # persistent workers would go on without it

    def _load_waiting(self) -> None:
        if self._waiting is not None:
            super().load_state_dict(self._waiting)
            self._waiting = None

    def _get_iterator(self) -> Any:
        iterator = super()._get_iterator()
        if self.worker_init_fn is not None and self.num_workers:
            iterator.check_first()  # as torchdata's, `iter` raises what that function raises
        return iterator

    def _make_iterator(self, *, wait_for_start: bool) -> Any:
        self._load_waiting()
        return super()._make_iterator(wait_for_start=wait_for_start)

    def state_dict(self) -> dict[str, Any]:
        """Return a state of ours, with torchdata's word for the end of an epoch, which others read and write."""
        self._load_waiting()
        state = super().state_dict()
        return {**state, "_iterator_finished": state["finished"]}


def convert(state: dict[str, Any], loader: DataLoader[Any]) -> dict[str, Any]:
    """Write a state of torchdata's StatefulDataLoader down as one of ours.

    Args:
        state: Of torchdata 0.8 to 0.11. A state of ours is returned as it is.
        loader: What it is for: a loader of ours over such a dataset, with such samplers. Nothing of it moves.

    Raises:
        StateMismatchError: if the loader cannot go on from it; the error says why.
    """
    return read_state(state, loader._loader_options()).as_dict()
