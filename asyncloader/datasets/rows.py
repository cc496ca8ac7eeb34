"""Rows in a memory file: each pickled, one after the other, with tables that say where each of them is.

    head | pickle of row 0 | pickle of row 1 | ... | where each row begins | further tables | index of the tables
      └── where the index is

Rows are read one by one, out of pages that all processes share; the tables are looked up in these pages as well.
"""

from __future__ import annotations

import array
import io
import os
import pickle
import struct
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from asyncloader.datasets.memory_file import HEAD, MemoryFile, write_at
from asyncloader.datasets.records import Pickler
from asyncloader.datasets.whole_file import in_one_piece

KIND = b"asl-rows"
_HEAD = struct.Struct("<24xQ")  # after kind and token: where the index is
_PIECE_BYTES = 1 << 20  # are pickled before they are written


def write(rows: Iterable[Any], *, per_item: int = 1, tables: Callable[[], list[Any]] = list) -> MemoryFile:
    """Write rows into a new memory file, and seal it.

    Args:
        rows: The rows, of which some MB are held at a time.
        per_item: How many rows make what the user calls one; for the note on errors.
        tables: Returns arrays of unsigned integers that belong to the rows, when all of these were read.

    Raises:
        OSError: Memory is full.
        Exception: The iterable, or the pickling of a row, fails; in the latter case a note says which row it was.
    """
    file, end = MemoryFile.create(KIND), HEAD
    starts = array.array("Q", [end])
    waiting = io.BytesIO()
    pickler = Pickler(waiting, protocol=5)  # one for all: to make one takes longer than to pickle a small row

    def put(data: Any) -> int:
        nonlocal end
        at, end = end, -(-(end + len(data)) // 8) * 8
        write_at(file.fd, data, at)
        return at

    for number, row in enumerate(rows):
        pickler.clear_memo()
        try:
            pickler.dump(row)
        except Exception as error:
            error.add_note(f"It is row {number // per_item} of those that were being stored, or in it: {type(row)}")
            raise
        starts.append(end + waiting.tell())
        if waiting.tell() >= _PIECE_BYTES:
            write_at(file.fd, waiting.getbuffer(), end)
            end = starts[-1]
            waiting.seek(0)
            waiting.truncate()
    put(waiting.getbuffer())
    arrays = [np.asarray(table) for table in (starts, *tables())]
    at = put(pickle.dumps([(table.dtype.char, put(table.view(np.uint8)), table.nbytes) for table in arrays]))
    os.ftruncate(file.fd, end)
    write_at(file.fd, _HEAD.pack(at)[24:], 24)
    file.seal()
    return file


class RowReader:
    """Reads rows of a memory file, in any thread.

    Attributes:
        count: How many there are.
        tables: The tables that were written beside the rows.
    """

    def __init__(self, file: MemoryFile) -> None:
        self.memory = file.map()
        (at,) = _HEAD.unpack_from(self.memory)
        self._starts, *self.tables = (
            self.memory[at : at + size].cast(code) for code, at, size in pickle.loads(self.memory[at:])
        )
        self.count = len(self._starts) - 1

    def __call__(self, number: int) -> Any:
        """Make the row of this number, which is at least 0 and below `count`."""
        return pickle.loads(self.memory[self._starts[number] : self._starts[number + 1]])


def save(file: MemoryFile, path: str) -> None:
    """Write a file of rows to a path, in one piece or not at all.

    Raises:
        OSError: The file cannot be written there.
    """
    with in_one_piece(path) as beside, open(beside, "xb") as copy:
        copy.write(file.map())
        copy.flush()
        os.fsync(copy.fileno())
