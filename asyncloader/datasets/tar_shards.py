"""The samples of tar files by number, in any order."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from asyncloader.checks import at_least
from asyncloader.datasets.errors import MAX_BYTES, too_large
from asyncloader.datasets.kept_blocks import BlockDataset
from asyncloader.datasets.source import Part, Source, Version, listed, path_of
from asyncloader.datasets.tar import find_samples, read_sample
from asyncloader.datasets.whole_file import in_one_piece
from asyncloader.errors import ConfigurationError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

T_co = TypeVar("T_co", covariant=True)

log = logging.getLogger("asyncloader")

_BRACES = re.compile(r"\{([^{}]*)\}")
_FORMAT = 4


class TarShards(BlockDataset[T_co]):
    """Serve the samples of tar files by number: a map-style dataset, for any sampler.

    The layout is `WebDataset <https://github.com/webdataset/webdataset>`_'s: ``shard-0003.tar`` holds ``a/17.jpg``,
    ``a/17.cls``, ``a/18.jpg``, ... The files of a sample have the same name up to the first dot after the last slash,
    and follow each other.

    To make the dataset, each shard is looked through once, header by header; where the samples are is kept in a folder
    of the user's cache, for this version of the shard. Remote shards are looked through by a process of their own.

    A random order over shards that lie on disks or elsewhere costs a read for each sample. A
    :class:`~asyncloader.samplers.BlockShuffleSampler` over `block_sizes`, with `cache_bytes` for a window of blocks,
    reads block by block.

    Args:
        paths: The shards: paths and urls (``http``, ``https``, ``s3``, ``gs``, ``az``), one text or many; braces are
            expanded: ``"train-{000..123}.tar"``. Compressed shards cannot be read by number.
        decode: Makes a sample of a dict with the content of each file by its extension, in lower case, the common name
            under ``"__key__"`` and the shard under ``"__url__"``: ``decode(files)``, or ``decode(files, key)``; without
            it the dict is the sample.
        index: The folder in which it is kept where samples are; None for ``~/.cache/asyncloader/tar``
            (``$XDG_CACHE_HOME``).
        cache_bytes: How many bytes of blocks each worker keeps; 0 reads samples and not blocks.
        block_bytes: How large a block is.
        store: A store of obstore's, in which the paths are names of objects.
        max_bytes: How large a sample may be in its shard, headers included.
        store_options: As for :class:`~asyncloader.datasets.RemoteDataset`.

    Attributes:
        paths: The shards, braces expanded.
        block_sizes: How many samples there are in each block: for a BlockShuffleSampler. An array of int64.

    Raises:
        ConfigurationError: No shards or no samples were found, or an argument is invalid.
        FileNotFoundError: A shard is not there.
        FetchError: A shard is damaged, cut off or compressed; it has a link, a sparse file, or a sample with two files
            of one extension or that is too large; or it does not come.
        ImportError: obstore, which urls need, is not installed (``asyncloader[remote]``).

    A sample raises :class:`FetchError` if its shard was changed since the dataset was made. Do not take ``"__key__"``
    for a safe path of your own if you have not packed the shard yourself.

    Example:
        ::

            dataset = TarShards("train-{000..123}.tar", decode)
            loader = DataLoader(dataset, batch_size=32, sampler=ElasticSampler(dataset), num_workers=4)
    """

    def __init__(
        self,
        paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        decode: Callable[..., T_co] | None = None,
        *,
        index: str | os.PathLike[str] | None = None,
        cache_bytes: int = 0,
        block_bytes: int = 1 << 22,
        store: ObjectStore | None = None,
        max_bytes: int = MAX_BYTES,
        **store_options: Any,
    ) -> None:
        every = [each for path in listed(paths) for each in expanded(path)]
        super().__init__(every, decode, cache_bytes, len, store, store_options)
        self.max_bytes = at_least("max_bytes", max_bytes, least=1)
        self.block_bytes = at_least("block_bytes", block_bytes, least=512)
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(cache, "asyncloader", "tar") if index is None else Path(index)
        self._versions, spans = self._asked(index_shards, folder, self.max_bytes)
        self._spans = np.concatenate(spans)
        if not len(self._spans):
            raise ConfigurationError(
                f"there is no sample in {len(spans)} shards, the first of which is {self.paths[0]}"
            )
        self._firsts = np.cumsum([0, *map(len, spans)])  # the first sample of each shard
        numbers = np.repeat(np.arange(len(spans)), np.diff(self._firsts))
        blocks = self._spans[:, 0] // self.block_bytes
        begins = np.flatnonzero(np.diff(blocks, prepend=-1).astype(bool) | np.diff(numbers, prepend=-1).astype(bool))
        self._blocks = np.append(begins, len(self._spans))  # the first sample of each block

    def _block_of(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return what is read for each sample: its block, or the sample alone if no blocks are kept."""
        return super()._block_of(numbers) if self.cache_bytes else numbers

    def _part(self, block: int) -> Part:
        first, last = (self._blocks[block], self._blocks[block + 1] - 1) if self.cache_bytes else (block, block)
        shard = self._shard_of(first)
        return Part(self.paths[shard], int(self._spans[first, 0]), int(self._spans[last, 1]), self._versions[shard])

    def _shard_of(self, number: int) -> int:
        return int(np.searchsorted(self._firsts, number, side="right")) - 1

    def _read(self, block: int) -> bytes:
        return self._source.read(self._part(block))

    async def _read_async(self, block: int) -> bytes:
        return await self._source.read_async(self._part(block))

    def _samples(self, numbers: NDArray[np.int64], blocks: dict[int, Any]) -> list[tuple[Any, Any]]:
        found = []
        for number, block in zip(numbers.tolist(), self._block_of(numbers).tolist(), strict=True):
            begin, end = (self._spans[number] - self._part(block).start).tolist()
            sample = read_sample(memoryview(blocks[block])[begin:end], self.paths[self._shard_of(number)])
            found.append((sample, sample["__key__"]))
        return found


