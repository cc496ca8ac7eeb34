"""A dataset whose samples are made once and kept: a file for each, in a folder.

    folder / hash of fingerprint and length / 3f / hash of the key        checksum | pickle

A file is written beside its place, and renamed into it. So any number of processes fill and read a folder without a
lock, and one that is killed leaves no half sample. The checksum is for a crash of the machine, after which a file may
be there without its content. Files that were written stay in the page cache as long as there is memory.

Nothing is ever taken out: an epoch reads every sample once, so what was used least recently is as likely to be wanted
next as anything else, and a cache that is too small for all would throw out each sample before its next use.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import operator
import os
import pickle
import secrets
import shutil
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self, TypeVar

from torch.utils.data import Dataset, IterableDataset

from asyncloader.async_face import resolved, sample_method
from asyncloader.datasets.blocking import in_thread
from asyncloader.datasets.records import pickled
from asyncloader.epochs import listeners
from asyncloader.errors import ConfigurationError
from asyncloader.log import log
from asyncloader.protocols import is_async, is_async_iterable, is_resource, members
from asyncloader.seeding.generators import GLOBAL, check_of
from asyncloader.seeding.own_generators import generators_of
from asyncloader.seeding.turns import may_seed, sample_seed

T_co = TypeVar("T_co", covariant=True)


_MISSING: Any = object()
_WATCHED = 4  # samples of each copy; to compare all states takes 0.1 ms
_CHECK_BYTES = 4
_LEFT_FREE = 0.1  # of the disk


class CachedDataset(Dataset[T_co]):
    """Keep the samples of a dataset that is slow to read or to decode, as they are first made.

    Put what is random after the cache: ``CachedDataset(photos, folder, fingerprint="v1", transform=augment)`` decodes
    each photo once, and augments it in each epoch anew. Samples are pickled; each time they are made of the file that
    was kept, and may be changed.

    Samples that have been kept stay. When nine tenths of the disk are full, the other samples are read from the dataset
    as ever, which the log says once in each process.

    An async dataset stays one, and only what is not there is awaited. Samples are asked for one by one, also those of
    a dataset with ``__getitems__``. Keys are whole numbers or texts.

    Args:
        dataset: A map-style dataset, plain or async.
        folder: Where samples are kept, on a disk of this machine. It is made; what is in it stays for later runs, and
            is shared by all who use it: workers, ranks, other runs. Where there is no disk, take a folder in memory
            (``/dev/shm``). Other machines have a folder of the same name for themselves.
        fingerprint: Names what is in the cache, which outlives the code that has filled it. Into this text belongs all
            that decides a sample: which files, in which version and split; how they are decoded; the transforms before
            the cache, and their options. Change it whenever one of these changes. The cache asks for it because code
            does not tell: a function that a method calls, a constant, a file may have changed. Each fingerprint, with
            the length of the dataset, has a folder of its own.
        transform: Makes of what was kept what is returned, each time.
        epoch_independent: The samples of this dataset are the same in every epoch, although it has `set_epoch`. Without
            this word such a dataset is refused, since samples of one epoch would come in all later ones; and with it
            the loader's `set_epoch` does not reach the dataset.

    The dataset is not to be changed once it is in a cache: samples that are kept stay as they were. After a change of
    its attributes, make another CachedDataset, with another fingerprint.

    Attributes:
        dataset: As given; cannot be set.
        transform: As given.

    Raises:
        ConfigurationError: The dataset has no keys (it is iterable), or has `set_epoch`; the fingerprint is no text.

    Example:
        >>> import tempfile
        >>> class Slow:
        ...     def __len__(self): return 3
        ...     def __getitem__(self, index): print("reading", index); return [index]
        >>> cached = CachedDataset(Slow(), tempfile.mkdtemp(), fingerprint="numbers, v1", transform=tuple)
        >>> cached[1], cached[1]
        reading 1
        ((1,), (1,))
    """

    def __init__(
        self,
        dataset: Any,
        folder: str | os.PathLike[str],
        *,
        fingerprint: str,
        transform: Callable[[Any], T_co] | None = None,
        epoch_independent: bool = False,
    ) -> None:
        _check(dataset, fingerprint, epoch_independent)
        self._dataset = dataset
        self.transform = transform
        length = len(dataset) if hasattr(dataset, "__len__") else None
        self._folder = Path(folder, _hash((fingerprint, length)))
        self._has_room = True
        self._num_watched = _WATCHED

    @property
    def dataset(self) -> Any:
        """Whose samples are kept."""
        return self._dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[T_co]:
        """Return all samples: Python would ask for one after the other until one is an IndexError."""
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, key: Any) -> T_co:
        """Return a sample, from the cache or else of the dataset."""
        sample = self._kept(key)
        if sample is _MISSING:
            with self._watched():
                sample = self.dataset[key]
            if hasattr(type(sample), "__await__"):  # of a dataset that is async alone
                return self._made_of(key, sample)  # type: ignore[return-value]
            self._keep(key, sample)
        return self._transformed(sample)  # type: ignore[no-any-return]

    async def getitem(self, key: Any) -> T_co:
        """Return a sample, from the cache or else of the dataset, without blocking the loop."""
        sample = await in_thread(self._kept, key)
        if sample is _MISSING:
            return await self._made_of(key, sample_method(self.dataset)(key))  # type: ignore[no-any-return]
        return await resolved(self._transformed(sample))  # type: ignore[no-any-return]

    async def _made_of(self, key: Any, sample: Any) -> Any:
        sample = await resolved(sample)
        await in_thread(self._keep, key, sample)
        return await resolved(self._transformed(sample))

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

    def _transformed(self, sample: Any) -> Any:
        if self.transform is None:
            return sample
        # So what it draws does not depend on whether the sample was kept.
        with sample_seed() if may_seed() else contextlib.nullcontext():
            return self.transform(sample)

    def _place(self, key: Any) -> Path:
        """Return where the sample of a key is.

        Raises:
            TypeError: The key is neither a whole number nor a text.
        """
        name = _hash(key if isinstance(key, str) else operator.index(key))
        return self._folder / name[:2] / name

    def _kept(self, key: Any) -> Any:
        """Return a sample that is kept, or _MISSING.

        Raises:
            Exception: Unpickling the sample failed; a note names the file.
        """
        place = self._place(key)
        try:
            data = place.read_bytes()
        except FileNotFoundError:
            return _MISSING
        content = memoryview(data)[_CHECK_BYTES:]
        if _check_of(content) != data[:_CHECK_BYTES]:
            return _MISSING
        try:
            return pickle.loads(content)
        except Exception as error:
            error.add_note(
                f"It is the sample {key!r} of a cache, {place}. If its code has changed since, give the cache another "
                "fingerprint."
            )
            raise

    def _keep(self, key: Any, sample: Any) -> None:
        """Keep a sample, if there is room.

        Raises:
            Exception: Pickling the sample failed.
        """
        if not self._has_room:
            return
        content, place = pickled(sample), self._place(key)
        beside = place.with_suffix(f".{secrets.token_hex(4)}")
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            disk = shutil.disk_usage(self._folder)
            if disk.free < _LEFT_FREE * disk.total:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(self._folder))
            beside.write_bytes(_check_of(content) + content)
            beside.rename(place)
        except OSError as error:
            with contextlib.suppress(OSError):
                beside.unlink()
            self._has_room = False
            log.warning(
                "The cache of %s takes no more samples (%s): what it has is used, the rest is read from the dataset as "
                "ever.",
                type(self.dataset).__name__,
                error,
            )

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Say so if one of the first samples draws random numbers before it is kept, where nothing else may draw."""
        if not self._num_watched or threading.current_thread() is not threading.main_thread():
            yield
            return
        self._num_watched -= 1
        before = _states(self.dataset)
        yield
        drawn = [name for name, state in _states(self.dataset).items() if before.get(name, state) != state]
        if drawn:
            self._num_watched = 0
            log.warning(
                "The samples of %s draw random numbers (from %s) before they are kept: CachedDataset returns the same "
                "random choice in every epoch. Take what is random out of the dataset and put it after the cache: "
                "CachedDataset(dataset, ..., transform=augment).",
                type(self.dataset).__name__,
                ", ".join(drawn[:3]),
            )


