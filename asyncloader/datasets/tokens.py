"""Blocks of tokens out of flat files: nanoGPT's .bin, Megatron's .bin with .idx.

numbers of blocks ──> Layout: which file, from which token to which ──> read ──> stacked into a batch

Files are read and not mapped: a mapped file that somebody shortens kills the process that touches it (SIGBUS), which no
check beforehand prevents.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch.utils.data import Dataset

from asyncloader.checks import at_least
from asyncloader.datasets.megatron import read_index
from asyncloader.datasets.numbers import counted
from asyncloader.datasets.source import is_local, listed, open_regular, raise_changed, read_local, version_of
from asyncloader.errors import ConfigurationError

_SCANNED = 1 << 22  # tokens are looked through at once
_MOST_INDEX_BYTES = 1 << 32  # of an .idx: 214 million sequences, all of which are in memory


class TokenBlocks(Dataset[torch.Tensor]):
    """Serve blocks of tokens out of files that hold nothing but tokens.

    nanoGPT's ``.bin`` files are given with their ``dtype``; Megatron's are a ``.bin`` and an ``.idx``, which knows the
    dtype and where documents begin. The files are local, and read out of the page cache that all workers share.

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
        by_document: Cut each document into blocks by itself; the last one of a document may be shorter (``lengths``
            says how long blocks are, for a sampler that packs them). Otherwise blocks run across documents, and what is
            left of a file behind its last whole block is left out.
        end_of_text: With `by_document`, the token that ends each document of flat files: 50256 in nanoGPT's of GPT-2.
            The token belongs to the document that it ends. The files are looked through for it when the dataset is
            made, at the speed of the disk.

    Attributes:
        dtype: The numpy type of tokens in the files.
        tokens: How many there are in all files, whether in a block or not.
        lengths: How many tokens each sample has: an array of int32, made when it is asked for.

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
        by_document: bool = False,
        end_of_text: int | None = None,
    ) -> None:
        self.paths = listed(paths)
        self.block_size = at_least("block_size", block_size, least=1)
        self.stride = at_least("stride", block_size if stride is None else stride, least=1)
        self.by_document = by_document
        self.end_of_text = None if end_of_text is None else operator.index(end_of_text)
        if not self.paths:
            raise ConfigurationError("there are no files")
        if away := [path for path in self.paths if not is_local(path)]:
            raise ConfigurationError(f"{away[0]}: TokenBlocks reads local files: copy the tokens to a disk first")
        self._versions = list(map(version_of, self.paths))
        self.dtype, starts = self._from_indices() if dtype is None else self._from_sizes(np.dtype(dtype))
        self._layout = Layout.of(starts, self.block_size, self.stride, by_document)
        self.tokens = int(self._layout.files[-1])
        if not len(self):
            raise ConfigurationError(
                f"there is no block of {block_size:,} tokens in {self.tokens:,} tokens of {len(self.paths)} "
                f"{'file' if len(self.paths) == 1 else 'files'}, the first of which is {self.paths[0]}"
            )

    def __len__(self) -> int:
        return int(self._layout.firsts[-1])

    @property
    def lengths(self) -> NDArray[np.int32]:
        """How many tokens each sample has."""
        _, begins, ends = self._layout.find(np.arange(len(self)))
        return (ends - begins).astype(np.int32)

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return a block."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[torch.Tensor]:
        """Return the blocks of a batch.

        Raises:
            IndexError: No block has this number.
            TypeError: A number is not whole.
        """
        files, begins, ends = self._layout.find(counted(indices, len(self), "block"))
        blocks = [np.empty(length, self.dtype) for length in (ends - begins).tolist()]
        for number in np.unique(files):
            path = self.paths[number]
            with open_regular(path) as file:
                for at in np.flatnonzero(files == number):
                    offset = int(begins[at]) * self.dtype.itemsize
                    if os.preadv(file.fileno(), [blocks[at].view(np.uint8).data], offset) < blocks[at].nbytes:
                        raise_changed(path)
                # Compared when all has been read: bytes that are read while a file is written may be of both.
                if version_of(file.fileno()) != self._versions[number]:
                    raise_changed(path)
        return list(map(torch.from_numpy, blocks))

    def __iter__(self) -> Iterator[torch.Tensor]:
        return map(self.__getitem__, range(len(self)))

    def _from_sizes(self, dtype: np.dtype[Any]) -> tuple[np.dtype[Any], list[NDArray[np.int64]]]:
        """Return the dtype of flat files, and for each of them where its documents begin, and where the last one ends.

        Without a mark, a file is one document.
        """
        if dtype.kind not in "iu" or dtype != dtype.newbyteorder("<"):
            raise ConfigurationError(f"tokens are little-endian whole numbers, which {dtype.str} is not")
        if self.by_document != (self.end_of_text is not None):
            raise ConfigurationError(
                "where documents begin is told by an .idx, without a dtype; or in flat files, with by_document=True, "
                "by the token that ends each of them: end_of_text=50256 for nanoGPT's"
            )
        found = []
        for path, version in zip(self.paths, self._versions, strict=True):
            count, rest = divmod(version.size, dtype.itemsize)
            if rest:
                raise ConfigurationError(
                    f"{path}: truncated, or of another dtype: {version.size:,} bytes are no whole number of {dtype}"
                )
            ends = [] if self.end_of_text is None else _places(path, dtype, self.end_of_text)
            found.append(np.unique(np.concatenate([[0], *ends, [count]]).astype(np.int64)))
        return dtype, found

    def _from_indices(self) -> tuple[np.dtype[Any], list[NDArray[np.int64]]]:
        """Return the dtype that all indices name, and for each file where its documents begin."""
        if self.end_of_text is not None:
            raise ConfigurationError("end_of_text is for flat files, whose dtype is given; an .idx tells of documents")
        names = [os.path.splitext(path)[0] + ".idx" for path in self.paths]
        found = [
            read_index(_contents(name), name, version.size) for name, version in zip(names, self._versions, strict=True)
        ]
        if len(dtypes := {dtype for dtype, _ in found}) > 1:
            raise ConfigurationError(f"the tokens of one dataset are of one dtype, but got {dtypes} in {names}")
        return found[0][0], [starts for _, starts in found]


