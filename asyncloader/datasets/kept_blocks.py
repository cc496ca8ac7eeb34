"""Samples out of blocks of files: what datasets of rows and of shards have in common."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from asyncloader.checks import at_least
from asyncloader.datasets.apart import run_apart
from asyncloader.datasets.blocking import in_thread
from asyncloader.datasets.decoding import Decoder
from asyncloader.datasets.numbers import ByNumber, counted
from asyncloader.datasets.source import Source

if TYPE_CHECKING:
    from obstore.store import ObjectStore

T_co = TypeVar("T_co", covariant=True)
V = TypeVar("V")


class BlockDataset(ByNumber[T_co]):
    """A dataset of samples that lie in blocks of files, here or elsewhere, of which each is read whole.

    Args:
        paths: Paths and urls of the files.
        decode: Makes a sample of what was read.
        cache_bytes: How many bytes of blocks each worker keeps.
        size_of: How many bytes a block takes.
        store: A store of obstore's, in which the paths are names of objects.
        store_options: What else `obstore.store.from_url` takes.
    """

    _blocks: NDArray[np.int64]  # the first sample of each block, and behind the last one how many samples there are

    def __init__(
        self,
        paths: list[str],
        decode: Callable[..., T_co] | None,
        cache_bytes: int,
        size_of: Callable[[Any], int],
        store: ObjectStore | None,
        store_options: Mapping[str, Any],
    ) -> None:
        self.paths, self.decode = paths, decode
        self.cache_bytes = at_least("cache_bytes", cache_bytes, least=0)
        self._kept: KeptBlocks[Any] = KeptBlocks(self.cache_bytes, size_of)
        self._decoder = Decoder(decode)
        self._source = Source(store, store_options)
        self._source.check(paths, type(self).__name__)
        self.is_remote = not all(map(self._source.is_local, paths))

    def _asked(self, function: Callable[..., V], *args: Any) -> V:
        """Return what a function of this package finds out of the files: remote ones by a process of its own."""
        ask = (self._source, self.paths, *args)
        return run_apart(function, *ask) if self.is_remote else function(*ask)

    def __len__(self) -> int:
        return int(self._blocks[-1])

    @property
    def block_sizes(self) -> NDArray[np.int64]:
        """How many samples there are in each block: for a BlockShuffleSampler."""
        return np.diff(self._blocks)

    def __getitem__(self, index: int) -> T_co:
        """Read and decode one sample."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[T_co]:
        """Read and decode the samples of a batch."""
        numbers, blocks, missing = self._wanted(indices)
        samples = self._found(numbers, blocks | {block: self._read(block) for block in missing})
        return [self._decoder(*each) for each in samples]

    async def getitems(self, indices: Sequence[int]) -> list[T_co]:
        """Read and decode the samples of a batch, without blocking the loop."""
        numbers, blocks, missing = self._wanted(indices)
        read = await asyncio.gather(*map(self._read_async, missing))
        samples = await in_thread(self._found, numbers, blocks | dict(zip(missing, read, strict=True)))
        return [await self._decoder.call_async(*each) for each in samples]

    def _wanted(self, indices: Sequence[int]) -> tuple[NDArray[np.int64], dict[int, Any], list[int]]:
        """Return the numbers of the samples, and their blocks: those that are here, and the numbers of the others."""
        numbers = counted(indices, len(self), "sample")
        blocks = {block: self._kept.get(block) for block in np.unique(self._block_of(numbers)).tolist()}
        return numbers, blocks, [block for block, content in blocks.items() if content is None]

    def _found(self, numbers: NDArray[np.int64], blocks: dict[int, Any]) -> list[tuple[Any, Any]]:
        """Return the samples before they are decoded, and their keys. The blocks are kept, as far as there is room."""
        for block, content in blocks.items():
            self._kept.keep(block, content)
        return self._samples(numbers, blocks)

    def _block_of(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.searchsorted(self._blocks, numbers, side="right") - 1

    def _samples(self, numbers: NDArray[np.int64], blocks: dict[int, Any]) -> list[tuple[Any, Any]]:
        """Return the samples of these numbers out of their blocks, and their keys. In any thread."""
        raise NotImplementedError

    def _read(self, block: int) -> Any:
        """Read a block. In any thread."""
        raise NotImplementedError

    async def _read_async(self, block: int) -> Any:
        """Read a block, without blocking the loop."""
        return await in_thread(self._read, block)


class KeptBlocks(Generic[V]):
    """Keeps the blocks that were used last, in a bounded number of bytes, for later batches.

    Any thread may call it; a copy in another process begins empty.

    Args:
        max_bytes: How much to keep.
        size_of: How many bytes a block takes.
    """

    def __init__(self, max_bytes: int, size_of: Callable[[V], int]) -> None:
        self._max_bytes = max_bytes
        self._size_of = size_of
        self._blocks: OrderedDict[int, V] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, number: int) -> V | None:
        """Return a block if it is here."""
        with self._lock:
            if number in self._blocks:
                self._blocks.move_to_end(number)
            return self._blocks.get(number)

    def keep(self, number: int, block: V) -> None:
        """Keep a block; those that were used longest ago make room for it."""
        size = self._size_of(block)
        with self._lock:
            if number in self._blocks or size > self._max_bytes:
                return
            self._blocks[number] = block
            self._bytes += size
            while self._bytes > self._max_bytes:
                self._bytes -= self._size_of(self._blocks.popitem(last=False)[1])

    def __reduce__(self) -> Any:
        return KeptBlocks, (self._max_bytes, self._size_of)
