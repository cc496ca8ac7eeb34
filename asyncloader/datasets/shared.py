"""A list whose rows are in memory once, however many workers read it: their pickles, in one array.

    pickle of row 0 | pickle of row 1 | ...        and where each ends

Nobody counts references in an array: forked workers share its pages, and others are sent it once, for all of them.
"""

from __future__ import annotations

import io
import operator
import pickle
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self, TypeVar, overload

import numpy as np

from asyncloader.datasets.records import Pickler

T_co = TypeVar("T_co", covariant=True)


class SharedList(Sequence[T_co]):
    """Keep rows in memory once for all workers that read them: a list of a dataset that workers do not copy.

    A worker that only reads a Python list writes to it all the same: Python counts references inside the objects, and a
    page that is written to is copied. Here rows are bytes, and a row is made of them when it is asked for. Use it where
    a dataset keeps a list::

        self.samples = SharedList(load_annotations())

    Our loader's workers share it whatever way they are started; torch's share it if they are forked.

    Rows may be anything that can be pickled, and take as much memory as their pickles. Each access makes a new row,
    equal to what was stored, which may be changed without changing the list. The list itself cannot be changed.

    Slices are further lists over the same memory; torch's Subset takes rows by their numbers.

    Args:
        rows: The rows; what a generator yields never is in memory as a whole.

    Raises:
        Exception: A row cannot be pickled; a note says which.

    Example:
        >>> rows = SharedList({"path": f"{number}.jpg", "label": number % 3} for number in range(1000))
        >>> rows[7]
        {'path': '7.jpg', 'label': 1}
        >>> len(rows[::2]), rows[::2][3]["path"]
        (500, '6.jpg')
    """

    def __init__(self, rows: Iterable[T_co]) -> None:
        content, ends = io.BytesIO(), [0]
        pickler = Pickler(content, protocol=5)  # one for all: to make one takes longer than to pickle a small row
        for number, row in enumerate(rows):
            pickler.clear_memo()
            try:
                pickler.dump(row)
            except Exception as error:
                error.add_note(f"It is row {number} of those that were being stored, or in it: {type(row)}")
                raise
            ends.append(content.tell())
        self._content = np.frombuffer(content.getvalue(), np.uint8)
        self._ends = np.array(ends)
        self._order = range(len(ends) - 1)

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that the rows are in; a slice tells those of the list that it was cut from."""
        return self._content.nbytes + self._ends.nbytes

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
            part = self.__new__(type(self))
            part.__dict__.update(vars(self), _order=self._order[index])
            return part
        try:
            number = self._order[operator.index(index)]
        except IndexError:
            raise IndexError(f"row {index} of a SharedList of {len(self)} rows") from None
        return self._row(number)

    def _row(self, number: int) -> Any:
        """Make the row of this number in the memory. In any thread."""
        return pickle.loads(self._content[self._ends[number] : self._ends[number + 1]].data)

    def __iter__(self) -> Iterator[T_co]:
        return map(self._row, self._order)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self):,} rows in {self.nbytes / 1e6:,.1f} MB>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self