def _hash(key: Any) -> str:
    """Return a name for a file that is the same in every process."""
    return hashlib.blake2b(repr(key).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _check_of(content: Any) -> bytes:
    return zlib.crc32(content).to_bytes(_CHECK_BYTES, "little")


def _states(dataset: Any) -> dict[str, Any]:
    """Return what tells the states of the generators that a sample may draw from."""
    named = dict(zip(("torch", "random", "numpy.random"), GLOBAL, strict=True)) | generators_of(dataset)
    return {name: check_of(generator) for name, generator in named.items()}


def _check(dataset: Any, fingerprint: Any, epoch_independent: bool) -> None:
    has_keys = hasattr(type(dataset), "__getitem__") or hasattr(type(dataset), "__getitems__")
    if isinstance(dataset, IterableDataset) or is_async_iterable(dataset) or not has_keys:
        raise ConfigurationError(
            f"samples are kept by their keys, and a {type(dataset).__name__} has none: it is no map-style dataset"
        )
    if not (isinstance(fingerprint, str) and fingerprint):
        raise ConfigurationError(
            "a cache outlives the code that has filled it, and code does not tell whether samples would still be the "
            'same: give fingerprint="...", a text with all that decides a sample (which files, in which '
            "version and split; how they are decoded; the transforms before the cache, and their options), such as "
            'fingerprint="photos of May, train, resized to 224, v1". Change it whenever one of these changes'
        )
    if not epoch_independent and (listener := next(listeners(dataset), None)) is not None:
        raise ConfigurationError(
            f"{type(listener).__name__} has set_epoch, so its samples may be others in each epoch, and a cache returns "
            "those of the epoch that made them. Put the cache below it, around the part that is the same in each "
            "epoch; or, if all of its samples are the same in every epoch, say epoch_independent=True"
        )
