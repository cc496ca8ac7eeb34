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
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from asyncloader.datasets.rows import RowReader, write
from asyncloader.datasets.shared import SharedRows
from asyncloader.errors import ConfigurationError

K = TypeVar("K")
V_co = TypeVar("V_co", covariant=True)


class SharedDict(SharedRows, Mapping[K, V_co]):
    """Keep a mapping in memory once for all processes that read it; see :class:`SharedList`, whose sibling it is.

    Values may be anything that can be pickled, and each access makes a new one. Keys are texts, bytes, numbers, None
    and tuples of these; their order is kept.

    Args:
        items: A mapping, or an iterable of pairs.

    Raises:
        ConfigurationError: A key is of another type, or comes twice.
        OSError: Memory is full.
        Exception: A value cannot be pickled; a note says which.

    Example:
        >>> captions = SharedDict({"a.jpg": ["a dog", "a hound"], "b.jpg": ["a cat"]})
        >>> captions["b.jpg"], "c.jpg" in captions
        (['a cat'], False)
    """

    __slots__ = ()

    def __init__(self, items: Mapping[K, V_co] | Iterable[tuple[K, V_co]] = ()) -> None:
        hashes = array.array("I")
        self._file = write(_keys_and_values(items, hashes), per_item=2, tables=lambda: _sorted(hashes))
        self._read = RowReader(self._file)
        found, numbers = map(np.asarray, self._read.tables)
        first: dict[bytes | None, int] = {}
        for at in np.flatnonzero(found[1:] == found[:-1]).tolist():
            for number in numbers[at : at + 2].tolist():
                key = self._key(number)
                if (before := first.setdefault(canonical(key), number)) != number:
                    raise ConfigurationError(f"the key {key!r} comes twice, as items {before} and {number}")

    def _key(self, number: int) -> Any:
        return self._read(2 * number)

    def __len__(self) -> int:
        return self._read.count // 2

    def __getitem__(self, key: K) -> V_co:
        """Make the value of a key.

        Raises:
            KeyError: No item has this key.
        """
        data, (hashes, numbers) = canonical(key), self._read.tables
        wanted = zlib.crc32(data or b"")
        at = bisect_left(hashes, wanted)
        while data is not None and at < len(self) and hashes[at] == wanted:
            if canonical(self._key(numbers[at])) == data:
                return cast(V_co, self._read(2 * numbers[at] + 1))
            at += 1
        raise KeyError(key)

    def __iter__(self) -> Iterator[K]:
        return map(self._key, range(len(self)))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self):,} items, {self.nbytes / 1e6:,.1f} MB>"


def _sorted(hashes: array.array[int]) -> list[NDArray[Any]]:
    """Return the hashes of items, sorted, and the number of the item that each of them is of."""
    values = np.asarray(hashes, np.uint32)
    order = np.argsort(values, kind="stable")
    return [values[order], order.astype(np.uint32 if len(order) < 1 << 32 else np.uint64)]


def _keys_and_values(items: Any, hashes: array.array[int]) -> Iterator[Any]:
    """Yield each key and its value, and note the hashes of the keys."""
    for key, value in items.items() if isinstance(items, Mapping) else items:
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
