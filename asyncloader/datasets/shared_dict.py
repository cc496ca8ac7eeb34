"""A dict whose items are in memory once, however many processes read it.

    key ── crc32 of its canonical bytes ──> items of that hash, in a sorted table ──> the one whose key is equal

Rows are its keys and values in turns: row 2 n is the key of item n, and row 2 n + 1 its value.

Python's own hash will not do: that of texts differs from process to process.
"""

from __future__ import annotations

import array
import operator
import struct
import zlib
from bisect import bisect_left
from collections.abc import ItemsView, Iterable, Iterator, Mapping, ValuesView
from typing import Any, Self, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from asyncloader.datasets.memory_file import MemoryFile
from asyncloader.datasets.rows import write
from asyncloader.datasets.shared import ReadOnly, restore
from asyncloader.errors import ConfigurationError

K = TypeVar("K")
V_co = TypeVar("V_co", covariant=True)


class SharedDict(ReadOnly, Mapping[K, V_co]):
    """Keep a mapping in memory once for all processes that read it; see :class:`SharedList`, whose sibling it is.

    Values may be anything that can be pickled, and each access makes a new one. Keys are texts, bytes, numbers, None
    and tuples of these; their order is kept.

    Args:
        items: A mapping, or an iterable of pairs.
        consume: Empty the dict ``items`` as it is read.

    Raises:
        ConfigurationError: A key is of another type, or comes twice; ``consume`` is asked for, and ``items`` is not a
            dict.
        OSError: Memory is full.
        Exception: A value cannot be pickled; a note says which.

    Example:
        >>> captions = SharedDict({"a.jpg": ["a dog", "a hound"], "b.jpg": ["a cat"]})
        >>> captions["b.jpg"], "c.jpg" in captions
        (['a cat'], False)
    """

    __slots__ = ("_hashes", "_numbers")

    def __init__(self, items: Mapping[K, V_co] | Iterable[tuple[K, V_co]] = (), *, consume: bool = False) -> None:
        if consume and type(items) is not dict:
            raise ConfigurationError(f"consume=True empties a dict, but got {type(items).__name__}")
        hashes = array.array("I")
        rows = _keys_and_values(items, hashes, consume)
        self._settle(write(rows, per_item=2, tables=lambda: _sorted(hashes)))
        self._refuse_doubles()

    def _settle(self, file: MemoryFile) -> Self:
        super()._settle(file)
        self._hashes, self._numbers = self._read.tables
        return self

    def _refuse_doubles(self) -> None:
        first: dict[Any, int] = {}
        hashes = np.asarray(self._hashes)
        for at in np.flatnonzero(hashes[1:] == hashes[:-1]).tolist():
            for number in self._numbers[at : at + 2]:
                key = self._key(number)
                if first.setdefault((canonical(key), key), number) != number:
                    before = first[canonical(key), key]
                    raise ConfigurationError(f"the key {key!r} comes twice, as items {before} and {number}")

    def _key(self, number: int) -> Any:
        return self._read(2 * number)

    def _value(self, number: int) -> Any:
        return self._read(2 * number + 1)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, key: K) -> V_co:
        """Make the value of a key.

        Raises:
            KeyError: No item has this key.
        """
        hash(key)  # a list is a TypeError, as in a dict
        if (data := canonical(key)) is not None:
            wanted = zlib.crc32(data)
            at = bisect_left(self._hashes, wanted)
            while at < len(self) and self._hashes[at] == wanted:
                stored = self._key(self._numbers[at])
                # Bytes first: numpy's numbers compare with the items of a tuple, so that (1,) == np.int64(1) is true.
                if canonical(stored) == data and stored == key:
                    return cast(V_co, self._value(self._numbers[at]))
                at += 1
        raise KeyError(key)

    def __iter__(self) -> Iterator[K]:
        return map(self._key, range(len(self)))

    def values(self) -> ValuesView[V_co]:
        """Return a view of the values, in the order of the keys."""
        return _Values(self)

    def items(self) -> ItemsView[K, V_co]:
        """Return a view of the items."""
        return _Items(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self):,} items, {self.nbytes / 1e6:,.1f} MB>"

    def __reduce__(self) -> Any:
        return restore, (type(self), self._file)


class _Values(ValuesView[V_co]):
    _mapping: SharedDict[Any, V_co]

    def __iter__(self) -> Iterator[V_co]:
        return map(self._mapping._value, range(len(self._mapping)))


class _Items(ItemsView[K, V_co]):
    _mapping: SharedDict[K, V_co]

    def __iter__(self) -> Iterator[tuple[K, V_co]]:
        return zip(self._mapping, self._mapping.values(), strict=True)


def _sorted(hashes: array.array[int]) -> list[NDArray[Any]]:
    """Return the hashes of items, sorted, and the number of the item that each of them is of."""
    values = np.asarray(hashes, np.uint32)
    order = np.argsort(values, kind="stable")
    return [values[order], order.astype(np.uint32 if len(order) < 1 << 32 else np.uint64)]


def _keys_and_values(items: Any, hashes: array.array[int], consume: bool) -> Iterator[Any]:
    """Yield each key and its value, and note the hashes of the keys."""
    if consume:
        pairs: Iterable[Any] = ((key, items.pop(key)) for key in list(items))
    else:
        pairs = items.items() if isinstance(items, Mapping) else items
    for key, value in pairs:
        data = canonical(key)
        if data is None:
            raise ConfigurationError(
                f"keys of a SharedDict are str, bytes, numbers, None and tuples of these, but not {key!r}"
            )
        hashes.append(zlib.crc32(data))
        yield key
        yield value


def canonical(key: Any) -> bytes | None:
    """Return bytes that are the same for all keys that are equal, in every process; None for a key of another type."""
    if isinstance(key, str):
        return b"s" + key.encode("utf-8", "surrogatepass")
    if isinstance(key, bytes):
        return b"b" + key
    if isinstance(key, (int, np.integer)):  # True == 1
        return b"i%d" % operator.index(key)
    if isinstance(key, (float, np.floating)):
        return b"i%d" % int(key) if float(key).is_integer() else b"f" + struct.pack("<d", key)
    if key is None:
        return b"n"
    if isinstance(key, np.bool_):
        return b"i%d" % int(key)
    if isinstance(key, tuple):
        parts = list(map(canonical, key))
        if None in parts:
            return None
        return b"t" + b"".join(struct.pack("<I", len(part)) + part for part in cast(list[bytes], parts))
    return None
