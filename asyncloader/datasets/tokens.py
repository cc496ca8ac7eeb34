"""Blocks of tokens out of flat files: nanoGPT's .bin, Megatron's .bin with .idx.

numbers of blocks ──> Layout: which file, from which token to which ──> read into one memory ──> stacked into a batch

Files are read and not mapped: a mapped file that somebody shortens kills the process that touches it (SIGBUS), which no
check beforehand prevents.
"""

from __future__ import annotations

import itertools
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
from asyncloader.datasets.source import Version, is_local, listed, open_regular, raise_changed, read_local, version_of
from asyncloader.errors import ConfigurationError

_SCANNED = 1 << 22
"""So many tokens are looked through at once."""
_MOST_INDEX_BYTES = 1 << 32  # of an .idx: 214 million sequences, all of which are in memory


class TokenBlocks(Dataset[torch.Tensor]):
    """Serve blocks of tokens out of files that hold nothing but tokens.

    nanoGPT's ``.bin`` files are given with their ``dtype``; Megatron's are a ``.bin`` and an ``.idx``, which knows the
    dtype and where documents begin. The files are local, and read out of the page cache that all workers share.

    A sample is a tensor of ``block_size`` tokens in the dtype of the file: a batch of uint16 takes a quarter of the
    memory, and of the time to the GPU, that int64 would. Convert it there (``batch.long()``), or have it converted with
    ``as_dtype``. For inputs and targets of length T take ``block_size=T + 1, stride=T``.

    Args:
        paths: The ``.bin`` file or files, one path or many.
        block_size: Tokens in a block.
        dtype: The type of tokens in flat files, such as ``"uint16"``, little-endian; None reads the ``.idx`` beside
            each ``.bin``.
        stride: Tokens from the beginning of one block to that of the next; by default ``block_size``: each token once.
            1 makes every window a sample.
        by_document: Cut each document into blocks by itself; the last one of a document may be shorter. Otherwise
            blocks run across documents, and what is left of a file behind its last whole block is left out.
        end_of_text: With `by_document`, the token that ends each document of flat files: 50256 in nanoGPT's of GPT-2.
            The token belongs to the document that it ends. The files are looked through for it when the dataset is
            made, at the speed of the disk.
        pad: The token with which short blocks are filled up; None leaves them short, for a sampler or ``collate_fn``
            that packs them (``lengths`` says how long they are).
        header_bytes: At the beginning of each flat file, to be passed over (1,024 in llm.c's).
        as_dtype: The type that samples are converted to, such as ``torch.int64``; None leaves them as they are. A
            sample with a token that does not fit is a ValueError.

    Attributes:
        dtype: The numpy type of tokens in the files.
        tokens: How many there are in all files, whether in a block or not.
        lengths: How many tokens each sample has, before padding: an array of int32, made when it is asked for.

    Raises:
        ConfigurationError: No file was given, or the files have no block; a file is truncated, or is not the one that
            its ``.idx`` tells of; dtypes differ; an argument is of no use.
        FileNotFoundError: A file is not there.

    A sample raises :class:`FetchError` if its file was changed since the dataset was made; local files are looked at
    once for each batch.

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
        pad: int | None = None,
        header_bytes: int = 0,
        as_dtype: torch.dtype | None = None,
    ) -> None:
        self.paths = listed(paths)
        self.block_size = block_size
        self.stride = block_size if stride is None else stride
        self.by_document = by_document
        self.end_of_text = end_of_text
        self.pad = pad
        self.header_bytes = header_bytes
        self.as_dtype = as_dtype
        _check(self, dtype)
        self._versions = list(map(version_of, self.paths))
        if dtype is None:
            self.dtype, starts = self._from_indices()
        else:
            self.dtype, starts = np.dtype(dtype).newbyteorder("<"), self._from_sizes(np.dtype(dtype))
        _check_pad(self)
        self._layout = Layout.of(starts, block_size, self.stride, by_document)
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
        """How many tokens each sample has, before padding."""
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
        lengths, size = (ends - begins).tolist(), self.dtype.itemsize
        offsets = (self.header_bytes + begins * size).tolist()
        data = np.empty(sum(lengths), self.dtype)  # of all blocks: each is read to its place
        bounds = itertools.accumulate((length * size for length in lengths), initial=0)
        bytes_of = data.view(np.uint8).data
        parts = [bytes_of[begin:end] for begin, end in itertools.pairwise(bounds)]
        of_files: dict[int, list[tuple[int, memoryview]]] = {}
        for file, offset, part in zip(files.tolist(), offsets, parts, strict=True):
            of_files.setdefault(file, []).append((offset, part))
        for file, wanted in of_files.items():
            _read_parts(self.paths[file], self._versions[file], wanted)
        return self._finished(list(torch.split(torch.from_numpy(data), lengths)))

    def __iter__(self) -> Iterator[torch.Tensor]:
        return map(self.__getitem__, range(len(self)))

    def _finished(self, blocks: list[torch.Tensor]) -> list[torch.Tensor]:
        if (pad := self.pad) is not None:
            short = [self.block_size - len(block) for block in blocks]
            blocks = [
                torch.from_numpy(np.pad(block.numpy(), (0, lack), constant_values=pad)) if lack else block
                for block, lack in zip(blocks, short, strict=True)
            ]
        return blocks if self.as_dtype is None else [self._converted(block, self.as_dtype) for block in blocks]

    def _converted(self, block: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        made, held, wanted = block.to(dtype), np.iinfo(self.dtype), torch.iinfo(dtype)
        narrows = held.min < wanted.min or held.max > wanted.max
        if narrows and (strays := block.long()[made.long() != block.long()]).numel():
            raise ValueError(f"token {int(strays[0])} does not fit into as_dtype={dtype}; the files have {self.dtype}")
        return made

    # ------------------------------------------------------------------------------------------ what is in the files

    def _from_sizes(self, dtype: np.dtype[Any]) -> list[NDArray[np.int64]]:
        """Return for each flat file where its one piece begins and ends."""
        starts = []
        for path, version in zip(self.paths, self._versions, strict=True):
            count, rest = divmod(version.size - self.header_bytes, dtype.itemsize)
            if rest or count < 0:
                raise ConfigurationError(
                    f"{path}: truncated, or of another dtype: {version.size:,} bytes, of which {self.header_bytes} are "
                    f"a header, are no whole number of {dtype}; {rest} are left over at byte {version.size - rest:,}"
                )
            starts.append(self._documents(path, dtype, count))
        return starts

    def _documents(self, path: str, dtype: np.dtype[Any], count: int) -> NDArray[np.int64]:
        """Return where documents of a flat file begin, and where the last one ends; without a mark, it is one."""
        if self.end_of_text is None:
            return np.array([0, count], np.int64)
        found, at = [np.zeros(1, np.int64)], 0
        with open_regular(path) as file:
            file.seek(self.header_bytes)
            while len(tokens := np.frombuffer(file.read(_SCANNED * dtype.itemsize), dtype.newbyteorder("<"))):
                found.append(np.flatnonzero(tokens == self.end_of_text) + at + 1)
                at += len(tokens)
        starts = np.concatenate(found)
        return starts if starts[-1] == count else np.append(starts, count)

    def _from_indices(self) -> tuple[np.dtype[Any], list[NDArray[np.int64]]]:
        """Return the dtype that all indices name, and for each file where its documents begin."""
        names = [os.path.splitext(path)[0] + ".idx" for path in self.paths]
        found = [
            read_index(_contents(name), name, version.size) for name, version in zip(names, self._versions, strict=True)
        ]
        dtypes = {dtype: name for (dtype, _), name in zip(found, names, strict=True)}
        if len(dtypes) > 1:
            told = ", ".join(f"{dtype} in {name}" for dtype, name in dtypes.items())
            raise ConfigurationError(f"the tokens of one dataset are of one dtype, but got {told}")
        return found[0][0], [starts for _, starts in found]


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


def _read_parts(path: str, version: Version, wanted: Sequence[tuple[int, memoryview]]) -> None:
    """Read parts of a local file, each from its offset on.

    Raises:
        FetchError: The file was changed since the dataset was made. Versions are compared when all has been read: bytes
            that are read while a file is written may be parts of both.
    """
    with open_regular(path) as file:
        for offset, part in wanted:
            while part:
                if not (count := os.preadv(file.fileno(), [part], offset)):
                    raise_changed(path)
                part, offset = part[count:], offset + count
        if version_of(file.fileno()) != version:
            raise_changed(path)


def _contents(name: str) -> bytes:
    try:
        if (size := version_of(name).size) > _MOST_INDEX_BYTES:
            raise ConfigurationError(f"{name}: {size:,} bytes are more than an index may have ({_MOST_INDEX_BYTES:,})")
        return read_local(name, 0, None)
    except FileNotFoundError as error:
        raise ConfigurationError(f"{name}: is not there; for flat files, without it, say dtype") from error


def _check(dataset: TokenBlocks, dtype: DTypeLike | None) -> None:
    if not dataset.paths:
        raise ConfigurationError("there are no files")
    if away := [path for path in dataset.paths if not is_local(path)]:
        raise ConfigurationError(f"{away[0]}: TokenBlocks reads local files: copy the tokens to a disk first")
    for name, least in (("block_size", 1), ("stride", 1), ("header_bytes", 0)):
        at_least(name, getattr(dataset, name), least=least)
    if dtype is None:
        if dataset.header_bytes:
            raise ConfigurationError("header_bytes is for flat files, whose dtype is given")
        if dataset.end_of_text is not None:
            raise ConfigurationError("end_of_text is for flat files, whose dtype is given; an .idx tells of documents")
    elif dataset.by_document and dataset.end_of_text is None:
        raise ConfigurationError(
            "where documents begin is told by an .idx, without a dtype; or in flat files by the token that ends each "
            "of them: end_of_text=50256 for nanoGPT's"
        )
    elif np.dtype(dtype).kind not in "iu":
        raise ConfigurationError(f"tokens are whole numbers, which {np.dtype(dtype)} is not")
    elif np.dtype(dtype) != np.dtype(dtype).newbyteorder("<"):
        big, little = np.dtype(dtype).str, np.dtype(dtype).newbyteorder("<").str
        raise ConfigurationError(
            f"tokens are little-endian, which {big!r} is not, nor can tensors be; convert the files once: "
            f'numpy.fromfile(path, "{big}").astype("{little}").tofile(new_path)'
        )
    elif dataset.header_bytes % np.dtype(dtype).itemsize:
        raise ConfigurationError(f"header_bytes={dataset.header_bytes} is no whole number of {np.dtype(dtype)}")
    if dtype is not None and dataset.end_of_text is not None:
        _check_end_of_text(dataset, np.dtype(dtype))
    if dataset.as_dtype is not None and (
        dataset.as_dtype.is_floating_point or dataset.as_dtype.is_complex or dataset.as_dtype is torch.bool
    ):
        raise ConfigurationError(f"tokens are whole numbers, which as_dtype={dataset.as_dtype} is not")
    if dataset.pad is not None and not dataset.by_document:
        raise ConfigurationError("pad is for short blocks, of which there are none unless by_document=True")


def _check_end_of_text(dataset: TokenBlocks, dtype: np.dtype[Any]) -> None:
    mark, bounds = dataset.end_of_text, np.iinfo(dtype)
    if not dataset.by_document:
        raise ConfigurationError("end_of_text says where documents end, which only by_document=True asks for")
    if isinstance(mark, bool) or not isinstance(mark, int) or not bounds.min <= mark <= bounds.max:
        raise ConfigurationError(f"end_of_text={mark!r} is no {dtype}")


def _check_pad(dataset: TokenBlocks) -> None:
    pad, bounds = dataset.pad, np.iinfo(dataset.dtype)
    if pad is not None and not bounds.min <= pad <= bounds.max:
        raise ConfigurationError(f"pad={pad} is no {dataset.dtype}")
