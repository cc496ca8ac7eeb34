"""Rows in a memory file, written block by block, read one by one.

    head | bytes of block 0 | bytes of block 1 | ... | index: where blocks begin, their shapes
      └── how many rows, where the index is

A block is some thousand rows, with a shape of its own: rows of another form cost their block its compact form, not the
others. While rows are written no more of them are held than a block, which is bounded in rows and in bytes.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import os
import pickle
import secrets
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from asyncloader.datasets.memory_file import HEAD, MemoryFile, write_at
from asyncloader.datasets.rows import Reader, Shape, encode, reader

KIND = b"asl-rows"
_HEAD = struct.Struct("<24xQQQ")  # after kind and token: rows, where the index is, its size
_ALIGNMENT = 64
_FIRST_ROWS, _MOST_ROWS = 64, 1 << 16
_BLOCK_BYTES = 8 << 20


class RowWriter:
    """Writes rows into a new memory file.

    Args:
        rows: The rows.
        consumed: The list they are in, if rows are to be taken out of it (their places are set to None) as soon as they
            are written.

    Raises:
        OSError: There is no room for them.
        Exception: What the iterable or the pickling of a row raises.
    """

    def __init__(self, rows: Iterable[Any], consumed: list[Any] | None = None) -> None:
        self.file = MemoryFile.create(KIND)
        self._at = HEAD
        self._starts: list[int] = []
        self._shapes: list[Shape] = []
        self.count = 0
        for block in _blocks(rows, self):
            self._starts.append(self.count)
            self._shapes.append(encode(block, self.put))
            self.count += len(block)
            if consumed is not None:
                consumed[self.count - len(block) : self.count] = [None] * len(block)

    @property
    def written(self) -> int:
        """Bytes so far."""
        return self._at

    def put(self, data: Any) -> int:
        """Write bytes, and return where they are."""
        if isinstance(data, np.ndarray):  # complex numbers and texts have formats that no memoryview can cast
            data = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        at = self._at
        data = memoryview(data).cast("B")
        write_at(self.file.fd, data, at)
        self._at = -(-(at + len(data)) // _ALIGNMENT) * _ALIGNMENT
        return at

    def finish(self, extra: Any = None) -> MemoryFile:
        """Write the index, with whatever else belongs to it, and seal the file."""
        index = pickle.dumps((self._starts, self._shapes, extra), 5)
        at = self.put(index)
        os.ftruncate(self.file.fd, self._at)
        head = _HEAD.pack(self.count, at, len(index))
        write_at(self.file.fd, head[24:], 24)
        self.file.seal()
        return self.file


def _blocks(rows: Iterable[Any], writer: RowWriter) -> Iterator[list[Any]]:
    """Cut rows into blocks: twice as long each time, as long as they stay within bounds by what the last one took."""
    size, before = _FIRST_ROWS, writer.written
    rest = iter(rows)
    while block := list(itertools.islice(rest, size)):
        count = len(block)
        yield block
        block.clear()
        each = max(1, (writer.written - before) // count)
        before = writer.written
        size = max(1, min(2 * size, _MOST_ROWS, _BLOCK_BYTES // each))


class RowReader:
    """Reads rows of a memory file, in any thread.

    Attributes:
        count: How many there are.
        extra: What was put beside the index.
    """

    def __init__(self, file: MemoryFile) -> None:
        self.file = file
        self.memory = file.map()
        self.count: int
        self.count, at, size = _HEAD.unpack_from(self.memory)
        self._starts: Sequence[int]
        self._starts, self._shapes, self.extra = pickle.loads(self.memory[at : at + size])
        self._readers: dict[int, Reader] = {}

    def __call__(self, number: int) -> Any:
        """Make the row of this number, which is at least 0 and below `count`."""
        block = bisect.bisect_right(self._starts, number) - 1
        read = self._readers.get(block)
        if read is None:
            read = self._readers[block] = reader(self._shapes[block], self.memory)
        return read(number - self._starts[block])

    def column(self, at: int) -> Reader:
        """Return what reads one item of rows that are all tuples of one length."""
        readers = [_item_of(shape, at, self.memory) for shape in self._shapes]
        starts = self._starts

        def read(number: int) -> Any:
            block = bisect.bisect_right(starts, number) - 1
            return readers[block](number - starts[block])

        return read


def _item_of(shape: Shape, at: int, memory: memoryview) -> Reader:
    if shape[0] == "records":
        return reader(shape[2][at], memory)
    row = reader(shape, memory)
    return lambda number: row(number)[at]


def save(file: MemoryFile, path: str) -> None:
    """Write a file of rows to a path, in one piece or not at all.

    Raises:
        OSError: It cannot be written there.
    """
    beside = f"{path}.{secrets.token_hex(4)}.part"
    try:
        with open(beside, "xb") as copy:
            copy.write(file.map())
            copy.flush()
            os.fsync(copy.fileno())
        os.replace(beside, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside)
