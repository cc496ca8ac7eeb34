"""A dict whose items are in memory once, however many processes read it: a `SharedList` of keys, values and buckets.

    key 0 | value 0 | key 1 | value 1 | ... | bucket 0 | bucket 1 | ...
    key ── crc32 of its canonical bytes, modulo the number of items ──> bucket: numbers of items ──> that with this key

Python's own hash will not do: that of texts differs from process to process.
"""

from __future__ import annotations

import array
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, TypeVar, cast

import numpy as np

from asyncloader.datasets.shared import SharedList
from asyncloader.errors import ConfigurationError

K = TypeVar("K")
V_co = TypeVar("V_co", covariant=True)


class SharedDict(Mapping[K, V_co]):
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

    __slots__ = ("__weakref__", "_rows")

    def __init__(self, items: Mapping[K, V_co] | Iterable[tuple[K, V_co]] = ()) -> None:
        hashes = array.array("I")
        self._rows: SharedList[Any] = SharedList(chain(_keys_and_values(items, hashes), _buckets(hashes)))
        for bucket in self._rows[2 * len(self) :]:
            first: dict[bytes | None, int] = {}
            for number in bucket if len(bucket) > 1 else ():
                key = self._rows[2 * number]
                if (before := first.setdefault(canonical(key), number)) != number:
                    raise ConfigurationError(f"the key {key!r} comes twice, as items {before} and {number}")

    def __len__(self) -> int:
        return len(self._rows) // 3

    def __getitem__(self, key: K) -> V_co:
        """Make the value of a key.

        Raises:
            KeyError: No item has this key.
        """
        count, data = len(self), canonical(key)
        if count and data is not None:
            for number in self._rows[2 * count + zlib.crc32(data) % count]:
                if canonical(self._rows[2 * number]) == data:
                    return cast(V_co, self._rows[2 * number + 1])
        raise KeyError(key)

    def __iter__(self) -> Iterator[K]:
        return iter(self._rows[: 2 * len(self) : 2])

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that the items are in."""
        return self._rows.nbytes

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self):,} items, {self.nbytes / 1e6:,.1f} MB>"


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


def _buckets(hashes: array.array[int]) -> Iterator[tuple[int, ...]]:
    """Yield the numbers of the items of each bucket: as many buckets as there are items, when these were read."""
    buckets = np.asarray(hashes, np.uint32) % max(1, len(hashes))
    numbers, begin = np.argsort(buckets, kind="stable"), 0
    for count in np.bincount(buckets, minlength=len(hashes)).tolist():
        yield tuple(numbers[begin : begin + count].tolist())
        begin += count


def canonical(key: Any) -> bytes | None:
    """Return bytes that are the same for all keys that are equal, in every process; None for a key of another type."""
    if isinstance(key, str):
        return b"s" + key.encode("utf-8", "surrogatepass")
    if isinstance(key, bytes):
        return b"b" + key
    if isinstance(key, (int, np.integer, np.bool_)):  # True == 1
        return b"i%d" % int(key)
    if isinstance(key, (float, np.floating)):
        return b"i%d" % int(key) if float(key).is_integer() else b"f" + struct.pack("<d", key)
    if key is None:
        return b"n"
    if isinstance(key, tuple):
        parts = list(map(canonical, key))
        if None in parts:
            return None
        return b"t" + b"".join(struct.pack("<I", len(part)) + part for part in cast(list[bytes], parts))
    return None
