"""A list whose rows are in memory once, however many processes read it; and what it shares with a dict of that kind."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from asyncloader.datasets.memory_file import MemoryFile
from asyncloader.datasets.rows import KIND, RowReader, save, write
from asyncloader.errors import ConfigurationError

T_co = TypeVar("T_co", covariant=True)

_CHANGES = frozenset(
    ("append", "clear", "extend", "insert", "pop", "popitem", "remove", "reverse", "setdefault", "sort", "update")
)
_SHORT = 32  # an index array up to so long travels in the pickle


class ReadOnly:
    """Rows in memory that processes share. Trying to change them is an error that says what to do."""

    __slots__ = ("__weakref__", "_file", "_read")

    _file: MemoryFile
    _read: RowReader

    def _settle(self, file: MemoryFile) -> Self:
        """Take the rows of a file."""
        self._file = file
        self._read = RowReader(file)
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that the rows are in; a slice tells those of the list that it was cut from."""
        return len(self._read.memory)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __setitem__(self, index: Any, row: Any) -> None:
        raise TypeError(self._refusal("an item cannot be set"))

    def __delitem__(self, index: Any) -> None:
        raise TypeError(self._refusal("an item cannot be deleted"))

    def __getattr__(self, name: str) -> Any:
        if name in _CHANGES:
            raise AttributeError(self._refusal(f"it has no {name!r}"))
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _refusal(self, what: str) -> str:
        name = type(self).__name__
        return (
            f"{what}: a {name} is read-only, since the processes that share its memory would not see each other's "
            f"changes; make a new {name}, or change the rows that it gives, which are copies"
        )


class SharedList(ReadOnly, Sequence[T_co]):
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

    Slices, and index arrays as in numpy, are further lists over the same memory.

    Args:
        rows: The rows; what a generator yields never is in memory as a whole.
        consume: Empty the list ``rows`` as it is read, so that few of its rows are in memory twice. Rows that something
            else refers to stay alive. If a row cannot be pickled, those before it are gone.

    Raises:
        ConfigurationError: ``consume`` is asked for, and ``rows`` is no list.
        OSError: Memory is full.
        Exception: A row cannot be pickled; a note says which.

    Example:
        >>> rows = SharedList({"path": f"{number}.jpg", "label": number % 3} for number in range(1000))
        >>> rows[7]
        {'path': '7.jpg', 'label': 1}
        >>> len(rows[::2]), rows[np.array([3, 5])][-1]["path"]
        (500, '5.jpg')
    """

    __slots__ = ("_order", "_order_file")

    seeds_samples = True

    def __init__(self, rows: Iterable[T_co], *, consume: bool = False) -> None:
        if consume and type(rows) is not list:
            raise ConfigurationError(f"consume=True empties a list, but got {type(rows).__name__}")
        self._settle(write(_emptied(rows) if consume else rows))  # type: ignore[arg-type]

    def _settle(self, file: MemoryFile, order: Any = None) -> Self:
        """Take the rows of a file; in another order, if one is given, itself or in a file of its own."""
        super()._settle(file)
        self._order_file = order if isinstance(order, MemoryFile) else None
        found = RowReader(order)(0) if isinstance(order, MemoryFile) else order
        self._order: range | NDArray[np.int64] = range(self._read.count) if found is None else found
        return self

    @classmethod
    def from_iterable(cls, rows: Iterable[T_co]) -> Self:
        """Make one of the rows that an iterable yields, of which about 1 MB is in memory beside the list at a time."""
        return cls(rows)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Open a list that `save` has written. All processes that open the same file share its pages.

        Open only what you trust: like :func:`pickle.load`, reading rows can run code that the file contains.

        Raises:
            ValueError: The file is something else.
            OSError: The file cannot be opened.
        """
        return cls.__new__(cls)._settle(MemoryFile.open(os.path.abspath(path), KIND))

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
    def __getitem__(self, index: slice | Sequence[int] | NDArray[Any]) -> SharedList[T_co]: ...
    def __getitem__(self, index: Any) -> Any:
        """Make one row; of a slice or an index array, a list over the same memory.

        Raises:
            IndexError: No row has this index.
            TypeError: The index is none.
        """
        if type(index) is not int:
            if isinstance(index, slice):
                return self._part(self._order[index])
            if getattr(index, "ndim", 0) or isinstance(index, (list, tuple, range)):
                return self._part(self._picked(index))
            try:
                index = operator.index(index)
            except TypeError:
                raise TypeError(
                    "a SharedList takes whole numbers, slices and arrays of whole numbers or truth values, "
                    f"not {type(index).__name__}"
                ) from None
        try:
            number = self._order[index]
        except IndexError:
            raise IndexError(f"row {index} of a SharedList of {len(self)} rows") from None
        return self._read(int(number))

    def __getitems__(self, indices: Sequence[int]) -> list[T_co]:
        """Make the rows of a batch, for loaders that ask for all of them at once."""
        return [self[index] for index in indices]

    def __iter__(self) -> Iterator[T_co]:
        return map(self._read, self._order if isinstance(self._order, range) else map(int, self._order))

    def __contains__(self, row: object) -> bool:
        return any(row is one or row == one for one in self)

    def __repr__(self) -> str:
        part = "" if len(self) == self._read.count else f" of {self._read.count:,}"
        return f"<{type(self).__name__} of {len(self):,}{part} rows, {self.nbytes / 1e6:,.1f} MB>"

    def __reduce__(self) -> Any:
        order: Any = self._order
        if not isinstance(order, range) and len(order) > _SHORT:
            if self._order_file is None:
                self._order_file = write([order])
            order = self._order_file
        return restore, (type(self), self._file, order)

    def _picked(self, index: Any) -> NDArray[np.int64]:
        wanted = np.asarray(index)
        if wanted.ndim == 1 and not wanted.size:
            wanted = wanted.astype(np.int64)
        if wanted.ndim != 1 or wanted.dtype.kind not in "biu":
            kind = f"{wanted.ndim} dimensions of {wanted.dtype}"
            raise TypeError(f"a SharedList takes arrays of one dimension, of whole numbers or truth values, not {kind}")
        if wanted.dtype.kind == "b":
            if len(wanted) != len(self):
                raise IndexError(f"{len(wanted)} truth values for a SharedList of {len(self)} rows")
            wanted = np.flatnonzero(wanted)
        wanted = wanted.astype(np.int64)
        wanted[wanted < 0] += len(self)
        if wanted.size and not 0 <= wanted.min() <= wanted.max() < len(self):
            raise IndexError(f"an index is out of range of a SharedList of {len(self)} rows")
        if isinstance(self._order, range):
            wanted = self._order.start + self._order.step * wanted
        else:
            wanted = self._order[wanted]
        return wanted

    def _part(self, order: range | NDArray[np.int64]) -> Self:
        return type(self).__new__(type(self))._settle(self._file, order)


def _emptied(rows: list[Any]) -> Iterator[Any]:
    """Yield the rows of a list; none of them stays in it."""
    for number, row in enumerate(rows):
        rows[number] = None
        yield row
    rows.clear()


def restore(kind: type[ReadOnly], *parts: Any) -> ReadOnly:
    """Make a list or a dict of what it was pickled as."""
    return kind.__new__(kind)._settle(*parts)
