"""Blocks of tokens out of flat files: nanoGPT's .bin, Megatron's .bin with .idx.

numbers of blocks ──> which file, from which token on ──> read ──> stacked into a batch

Files are read and not mapped: a mapped file that somebody shortens kills the process that touches it (SIGBUS), which no
check beforehand prevents.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike

from asyncloader.checks import at_least
from asyncloader.datasets.megatron import read_index
from asyncloader.datasets.numbers import ByNumber, counted
from asyncloader.datasets.source import is_local, listed, open_regular, path_of, raise_changed, version_of
from asyncloader.errors import ConfigurationError


class TokenBlocks(ByNumber[torch.Tensor]):
    """Serve blocks of tokens out of files that hold nothing but tokens.

    nanoGPT's ``.bin`` files are given with their ``dtype``; Megatron's are a ``.bin`` and an ``.idx``, which knows the
    dtype. The files are local, and read out of the page cache that all workers share. Blocks run across documents; what
    is left of a file behind its last whole block is left out.

    A sample is a tensor of ``block_size`` tokens in the dtype of the file: a batch of uint16 takes a quarter of the
    memory, and of the time to the GPU, that int64 would; convert it there (``batch.long()``). For inputs and targets of
    length T take ``block_size=T + 1, stride=T``.

    Args:
        paths: The ``.bin`` file or files, one path or many.
        block_size: Tokens in a block.
        dtype: The type of tokens in flat files, such as ``"uint16"``, little-endian; None reads the ``.idx`` beside
            each ``.bin``.
        stride: Tokens from the beginning of one block to that of the next; by default ``block_size``: each token once.
            1 makes every window a sample.

    Attributes:
        dtype: The numpy type of tokens in the files.
        tokens: How many there are in all files, whether in a block or not.

    Raises:
        ConfigurationError: No file was given, or the files have no block; a file is truncated, or is not the one that
            its ``.idx`` tells of; dtypes differ; an argument is of no use.
        FileNotFoundError: A file is not there.

    A sample raises :class:`FetchError` if its file was changed since the dataset was made.

    Example:
        >>> import tempfile, os
        >>> path = os.path.join(tempfile.mkdtemp(), "train.bin")
        >>> np.arange(10, dtype=np.uint16).tofile(path)
        >>> dataset = TokenBlocks(path, 4, dtype="uint16", stride=3)
        >>> [block.tolist() for block in map(dataset.__getitem__, range(len(dataset)))]
        [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    """

    seeds_samples = True

    def __init__(
        self,
        paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        block_size: int,
        *,
        dtype: DTypeLike | None = None,
        stride: int | None = None,
    ) -> None:
        self.paths = listed(paths)
        self.block_size = at_least("block_size", block_size, least=1)
        self.stride = at_least("stride", block_size if stride is None else stride, least=1)
        if not self.paths:
            raise ConfigurationError("there are no files")
        if away := [path for path in self.paths if not is_local(path)]:
            raise ConfigurationError(f"{away[0]}: TokenBlocks reads local files: copy the tokens to a disk first")
        self._versions = list(map(version_of, map(path_of, self.paths)))
        sizes = [version.size for version in self._versions]
        self.dtype = (
            _dtype_in_indices(self.paths, sizes) if dtype is None else _dtype_of_files(self.paths, sizes, dtype)
        )
        counts = np.array(sizes) // self.dtype.itemsize
        self.tokens = int(counts.sum())
        blocks = np.maximum((counts - self.block_size) // self.stride + 1, 0)
        self._firsts = np.concatenate([[0], np.cumsum(blocks)])  # the first block of each file, and how many there are
        if not len(self):
            raise ConfigurationError(
                f"there is no block of {block_size:,} tokens in {self.tokens:,} tokens of {len(self.paths)} "
                f"{'file' if len(self.paths) == 1 else 'files'}, the first of which is {self.paths[0]}"
            )

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return a block."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[torch.Tensor]:
        """Return the blocks of a batch.

        Raises:
            IndexError: No block has this number.
            TypeError: A number is not whole.
        """
        numbers = counted(indices, len(self), "block")
        files = np.searchsorted(self._firsts, numbers, side="right") - 1
        offsets = (numbers - self._firsts[files]) * self.stride * self.dtype.itemsize
        blocks = [np.empty(self.block_size, self.dtype) for _ in numbers]
        for number in np.unique(files):
            path = path_of(self.paths[number])
            with open_regular(path) as file:
                for at in np.flatnonzero(files == number):
                    if os.preadv(file.fileno(), [blocks[at].view(np.uint8).data], int(offsets[at])) < blocks[at].nbytes:
                        raise_changed(path)
                # Compared when all has been read: bytes that are read while a file is written may be of both.
                if version_of(file.fileno()) != self._versions[number]:
                    raise_changed(path)
        return list(map(torch.from_numpy, blocks))


def _dtype_of_files(paths: Sequence[str], sizes: Sequence[int], kind: DTypeLike) -> np.dtype[Any]:
    """Return the dtype of flat files, whose sizes are whole numbers of it."""
    dtype = np.dtype(kind)
    if dtype.kind not in "iu" or dtype != dtype.newbyteorder("<"):
        raise ConfigurationError(f"tokens are little-endian whole numbers, which {dtype.str} is not")
    for path, size in zip(paths, sizes, strict=True):
        if size % dtype.itemsize:
            raise ConfigurationError(
                f"{path}: truncated, or of another dtype: {size:,} bytes are no whole number of {dtype}"
            )
    return dtype


def _dtype_in_indices(paths: Sequence[str], sizes: Sequence[int]) -> np.dtype[Any]:
    """Return the dtype that the indices beside all files name."""
    names = [os.path.splitext(path_of(path))[0] + ".idx" for path in paths]
    dtypes = set(map(read_index, names, sizes))
    if len(dtypes) > 1:
        raise ConfigurationError(f"the tokens of one dataset are of one dtype, but got {dtypes} in {names}")
    return dtypes.pop()
