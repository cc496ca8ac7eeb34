"""Samples of tar files by number, through an index of where each begins.

numbers ──> Spans: which shard, which bytes ──> ranges, or whole blocks that are kept ──> taken apart ──> decode
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from asyncloader.checks import at_least
from asyncloader.datasets.apart import versions_of
from asyncloader.datasets.block_cache import BlockCache
from asyncloader.datasets.limits import MAX_BYTES, too_large
from asyncloader.datasets.numbers import counted
from asyncloader.datasets.opened import BatchDataset, Opened, all_decoded
from asyncloader.datasets.retry import FetchError, Retries
from asyncloader.datasets.source import path_of
from asyncloader.datasets.sources import Access, Place, Sources
from asyncloader.datasets.tar import RawSample, read_samples
from asyncloader.datasets.tar_index import spans_of
from asyncloader.errors import ConfigurationError

T_co = TypeVar("T_co", covariant=True)

_END = bytes(1024)  # of an archive


class IndexedTarShards(BatchDataset[Opened[Sources], T_co]):
    """Serve the samples of tar files in WebDataset's layout by number, in any order.

    In place of :class:`TarShards`, which is a stream, where a run must go on with another number of workers or ranks,
    or where all ranks need the same number of steps: any sampler does for it. The first time that shards are given,
    their headers are read, and an index is kept; it is made anew for shards whose size or time is another one.

    A sample is read by a range of bytes, neighbours in a batch together. For small samples on a server, or on a disk
    that seeks slowly, have a :class:`~asyncloader.samplers.BlockShuffleSampler` visit blocks of neighbours, and give
    ``cache_bytes``: then blocks are read whole, and kept while the samples of their neighbourhood are drawn.

    Args:
        shards: Paths and urls: ``file``, ``http``, ``https``, and those of object stores (``s3``, ``gs``, ``az``). Not
            compressed.
        decode: Makes a sample of a dict with the content of each file by its extension, in lower case, the common name
            under ``"__key__"`` and the shard under ``"__url__"``; without it the dict is the sample. Runs on a thread.
        index: Folder in which indices are kept. By default they lie beside shards that are local, as
            ``NAME.tar.index``, and where that is not possible in ``~/.cache/asyncloader/tar``.
        cache_bytes: How many bytes of blocks each worker keeps, those that were used last; 0 reads no blocks, but each
            sample by itself.
        block_bytes: How many bytes of a shard make a block.
        headers, config, client_options, credential_provider, retries: As :class:`TarShards` takes them.
        max_bytes: How large a sample may be in its shard, headers included.
        decode_threads: 0 decodes on the event loop.

    Attributes:
        shards: As given.
        block_sizes: How many samples there are in each block: for a BlockShuffleSampler. An array of int64.

    Raises:
        ConfigurationError: No shards or no samples were found, a shard is compressed, or an argument is invalid.
        FileNotFoundError: A shard is not there.
        FetchError: A shard is damaged, has a sample that is too large, or does not come.
        ImportError: The client for a url is not installed (``asyncloader[http]``, ``asyncloader[objects]``).

    A sample raises :class:`FetchError` if its shard was changed since the dataset was made.

    Example:
        ::

            dataset = IndexedTarShards(["train-000.tar", "train-001.tar"], decode)
            loader = DataLoader(dataset, batch_size=32, sampler=ElasticSampler(dataset), num_workers=4)
    """

    def __init__(
        self,
        shards: Iterable[str | os.PathLike[str]],
        decode: Callable[[RawSample], T_co] | None = None,
        *,
        index: str | os.PathLike[str] | None = None,
        cache_bytes: int = 0,
        block_bytes: int = 1 << 22,
        headers: Mapping[str, str] | None = None,
        config: Mapping[str, Any] | None = None,
        client_options: Mapping[str, Any] | None = None,
        credential_provider: Any = None,
        retries: Retries | None = None,
        max_bytes: int = MAX_BYTES,
        decode_threads: int = 1,
    ) -> None:
        super().__init__()
        self.shards = [os.fspath(shard) for shard in shards]
        self.decode = decode
        self.cache_bytes = cache_bytes
        self.block_bytes = block_bytes
        self.max_bytes = max_bytes
        self.decode_threads = decode_threads
        _check(self)
        self.access = Access.to(
            self.shards, "IndexedTarShards", retries, headers, config, client_options, credential_provider
        )
        self._versions = versions_of(self.shards, self.access)
        spans = spans_of(self.shards, self._versions, Path(index) if index is not None else None, self.access)
        self._spans = np.concatenate(spans)
        if not len(self):
            raise ConfigurationError(
                f"there is no sample in {len(spans)} shards, the first of which is {self.shards[0]}"
            )
        self._firsts = np.cumsum([0, *map(len, spans)])  # the first sample of each shard
        self._check_sizes()
        numbers = np.repeat(np.arange(len(spans)), np.diff(self._firsts))
        blocks = self._spans[:, 0] // block_bytes
        begins = np.flatnonzero(np.diff(blocks, prepend=-1).astype(bool) | np.diff(numbers, prepend=-1).astype(bool))
        self._blocks = np.append(begins, len(self))  # the first sample of each block

    def __len__(self) -> int:
        return len(self._spans)

    def _check_sizes(self) -> None:
        sizes = self._spans[:, 1] - self._spans[:, 0]
        if sizes[largest := int(sizes.argmax())] > self.max_bytes:
            ((shard, begin, _),) = self._places(*np.array([[largest], [largest]]))
            raise too_large(f"{self.shards[shard]}, the sample from byte {begin:,} on", self.max_bytes)

    @property
    def block_sizes(self) -> NDArray[np.int64]:
        """How many samples there are in each block."""
        return np.diff(self._blocks)

    async def __getitems__(self, indices: Sequence[int]) -> list[T_co]:
        """Read and decode the samples of a batch."""
        numbers = counted(indices, len(self), "sample")
        opened = self._client
        places = self._places(numbers, numbers)
        if self.cache_bytes:
            contents = await self._out_of_blocks(opened.cache, numbers, places)
        else:
            contents = await opened.source.read_places(self.shards, self._versions, places)
        samples = [
            await self._taken_apart(data, place, number)
            for data, place, number in zip(contents, places, numbers.tolist(), strict=True)
        ]
        if self.decode is None:
            return cast(list[T_co], samples)
        return await opened.threads.run(all_decoded, self.decode, samples)

    def _places(self, first: NDArray[np.int64], last: NDArray[np.int64]) -> list[Place]:
        """Return where the stretches from one sample to another one of the same shard are."""
        shards = np.searchsorted(self._firsts, first, side="right") - 1
        starts, stops = self._spans[first, 0], self._spans[last, 1]
        return list(zip(shards.tolist(), starts.tolist(), stops.tolist(), strict=True))

    async def _out_of_blocks(
        self, cache: BlockCache[memoryview], numbers: NDArray[np.int64], places: Sequence[Place]
    ) -> list[memoryview]:
        blocks = (np.searchsorted(self._blocks, numbers, side="right") - 1).tolist()
        read = await cache.get_all(blocks, self._read)
        begins = {block: int(self._spans[self._blocks[block], 0]) for block in read}
        return [
            read[block][start - begins[block] : stop - begins[block]]
            for block, (_, start, stop) in zip(blocks, places, strict=True)
        ]

    async def _read(self, block: int) -> memoryview:
        (place,) = self._places(self._blocks[block : block + 1], self._blocks[block + 1 : block + 2] - 1)
        (data,) = await self._client.source.read_places(self.shards, self._versions, [place])
        return data

    async def _taken_apart(self, data: memoryview, place: Place, number: int) -> RawSample:
        shard, start, _ = place
        url = self.shards[shard]

        async def chunks() -> AsyncIterator[bytes]:
            yield data  # type: ignore[misc]  # any bytes do
            yield _END

        found = [sample async for sample in read_samples(chunks(), url, len(data) + len(_END))]
        if len(found) != 1:
            raise FetchError(f"{url}: {len(found)} samples where its index has one, number {number}, at byte {start}")
        return found[0]

    def _connect(self) -> Opened[Sources]:
        cache = BlockCache[memoryview](self.cache_bytes, len)
        return Opened(Sources(self.access), self.decode_threads if self.decode else 0, cache)


def _check(dataset: IndexedTarShards[Any]) -> None:
    if not dataset.shards:
        raise ConfigurationError("there are no shards")
    for shard in dataset.shards:
        if path_of(shard).endswith((".gz", ".tgz")):
            raise ConfigurationError(f"{shard}: is compressed, and can be read from its beginning only: use TarShards")
    for name, least in (("max_bytes", 1), ("cache_bytes", 0), ("block_bytes", 512), ("decode_threads", 0)):
        at_least(name, getattr(dataset, name), least=least)
