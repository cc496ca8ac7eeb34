"""A list whose rows are in memory once, however many processes read it.

    head | pickle of row 0 | pickle of row 1 | ... | where each row begins, and where the last one ends
      └── where that is

Rows are read one by one, out of pages that all processes share; where one begins is looked up in these pages as well.
"""

from __future__ import annotations

import array
import io
import operator
import pickle
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self, TypeVar, overload

from asyncloader.datasets.memory_file import HEAD, MemoryFile, write_at
from asyncloader.datasets.records import Pickler

T_co = TypeVar("T_co", covariant=True)

_STARTS = struct.Struct("<Q")  # where they are
_STARTS_AT = 24  # in the head
_PIECE_BYTES = 1 << 20  # are pickled before they are written


class SharedList(Sequence[T_co]):
    """Keep rows in memory once for all processes that read them: a list of a dataset that workers do not copy.

    A worker that only reads a Python list writes to it all the same: Python counts references inside the objects, and a
    page that is written to is copied. Here rows are bytes, and a row is made of them when it is asked for. Use it where
    a dataset keeps a list::

        self.samples = SharedList(load_annotations())

    The list works with any loader, and with forked, forkserver and spawned workers: pickled, it is a handle of less
    than 1 kB. The handle is good for processes of the same user on this machine, while the process that pickled it has
    the list; so ranks of one machine can share what one of them has read (``torch.distributed.broadcast_object_list``).
    Memory is freed with the last process that has the list, however that ends, and has no name to be left behind.

    Rows may be anything that can be pickled, and take as much memory as their pickles. Each access makes a new row,
    equal to what was stored, which may be changed without changing the list. The list itself cannot be changed.

    Slices are further lists over the same memory; torch's Subset takes rows by their numbers.

    Args:
        rows: The rows; what a generator yields never is in memory as a whole.

    Raises:
        OSError: Memory is full.
        Exception: A row cannot be pickled; a note says which.

    Example:
        >>> rows = SharedList({"path": f"{number}.jpg", "label": number % 3} for number in range(1000))
        >>> rows[7]
        {'path': '7.jpg', 'label': 1}
        >>> len(rows[::2]), rows[::2][3]["path"]
        (500, '6.jpg')
    """

    __slots__ = ("__weakref__", "_file", "_memory", "_order", "_starts")

    def __init__(self, rows: Iterable[T_co]) -> None:
        self._read(_written(rows))

    def _read(self, file: MemoryFile, order: range | None = None) -> None:
        self._file, self._memory = file, file.map()
        (at,) = _STARTS.unpack_from(self._memory, _STARTS_AT)
        self._starts = self._memory[at:].cast("Q")
        self._order = range(len(self._starts) - 1) if order is None else order

    @classmethod
    def _of(cls, file: MemoryFile, order: range | None = None) -> Self:
        """Make one of the rows of a file."""
        made = cls.__new__(cls)
        made._read(file, order)
        return made

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that the rows are in; a slice tells those of the list that it was cut from."""
        return len(self._memory)

    def __len__(self) -> int:
        return len(self._order)

    @overload
    def __getitem__(self, index: int) -> T_co: ...
    @overload
    def __getitem__(self, index: slice) -> SharedList[T_co]: ...
    def __getitem__(self, index: Any) -> Any:
        """Make one row; of a slice, a list over the same memory.

        Raises:
            IndexError: No row has this index.
            TypeError: The index is none.
        """
        if isinstance(index, slice):
            return self._of(self._file, self._order[index])
        try:
            number = self._order[operator.index(index)]
        except IndexError:
            raise IndexError(f"row {index} of a SharedList of {len(self)} rows") from None
        return self._row(number)

    def _row(self, number: int) -> Any:
        """Make the row of this number in the file. In any thread."""
        return pickle.loads(self._memory[self._starts[number] : self._starts[number + 1]])

    def __iter__(self) -> Iterator[T_co]:
        return map(self._row, self._order)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self):,} rows in {self.nbytes / 1e6:,.1f} MB>"

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> Any:
        return self._of, (self._file, self._order)


def _written(rows: Iterable[Any]) -> MemoryFile:
    """Write rows into a new memory file, and seal it. Some MB of them are held at a time.

    Raises:
        OSError: Memory is full.
        Exception: The iterable, or the pickling of a row, fails; in the latter case a note says which row it was.
    """
    file, end = MemoryFile.create(), HEAD
    starts = array.array("Q", [end])
    waiting = io.BytesIO()
    pickler = Pickler(waiting, protocol=5)  # one for all: to make one takes longer than to pickle a small row
    for number, row in enumerate(rows):
        pickler.clear_memo()
        try:
            pickler.dump(row)
        except Exception as error:
            error.add_note(f"It is row {number} of those that were being stored, or in it: {type(row)}")
            raise
        starts.append(end + waiting.tell())
        if waiting.tell() >= _PIECE_BYTES:
            write_at(file.fd, waiting.getbuffer(), end)
            end = starts[-1]
            waiting.seek(0)
            waiting.truncate()
    write_at(file.fd, waiting.getbuffer(), end)
    at = -(-starts[-1] // 8) * 8
    write_at(file.fd, starts, at)
    write_at(file.fd, _STARTS.pack(at), _STARTS_AT)
    file.seal()
    return file
