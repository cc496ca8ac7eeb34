"""A dict whose items are in memory once, however many processes read it.

    key ── crc32 of its canonical bytes ──> bucket ──> rows of that bucket ──> the one whose key is equal ──> its value

Python's own hash will not do: that of texts differs from process to process.
"""

from __future__ import annotations

import array
import operator
import struct
import zlib
from collections.abc import ItemsView, Iterable, Iterator, Mapping, ValuesView
from typing import Any, TypeVar, cast

import numpy as np

from asyncloader.datasets.blocks import RowReader, RowWriter
from asyncloader.datasets.memory_file import MemoryFile
from asyncloader.datasets.shared import CHANGES, read_only
from asyncloader.errors import ConfigurationError

K = TypeVar("K")
V_co = TypeVar("V_co", covariant=True)


class SharedDict(Mapping[K, V_co]):
    """Keep a mapping in memory once for all processes that read it; see :class:`SharedList`, whose sibling it is.

    Values may be anything that can be pickled, and each access makes a new one. Keys are texts, bytes, numbers, None
    and tuples of these; their order is kept.

    Args:
        items: A mapping, or an iterable of pairs, which is read block by block.
        consume: Empty the dict ``items`` as it is read.

    Raises:
        ConfigurationError: A key is of another type, or comes twice; ``consume`` is asked for, and ``items`` is not a
            dict.
        OSError: There is no memory for them.
        Exception: What pickling a value raises, with a note that says which.

    Example:
        >>> captions = SharedDict({"a.jpg": ["a dog", "a hound"], "b.jpg": ["a cat"]})
        >>> captions["b.jpg"], "c.jpg" in captions
        (['a cat'], False)
    """

    __slots__ = ("__weakref__", "_buckets", "_file", "_key", "_members", "_read", "_value")

    def __init__(self, items: Mapping[K, V_co] | Iterable[tuple[K, V_co]] = (), *, consume: bool = False) -> None:
        if consume and type(items) is not dict:
            raise ConfigurationError(f"consume=True empties a dict, but got {type(items).__name__}")
        hashes = array.array("I")
        writer = RowWriter(_pairs(items, hashes, consume))
        table = _Table(hashes)
        extra = [(put.dtype.str[1:], writer.put(put), len(put)) for put in (table.buckets, table.members)]
        self._settle(writer.finish(extra))
        self._refuse_doubles(table.doubles)

    def _settle(self, file: MemoryFile) -> None:
        self._file = file
        self._read = RowReader(file)
        self._key, self._value = self._read.column(0), self._read.column(1)
        self._buckets, self._members = (
            np.frombuffer(self._read.memory, dtype, count, at).data for dtype, at, count in self._read.extra
        )

    def _refuse_doubles(self, doubles: Iterable[tuple[int, int]]) -> None:
        for first, second in doubles:
            one, other = self._key(first), self._key(second)
            if canonical(one) == canonical(other) and one == other:
                raise ConfigurationError(f"the key {one!r} comes twice, as items {first} and {second}")

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that the items are in."""
        return len(self._read.memory)

    def __len__(self) -> int:
        return self._read.count

    def __getitem__(self, key: K) -> V_co:
        """Make the value of a key.

        Raises:
            KeyError: There is no such key.
        """
        hash(key)  # a list is a TypeError, as in a dict
        if (data := canonical(key)) is not None:
            bucket = zlib.crc32(data) & (len(self._buckets) - 2)
            for at in range(self._buckets[bucket], self._buckets[bucket + 1]):
                number = self._members[at]
                stored = self._key(number)
                # Bytes first: numpy's numbers compare with the items of a tuple, so that (1,) == np.int64(1) is true.
                if canonical(stored) == data and stored == key:
                    return cast(V_co, self._value(number))
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
        return _restore, (type(self), self._file)

    def __copy__(self) -> SharedDict[K, V_co]:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedDict[K, V_co]:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        raise TypeError(read_only(self, "an item cannot be set"))

    def __delitem__(self, key: Any) -> None:
        raise TypeError(read_only(self, "an item cannot be deleted"))

    def __getattr__(self, name: str) -> Any:
        if name in CHANGES:
            raise AttributeError(read_only(self, f"it has no {name!r}"))
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def _restore(kind: type[SharedDict[Any, Any]], file: MemoryFile) -> SharedDict[Any, Any]:
    made = kind.__new__(kind)
    made._settle(file)
    return made


class _Values(ValuesView[V_co]):
    _mapping: SharedDict[Any, V_co]

    def __iter__(self) -> Iterator[V_co]:
        return map(self._mapping._value, range(len(self._mapping)))


class _Items(ItemsView[K, V_co]):
    _mapping: SharedDict[K, V_co]

    def __iter__(self) -> Iterator[tuple[K, V_co]]:
        return map(self._mapping._read, range(len(self._mapping)))


class _Table:
    """Rows by the lower bits of their hashes: `members[buckets[b]:buckets[b + 1]]` are those of bucket b."""

    def __init__(self, hashes: array.array[int]) -> None:
        all_hashes = np.array(hashes, np.uint32)
        count = len(all_hashes)
        size = 1 << max(0, count - 1).bit_length()
        index = np.dtype(np.uint32 if count < 1 << 32 else np.uint64)
        order = np.argsort(all_hashes, kind="stable")
        same = np.flatnonzero(np.diff(all_hashes[order]) == 0)
        self.doubles = _pairs_alike(order, same)
        of_rows = all_hashes & np.uint32(size - 1)
        self.members = np.argsort(of_rows, kind="stable").astype(index)
        self.buckets = np.zeros(size + 1, index)
        np.cumsum(np.bincount(of_rows, minlength=size), out=self.buckets[1:])


def _pairs_alike(order: Any, same: Any) -> list[tuple[int, int]]:
    """Return all pairs of rows with the same hash."""
    pairs: list[tuple[int, int]] = []
    run: list[int] = []
    for at in map(int, same):
        row, after = int(order[at]), int(order[at + 1])
        run = [*run, row] if run and run[-1] == row else [row]
        pairs += [(earlier, after) for earlier in run]
        run.append(after)
    return pairs


def _pairs(items: Any, hashes: array.array[int], consume: bool) -> Iterator[tuple[Any, Any]]:
    """Yield the items, and note the hashes of their keys."""
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
        yield key, value


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