def expanded(path: str) -> list[str]:
    """Return the paths that braces stand for: ``{000..123}`` for numbers, ``{a,b}`` for words."""
    parts = _BRACES.split(path)
    choices = [_choices(part) if at % 2 else [part] for at, part in enumerate(parts)]
    return ["".join(chosen) for chosen in itertools.product(*choices)]


def _choices(inside: str) -> list[str]:
    first, dots, last = inside.partition("..")
    if dots and first.isdigit() and last.isdigit():
        width = len(first) if first.startswith("0") else 0
        return [f"{number:0{width}}" for number in range(int(first), int(last) + 1)]
    return inside.split(",") if "," in inside else [f"{{{inside}}}"]


# --------------------------------------------------------------------------------------------------------- index files


def index_shards(
    source: Source, paths: Sequence[str], folder: Path, max_bytes: int
) -> tuple[list[Version], list[NDArray[np.int64]]]:
    """Return the version of each shard, and where its samples are: looked up, or found out and kept.

    One process of the machine at a time makes the indices that are missing; the others wait for it.
    """
    versions = [source.version(path) for path in paths]
    shards = [
        (path, version, folder / _name(source, path, version)) for path, version in zip(paths, versions, strict=True)
    ]
    spans: list[Any] = [_load(place, version) for _, version, place in shards]
    if any(found is None for found in spans):
        with _turn(folder):
            spans = [_index(source, *shard) for shard in shards]
    for path, found in zip(paths, spans, strict=True):
        sizes = found[:, 1] - found[:, 0]
        if len(sizes) and sizes.max() > max_bytes:
            raise too_large(f"{path}, the sample from byte {found[sizes.argmax(), 0]:,} on", max_bytes)
    return versions, spans


def _name(source: Source, path: str, version: Version) -> str:
    """Return the name of the index of one version of a shard."""
    where = os.path.abspath(path_of(path)) if source.is_local(path) else path
    said = f"{_FORMAT} {version} {where}".encode("utf-8", "surrogateescape")
    return hashlib.sha256(said).hexdigest()[:32] + ".index"


def _load(place: Path, version: Version) -> NDArray[np.int64] | None:
    """Return an index; None if there is none.

    It is believed no more than its shard: all spans lie in there, in order.
    """
    try:
        bounds = np.fromfile(place, "<i8").astype(np.int64)
    except OSError:
        return None
    if not len(bounds) or len(bounds) % 2 or bounds[0] < 0 or bounds[-1] > version.size:
        return None
    is_in_order = (bounds[::2] < bounds[1::2]).all() and (bounds[:-1] <= bounds[1:]).all()
    return bounds.reshape(-1, 2) if is_in_order else None


def _index(source: Source, path: str, version: Version, place: Path) -> NDArray[np.int64]:
    """Return the index of a shard, which another process may have made meanwhile."""
    if (found := _load(place, version)) is not None:
        return found
    spans = find_samples(source, path, version)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with in_one_piece(place) as beside:
            spans.astype("<i8").tofile(beside)
    except OSError as error:
        log.warning("The index of a tar shard cannot be kept (%s): it will be made again by the next run.", error)
    return spans


@contextlib.contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """Let one process at a time make indices in a folder, where there is a place to agree in."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(folder / ".lock", "wb"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield  # The file stays: removed, it could be locked by one process while another one makes it anew.