def _places(path: str, dtype: np.dtype[Any], mark: int) -> Iterator[NDArray[np.int64]]:
    """Yield the places behind a token in a flat file."""
    with open_regular(path) as file:
        at = 0
        while len(tokens := np.frombuffer(file.read(_SCANNED * dtype.itemsize), dtype)):
            yield np.flatnonzero(tokens == mark) + at + 1
            at += len(tokens)


class Layout(NamedTuple):
    """Which block is where. Blocks are cut out of pieces: files, or documents.

    Attributes:
        firsts: The number of the first block of each piece, and behind the last one how many blocks there are.
        starts: Where each piece begins, in tokens, all files in a row, and where the last one ends.
        files: Where each file begins, and where the last one ends.
        block_size: Tokens in a block.
        stride: From block to block.
    """

    firsts: NDArray[np.int64]
    starts: NDArray[np.int64]
    files: NDArray[np.int64]
    block_size: int
    stride: int

    @classmethod
    def of(cls, starts: Sequence[NDArray[np.int64]], block_size: int, stride: int, by_document: bool) -> Layout:
        """Cut files into blocks.

        Args:
            starts: For each file where its documents begin, and where the last one ends.
            block_size: Tokens in a block.
            stride: From block to block.
            by_document: Whether documents are pieces, of which nothing is left out; otherwise files are.
        """
        files = np.cumsum([0, *(of_file[-1] for of_file in starts)])
        pieces = files
        if by_document:
            moved = [of_file[:-1] + offset for of_file, offset in zip(starts, files[:-1], strict=True)]
            pieces = np.concatenate([*moved, files[-1:]])
        lengths = np.diff(pieces)
        if by_document:
            again = max(0, block_size - stride)  # of a block, what the next one has too
            counts = np.maximum(-((again - lengths) // stride), 1) * (lengths > 0)
        else:
            counts = np.maximum((lengths - block_size) // stride + 1, 0)
        return cls(np.concatenate([[0], np.cumsum(counts)]), pieces, files, block_size, stride)

    def find(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return for each block its file, and in that its first token and the one behind its last."""
        pieces = np.searchsorted(self.firsts, numbers, side="right") - 1
        begins = self.starts[pieces] + (numbers - self.firsts[pieces]) * self.stride
        ends = np.minimum(begins + self.block_size, self.starts[pieces + 1])
        files = np.searchsorted(self.files, begins, side="right") - 1
        return files, begins - self.files[files], ends - self.files[files]


def _contents(name: str) -> bytes:
    try:
        if (size := version_of(name).size) > _MOST_INDEX_BYTES:
            raise ConfigurationError(f"{name}: {size:,} bytes are more than an index may have ({_MOST_INDEX_BYTES:,})")
        return read_local(name, 0, None)
    except FileNotFoundError as error:
        raise ConfigurationError(f"{name}: is not there; for flat files, without it, say dtype") from error
