"""A dataset whose samples are made once and kept: in memory for all workers of the machine, or on its disk."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch.utils.data import Dataset, IterableDataset

from asyncloader.async_face import batch_method, resolved, sample_method
from asyncloader.checks import at_least
from asyncloader.datasets.blocking import in_thread
from asyncloader.datasets.draw_watch import DrawWatch
from asyncloader.datasets.sample_store import MISSING, SampleStore, StoreUsage
from asyncloader.epochs import listeners
from asyncloader.errors import ConfigurationError
from asyncloader.machine import available_bytes
from asyncloader.protocols import (
    OpensDataset,
    has_samples,
    is_async_iterable,
    is_collated,
    probe,
)
from asyncloader.seeding.turns import sample_seed

T_co = TypeVar("T_co", covariant=True)

log = logging.getLogger("asyncloader")

_SUFFIX = ".samples"
_SHARE_OF_MEMORY = 0.5
_SHARE_OF_DISK = 0.9


class CachedDataset(OpensDataset, Dataset[T_co]):
    """Keep the samples of a dataset that is slow to read or to decode, as they are first made.

    Put what is random after the cache: ``CachedDataset(photos, "ram", transform=augment)`` decodes each photo once, and
    augments it in each epoch anew. Samples are pickled; each time they are made of the bytes that were kept, with one
    copy, and may be changed.

    Samples that have been kept stay. An epoch reads each sample once, so a cache that is too small for all, and threw
    out those that were used least recently, would lose each sample before its next use. When ``max_bytes`` are full,
    the other samples are read from the dataset as ever.

    An async dataset stays one, and only what is not there is awaited. Keys may be whatever a :class:`SharedDict` takes
    as keys; samples of others pass through.

    Args:
        dataset: A map-style dataset, plain or async.
        where: ``"ram"`` keeps one copy for all workers of this object, wherever they are started, in memory that is
            freed with the last of them (ranks can be given it, as :class:`SharedList`). A path is that of a folder,
            which is made; what is in it stays for later runs, and is shared by all who use it on this machine: workers,
            ranks, other runs. Each fingerprint, with the length of the dataset, has a file of its own there.
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

    When the disk is full, no further samples are kept; the run goes on, and the log says so once.

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
        _check(dataset, where, transform, max_bytes, fingerprint, epoch_independent)
        self._dataset = dataset
        self.transform = transform
        length = len(dataset) if hasattr(dataset, "__len__") else None
        self._run = secrets.token_bytes(16)  # who is told once that there is no room
        self._watch = DrawWatch(dataset)
        if where == "ram":
            self._store = SampleStore.in_memory(length, max_bytes or int(available_bytes() * _SHARE_OF_MEMORY))
        else:
            self._store = _on_disk(Path(where), length, max_bytes, repr((fingerprint, length)))
        if not probe(dataset, "__getitems__") or is_collated(dataset):  # a batch is no list of samples
            self.__getitems__ = None  # type: ignore[method-assign, assignment]  # samples are asked for one by one
        if batch_method(dataset) is None or is_collated(dataset):
            self.getitems = None  # type: ignore[method-assign, assignment]

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

    def __getitems__(self, keys: Sequence[Any]) -> list[T_co]:
        """Return the samples of a batch, those that are missing asked for together."""
        samples = [self._store.get(key) for key in keys]
        if missing := [at for at, sample in enumerate(samples) if sample is MISSING]:
            with self._watched():
                made = self.dataset.__getitems__([keys[at] for at in missing])
            for at, sample in zip(missing, made, strict=True):
                self._keep(keys[at], sample)
                samples[at] = sample
        return [self._transformed(sample) for sample in samples]

    async def getitem(self, key: Any) -> T_co:
        """Return a sample, from the cache or else of the dataset, without blocking the loop."""
        sample = await self._kept(key)
        if sample is MISSING:
            with self._watched():
                return await self._made_of(key, sample_method(self.dataset)(key))  # type: ignore[no-any-return]
        return await resolved(self._transformed(sample))  # type: ignore[no-any-return]

    async def getitems(self, keys: Sequence[Any]) -> list[T_co]:
        """Return the samples of a batch, those that are missing awaited together."""
        samples = [await self._kept(key) for key in keys]
        if missing := [at for at, sample in enumerate(samples) if sample is MISSING]:
            get_samples = batch_method(self.dataset)
            assert get_samples is not None
            with self._watched():
                made = await resolved(get_samples([keys[at] for at in missing]))
            for at, sample in zip(missing, made, strict=True):
                await self._keep_async(keys[at], sample)
                samples[at] = sample
        return [await resolved(self._transformed(sample)) for sample in samples]

    def usage(self) -> StoreUsage:
        """Return how many samples are kept, in how many bytes, and how many it may be."""
        return self._store.usage()

    def _transformed(self, sample: Any) -> Any:
        if self.transform is None:
            return sample
        self._watch.muddle()  # it may draw, while other samples are being made
        with sample_seed():  # so what it draws does not depend on whether the sample was kept
            return self.transform(sample)

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Say once on this machine if samples that are made here draw random numbers before they are kept."""
        before = self._watch.begin()
        yield
        drawn = self._watch.end(before)
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
        error = self._store.add(key, sample)
        if error is not None and self._store.first_to_tell(self._run):
            log.warning(
                "The cache of %s cannot be written to any more (%s): what it has is used, the rest is read from the "
                "dataset as ever.",
                type(self.dataset).__name__,
                error,
            )

    async def _made_of(self, key: Any, sample: Any) -> Any:
        sample = await resolved(sample)
        await self._keep_async(key, sample)
        return await resolved(self._transformed(sample))

    async def _kept(self, key: Any) -> Any:
        try:
            return self._store.get(key, wait=False)
        except BlockingIOError:
            return await in_thread(self._store.get, key)

    async def _keep_async(self, key: Any, sample: Any) -> None:
        if self._store.is_on_disk:
            await in_thread(self._keep, key, sample)
        else:
            self._keep(key, sample)


def _check(dataset: Any, where: Any, transform: Any, max_bytes: Any, fingerprint: Any, epoch_independent: bool) -> None:
    if is_collated(dataset) and not has_samples(dataset):
        raise ConfigurationError(
            f"samples are kept one by one, and {type(dataset).__name__} gives batches alone (collated = True); "
            "give it a __getitem__ as well"
        )
    if isinstance(dataset, IterableDataset) or is_async_iterable(dataset) or not _has_keys(dataset):
        raise ConfigurationError(
            f"samples are kept by their keys, and a {type(dataset).__name__} has none: it is no map-style dataset"
        )
    if not isinstance(where, (str, os.PathLike)) or not os.fspath(where):
        raise ConfigurationError(f'samples are kept in "ram" or in a folder, which is no {where!r}')
    if transform is not None and not callable(transform):
        raise ConfigurationError(f"transform is called with each sample, which {transform!r} cannot be")
    if max_bytes is not None:
        at_least("max_bytes", max_bytes, least=1)
    if fingerprint is not None and (not isinstance(fingerprint, str) or not fingerprint):
        raise ConfigurationError(f"fingerprint is a text, but got {fingerprint!r}")
    if fingerprint is None and where != "ram":
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


def _has_keys(dataset: Any) -> bool:
    return hasattr(type(dataset), "__getitem__") or hasattr(type(dataset), "__getitems__")


def _on_disk(folder: Path, length: int | None, max_bytes: int | None, contents: str) -> SampleStore:
    folder.mkdir(parents=True, exist_ok=True)
    fingerprint = hashlib.blake2b(contents.encode(), digest_size=32).digest()
    path = folder / f"{fingerprint.hex()[:32]}{_SUFFIX}"
    if max_bytes is None:
        there = path.stat().st_blocks * 512 if path.exists() else 0
        max_bytes = there + int(shutil.disk_usage(folder).free * _SHARE_OF_DISK)
    is_new = not path.exists()
    store = SampleStore.at(path, length, max_bytes, fingerprint)
    kept, others = store.usage(), _others(folder, path.name)
    log.info(
        "cache %s: %s, %d samples in %.1f MB, %s at most%s",
        path,
        "new" if is_new else "continued",
        kept.samples,
        kept.bytes / 1e6,
        f"{max_bytes / 1e6:,.1f} MB",
        f"; of other datasets, or earlier versions, {len(others)} files with {sum(others) / 1e6:,.1f} MB"
        * bool(others),
    )
    return store


def _others(folder: Path, name: str) -> list[int]:
    """Return the bytes on the disk of the other caches in the folder."""
    found = []
    for entry in os.scandir(folder):
        if entry.name.endswith(_SUFFIX) and entry.name != name:
            with contextlib.suppress(FileNotFoundError):
                found.append(entry.stat().st_blocks * 512)
    return found
