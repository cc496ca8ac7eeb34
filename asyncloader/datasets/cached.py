"""A dataset whose samples are made once and kept: in memory for all workers of the machine, or on its disk."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self, TypeVar

from torch.utils.data import IterableDataset

from asyncloader.async_face import resolved, sample_method
from asyncloader.checks import at_least
from asyncloader.datasets.blocking import in_thread
from asyncloader.datasets.numbers import ByNumber
from asyncloader.datasets.sample_store import MISSING, SampleStore, StoreUsage
from asyncloader.epochs import listeners
from asyncloader.errors import ConfigurationError
from asyncloader.machine import available_bytes
from asyncloader.protocols import is_async, is_async_iterable, is_resource, members
from asyncloader.seeding.generators import GLOBAL, check_of
from asyncloader.seeding.own_generators import generators_of
from asyncloader.seeding.turns import may_seed, sample_seed

T_co = TypeVar("T_co", covariant=True)

log = logging.getLogger("asyncloader")

_WATCHED = 4  # samples of each copy; to compare all states takes 0.1 ms
_SHARE_OF_MEMORY = 0.5
_SHARE_OF_DISK = 0.9


class CachedDataset(ByNumber[T_co]):
    """Keep the samples of a dataset that is slow to read or to decode, as they are first made.

    Put what is random after the cache: ``CachedDataset(photos, "ram", transform=augment)`` decodes each photo once, and
    augments it in each epoch anew. Samples are pickled; each time they are made of the bytes that were kept, with one
    copy, and may be changed.

    Samples that have been kept stay. An epoch reads each sample once, so a cache that is too small for all, and threw
    out those that were used least recently, would lose each sample before its next use. When ``max_bytes`` are full,
    the other samples are read from the dataset as ever.

    An async dataset stays one, and only what is not there is awaited. Samples are asked for one by one, also those of
    a dataset with ``__getitems__``. Keys may be whatever a :class:`SharedDict` takes
    as keys; samples of others pass through.

    Args:
        dataset: A map-style dataset, plain or async.
        where: ``"ram"`` keeps one copy for all workers of this object on this machine, in memory that is freed with the
            last of them (ranks can be given it, as :class:`SharedList`). A path is that of a folder, which is made;
            what is in it stays for later runs, and is shared by all who use it on this machine: workers, ranks, other
            runs. Each fingerprint, with the length of the dataset, has a file of its own there. On other machines a
            cache begins anew: in a folder of the same name, or with ``"ram"`` in the memory of each worker by itself.
        transform: Makes of what was kept what is returned, each time.
        max_bytes: How much to keep; by default half of the memory that is free now, or nine tenths of the disk that is.
        fingerprint: Names what is in a folder's cache, which outlives the code that has filled it; required there. Into
            this text belongs all that decides a sample: which files, in which version and split; how they are decoded;
            the transforms before the cache, and their options. Change it whenever one of these changes. The cache asks
            for it because code does not tell: a function that a method calls, a constant, a file may have changed.
        epoch_independent: The samples of this dataset are the same in every epoch, although it has `set_epoch`. Without
            this word such a dataset is refused, since samples of one epoch would come in all later ones; and with it
            the loader's `set_epoch` does not reach the dataset.

    The dataset is not to be changed once it is in a cache: samples that are kept stay as they were. After a change of
    its attributes, make another CachedDataset, in a folder with another fingerprint.

    Attributes:
        dataset: As given; cannot be set.
        transform: As given.

    Raises:
        ConfigurationError: The dataset has no keys (it is iterable), or has `set_epoch`; a folder has no fingerprint;
            an argument is of no use.
        OSError: The disk is full, or permissions forbid a cache at that path.

    When the disk is full, or the table of keys of a dataset without a length, no further samples are kept; the run goes
    on, and the log says so once.

    Example:
        >>> class Slow:
        ...     def __len__(self): return 3
        ...     def __getitem__(self, index): print("reading", index); return [index]
        >>> cached = CachedDataset(Slow(), "ram", transform=tuple)
        >>> cached[1], cached[1], cached.usage().samples
        reading 1
        ((1,), (1,), 1)
    """

    def __init__(
        self,
        dataset: Any,
        where: str | os.PathLike[str],
        *,
        transform: Callable[[Any], T_co] | None = None,
        max_bytes: int | None = None,
        fingerprint: str | None = None,
        epoch_independent: bool = False,
    ) -> None:
        _check(dataset, where, max_bytes, fingerprint, epoch_independent)
        self._dataset = dataset
        self.transform = transform
        length = len(dataset) if hasattr(dataset, "__len__") else None
        self._run = secrets.token_bytes(16)  # who is told once that there is no room
        self._num_watched = _WATCHED
        if where == "ram":
            self._store = SampleStore.in_memory(length, max_bytes or int(available_bytes() * _SHARE_OF_MEMORY))
        else:
            self._store = _on_disk(Path(where), length, max_bytes, repr((fingerprint, length)))

    @property
    def dataset(self) -> Any:
        """Whose samples are kept."""
        return self._dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: Any) -> T_co:
        """Return a sample, from the cache or else of the dataset."""
        sample = self._store.get(key)
        if sample is MISSING:
            with self._watched():
                sample = self.dataset[key]
            if hasattr(type(sample), "__await__"):  # of a dataset that is async alone
                return self._made_of(key, sample)  # type: ignore[return-value]
            self._keep(key, sample)
        return self._transformed(sample)  # type: ignore[no-any-return]

    async def getitem(self, key: Any) -> T_co:
        """Return a sample, from the cache or else of the dataset, without blocking the loop."""
        sample = await self._aside(self._store.get, key)
        if sample is MISSING:
            return await self._made_of(key, sample_method(self.dataset)(key))  # type: ignore[no-any-return]
        return await resolved(self._transformed(sample))  # type: ignore[no-any-return]

    @property
    def is_remote(self) -> bool:
        """Whether the dataset is async."""
        return is_async(self.dataset)

    def _resources(self) -> list[Any]:
        return list(filter(is_resource, members(self.dataset)))

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as entered:
            for resource in self._resources():
                await resource.__aenter__()
                entered.push_async_exit(resource.__aexit__)
            entered.pop_all()
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        async with contextlib.AsyncExitStack() as entered:
            for resource in self._resources():
                entered.push_async_exit(resource.__aexit__)

    def usage(self) -> StoreUsage:
        """Return how many samples are kept, in how many bytes, and how many it may be."""
        return self._store.usage()

    def _transformed(self, sample: Any) -> Any:
        if self.transform is None:
            return sample
        # So what it draws does not depend on whether the sample was kept.
        with sample_seed() if may_seed() else contextlib.nullcontext():
            return self.transform(sample)

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Say once if one of the first samples draws random numbers before it is kept, where nothing else may draw."""
        if not self._num_watched or threading.current_thread() is not threading.main_thread():
            yield
            return
        self._num_watched -= 1
        before = _states(self.dataset)
        yield
        drawn = [name for name, state in _states(self.dataset).items() if before.get(name, state) != state]
        other = bytes(255 - byte for byte in self._run)  # than is told that there is no room
        if drawn and self._store.first_to_tell(other):
            log.warning(
                "The samples of %s draw random numbers (from %s) before they are kept: CachedDataset returns the same "
                "random choice in every epoch. Take what is random out of the dataset and put it after the cache: "
                "CachedDataset(dataset, ..., transform=augment).",
                type(self.dataset).__name__,
                ", ".join(drawn[:3]),
            )

    def _keep(self, key: Any, sample: Any) -> None:
        why_not = self._store.add(key, sample)
        if why_not and self._store.first_to_tell(self._run):
            log.warning(
                "The cache of %s takes no more samples (%s): what it has is used, the rest is read from the dataset as "
                "ever.",
                type(self.dataset).__name__,
                why_not,
            )

    async def _made_of(self, key: Any, sample: Any) -> Any:
        sample = await resolved(sample)
        await self._aside(self._keep, key, sample)
        return await resolved(self._transformed(sample))

    async def _aside(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function that may ask the disk: then on a thread."""
        return await in_thread(function, *args) if self._store.is_on_disk else function(*args)


def _states(dataset: Any) -> dict[str, Any]:
    """Return what tells the states of the generators that a sample may draw from."""
    named = dict(zip(("torch", "random", "numpy.random"), GLOBAL, strict=True)) | generators_of(dataset)
    return {name: check_of(generator) for name, generator in named.items()}


def _check(dataset: Any, where: Any, max_bytes: Any, fingerprint: Any, epoch_independent: bool) -> None:
    has_keys = hasattr(type(dataset), "__getitem__") or hasattr(type(dataset), "__getitems__")
    if isinstance(dataset, IterableDataset) or is_async_iterable(dataset) or not has_keys:
        raise ConfigurationError(
            f"samples are kept by their keys, and a {type(dataset).__name__} has none: it is no map-style dataset"
        )
    if not isinstance(where, (str, os.PathLike)) or not os.fspath(where):
        raise ConfigurationError(f'samples are kept in "ram" or in a folder, which is no {where!r}')
    if max_bytes is not None:
        at_least("max_bytes", max_bytes, least=1)
    if where != "ram" and not (isinstance(fingerprint, str) and fingerprint):
        raise ConfigurationError(
            "a cache in a folder outlives the code that has filled it, and code does not tell whether samples would "
            'still be the same: give fingerprint="...", a text with all that decides a sample (which files, in which '
            "version and split; how they are decoded; the transforms before the cache, and their options), such as "
            'fingerprint="photos of May, train, resized to 224, v1". Change it whenever one of these changes'
        )
    if not epoch_independent and (listener := next(listeners(dataset), None)) is not None:
        raise ConfigurationError(
            f"{type(listener).__name__} has set_epoch, so its samples may be others in each epoch, and a cache returns "
            "those of the epoch that made them. Put the cache below it, around the part that is the same in each "
            "epoch; or, if all of its samples are the same in every epoch, say epoch_independent=True"
        )


def _on_disk(folder: Path, length: int | None, max_bytes: int | None, contents: str) -> SampleStore:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{hashlib.blake2b(contents.encode(), digest_size=16).hexdigest()}.samples"
    if max_bytes is None:
        there = path.stat().st_blocks * 512 if path.exists() else 0
        max_bytes = there + int(shutil.disk_usage(folder).free * _SHARE_OF_DISK)
    return SampleStore.at(path, length, max_bytes)
