"""A list whose rows are in memory once, however many processes read it."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self, TypeVar, overload

from asyncloader.datasets.memory_file import MemoryFile
from asyncloader.datasets.rows import KIND, RowReader, save, write

T_co = TypeVar("T_co", covariant=True)


class SharedRows:
    """Rows in memory that processes share, which nobody can change."""

    __slots__ = ("__weakref__", "_file", "_read")

    _file: MemoryFile
    _read: RowReader

    @classmethod
    def _of(cls, file: MemoryFile) -> Self:
        """Make one of the rows of a file."""
        made = cls.__new__(cls)
        made._file, made._read = file, RowReader(file)
        return made

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that the rows are in; a slice tells those of the list that it was cut from."""
        return len(self._read.memory)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> Any:
        return self._of, (self._file,)


class SharedList(SharedRows, Sequence[T_co]):
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

    __slots__ = ("_order",)

    seeds_samples = True

    def __init__(self, rows: Iterable[T_co]) -> None:
        self._file = write(rows)
        self._read = RowReader(self._file)
        self._order = range(self._read.count)

    @classmethod
    def _of(cls, file: MemoryFile, order: range | None = None) -> Self:
        made = super()._of(file)
        made._order = range(made._read.count) if order is None else order
        return made

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Open a list that `save` has written. All processes that open the same file share its pages.

        Open only what you trust: like :func:`pickle.load`, reading rows can run code that the file contains.

        Raises:
            ValueError: The file is something else.
            OSError: The file cannot be opened.
        """
        return cls._of(MemoryFile.open(os.path.abspath(path), KIND))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the list to a file, for `open`: by ranks in separate containers, or the next run.

        The file appears under its name when it is complete.

        Raises:
            OSError: The file cannot be written.
        """
        if self._order != range(self._read.count):
            return SharedList(self).save(path)
        save(self._file, os.path.abspath(path))
        return None

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
        return self._read(number)

    def __getitems__(self, indices: Sequence[int]) -> list[T_co]:
        """Make the rows of a batch, for loaders that ask for all of them at once."""
        return [self[index] for index in indices]

    def __iter__(self) -> Iterator[T_co]:
        return map(self._read, self._order)

    def __contains__(self, row: object) -> bool:
        return any(row is one or row == one for one in self)

    def __repr__(self) -> str:
        part = "" if len(self) == self._read.count else f" of {self._read.count:,}"
        return f"<{type(self).__name__} of {len(self):,}{part} rows, {self.nbytes / 1e6:,.1f} MB>"

    def __reduce__(self) -> Any:
        return self._of, (self._file, self._order)
