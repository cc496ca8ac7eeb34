"""Rows of Python values as columns of bytes, and back, one row at a time.

    rows ──> encode ──> shape: nested tuples that say where which bytes are
                   └──> bytes: numbers as arrays, texts one after the other with an array of offsets
    shape + bytes ──> reader ──> reader(i) is row i

Values of one type and form become columns: a dict is a column for each key, a list of numbers a stretch of an array.
What is not alike, or of another type, is pickled value by value. Rows come back equal, and of the same types; objects
that were shared between rows, or within one, are not shared any more.

pyarrow's record batches were tried in this place: of rows such as an annotation (a path, a label, a box), making them
took seven times as long as pickling each row, and to read one five times as long as to unpickle it.
"""

from __future__ import annotations

import array
import itertools
import operator
import pickle
import struct
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from asyncloader.datasets.records import dumper

Shape: TypeAlias = tuple[Any, ...]
Put: TypeAlias = Callable[[Any], int]
"""Stores bytes, aligned to 8, and returns where."""
Reader: TypeAlias = Callable[[int], Any]

_WIDEST = 64  # keys of a dict, items of a tuple: beyond, and beyond so many levels, rows are pickled
_DEEPEST = 6
_INTS = ("b", "h", "i", "q")
_TEXT = ("utf-8", "surrogatepass")


def encode(values: Sequence[Any], put: Put, depth: int = 0) -> Shape:
    """Store the values of a column; return its shape.

    Raises:
        Exception: What pickling a value raises, with a note on which one it was.
    """
    kinds = set(map(type, values))
    if len(kinds) == 1:
        (kind,) = kinds
        encoder = _ENCODERS.get(kind)
        if encoder is None and issubclass(kind, np.number) and not issubclass(kind, np.timedelta64):
            encoder = _scalars
        if encoder is not None and depth < _DEEPEST and (shape := encoder(values, put, depth)) is not None:
            return shape
    elif len(kinds) == 2 and type(None) in kinds:
        return _optional(values, put, depth)
    return _pickled(values, put)


def reader(shape: Shape, memory: memoryview) -> Reader:
    """Return the function that makes a value of its number."""
    return _READERS[shape[0]](memory, *shape[1:])


# ---- writing ----


def _none(values: Sequence[None], put: Put, depth: int) -> Shape | None:
    return ("none",)


def _bools(values: Sequence[bool], put: Put, depth: int) -> Shape | None:
    return "numbers", "?", put(np.array(values, np.bool_)), len(values)


def _ints(values: Sequence[int], put: Put, depth: int) -> Shape | None:
    try:
        numbers = np.array(array.array("q", values))
    except OverflowError:
        return None
    low, high = int(numbers.min()), int(numbers.max())
    code = next(code for code in _INTS if np.iinfo(code).min <= low and high <= np.iinfo(code).max)
    return "numbers", code, put(numbers.astype(code)), len(values)


def _floats(values: Sequence[float], put: Put, depth: int) -> Shape | None:
    return "numbers", "d", put(array.array("d", values)), len(values)


def _scalars(values: Sequence[Any], put: Put, depth: int) -> Shape | None:
    numbers = np.array(values)
    if numbers.dtype != values[0].dtype:
        return None
    return "scalars", numbers.dtype.str, put(numbers), len(values)


def _texts(values: Sequence[str], put: Put, depth: int) -> Shape | None:
    whole = "".join(values)
    if whole.isascii():
        return "texts", *_stretches(map(len, values), len(values), put), put(whole.encode()), len(whole)
    parts = [value.encode(*_TEXT) for value in values]
    return "texts", *_bytes_of(parts, put)


def _bytes(values: Sequence[bytes], put: Put, depth: int) -> Shape | None:
    return "bytes", *_bytes_of(values, put)


def _pickled(values: Sequence[Any], put: Put) -> Shape:
    parts, dumps = [], dumper()
    for number, value in enumerate(values):
        try:
            parts.append(dumps(value))
        except Exception as error:
            error.add_note(f"It is row {number} of those that were being stored, or a value in it: {type(value)}")
            raise
    return "pickled", *_bytes_of(parts, put)


def _bytes_of(parts: Sequence[bytes], put: Put) -> Shape:
    whole = b"".join(parts)
    return *_stretches(map(len, parts), len(parts), put), put(whole), len(whole)


def _stretches(lengths: Any, count: int, put: Put) -> Shape:
    """Store where each of `count` stretches begins, and where the last ends."""
    ends = np.zeros(count + 1, np.int64)
    np.cumsum(np.fromiter(lengths, np.int64, count), out=ends[1:])
    code = "I" if ends[-1] < 1 << 32 else "Q"
    return code, put(ends.astype(code)), count + 1


def _dicts(values: Sequence[dict[Any, Any]], put: Put, depth: int) -> Shape | None:
    keys = tuple(values[0])
    if len(keys) > _WIDEST or set(map(type, keys)) - {str} or not all(map(keys.__eq__, map(tuple, values))):
        return None
    return "dicts", keys, [encode(_column(values, key), put, depth + 1) for key in keys]


def _sequences(values: Sequence[Any], put: Put, depth: int) -> Shape | None:
    name, first = type(values[0]).__name__, values[0]
    lengths = set(map(len, values))
    are_alike = len(lengths) == 1 and len(first) <= _WIDEST
    if are_alike and len(set(map(type, first))) > 1:
        return "records", name, [encode(_column(values, at), put, depth + 1) for at in range(len(first))]
    items = list(itertools.chain.from_iterable(values))
    kinds = set(map(type, items))
    if len(lengths) == 1 and (kinds == {int} or kinds == {float}):
        shape = encode(items, put, depth + 1)
        return ("vectors", name, len(first), *shape[1:]) if shape[0] == "numbers" else None
    if are_alike:
        return "records", name, [encode(_column(values, at), put, depth + 1) for at in range(len(first))]
    if len(kinds) > 1 or not kinds <= _ENCODERS.keys():  # pickled one by one, items take more room than their lists
        return None
    return "lists", name, *_stretches(map(len, values), len(values), put), encode(items, put, depth + 1)


def _column(values: Sequence[Any], key: Any) -> list[Any]:
    """Return one item of each; zip(*values) takes four times as long, most of it in the garbage collector."""
    return list(map(operator.itemgetter(key), values))


def _arrays(values: Sequence[Any], put: Put, depth: int) -> Shape | None:
    dtype, ndim = values[0].dtype, values[0].ndim
    if (
        dtype.kind in "OmMV"
        or not dtype.isnative
        or not dtype.itemsize
        or any(value.dtype != dtype or value.ndim != ndim for value in values)
    ):
        return None
    sizes = np.array([value.shape for value in values], np.int64).reshape(len(values), ndim)
    if values[0].size * len(values) == sum(value.size for value in values) and (sizes == sizes[0]).all():
        alike = np.stack(values) if ndim else np.array(values, dtype)
        return "arrays", dtype.str, values[0].shape, put(alike), len(values)
    parts = [np.ascontiguousarray(value).reshape(-1) for value in values]
    ends = _stretches(map(len, parts), len(parts), put)
    whole = np.concatenate(parts)
    return "ragged", dtype.str, ndim, put(sizes), *ends, put(whole), whole.size


def _tensors(values: Sequence[torch.Tensor], put: Put, depth: int) -> Shape | None:
    for value in values:
        if value.device.type != "cpu" or value.layout is not torch.strided or value.requires_grad or value.is_conj():
            return None
    try:
        arrays = [value.numpy() for value in values]
    except (TypeError, RuntimeError):  # a dtype that numpy does not have
        return None
    shape = _arrays(arrays, put, depth)
    return None if shape is None else ("tensors", shape)


def _optional(values: Sequence[Any], put: Put, depth: int) -> Shape:
    there = [value for value in values if value is not None]
    places = np.full(len(values), -1, np.int32)
    places[[at for at, value in enumerate(values) if value is not None]] = np.arange(len(there))
    return "optional", put(places), len(values), encode(there, put, depth + 1)


_ENCODERS: dict[type, Callable[[Any, Put, int], Shape | None]] = {
    type(None): _none,
    bool: _bools,
    int: _ints,
    float: _floats,
    str: _texts,
    bytes: _bytes,
    dict: _dicts,
    tuple: _sequences,
    list: _sequences,
    np.ndarray: _arrays,
    torch.Tensor: _tensors,
}


# ---- reading ----


def _numbers_at(memory: memoryview, code: str, at: int, count: int) -> memoryview:
    return memory[at : at + count * struct.calcsize(code)].cast(code)  # type: ignore[call-overload, no-any-return]


def _array_at(memory: memoryview, dtype: str, at: int, count: int) -> Any:
    return np.frombuffer(memory, dtype, count, at) if count else np.empty(0, dtype)


def _read_none(memory: memoryview) -> Reader:
    return lambda number: None


def _read_numbers(memory: memoryview, code: str, at: int, count: int) -> Reader:
    return _numbers_at(memory, code, at, count).__getitem__


def _read_scalars(memory: memoryview, dtype: str, at: int, count: int) -> Reader:
    return _array_at(memory, dtype, at, count).__getitem__  # type: ignore[no-any-return]


def _read_bytes(memory: memoryview, code: str, ends_at: int, ends: int, at: int, size: int) -> Reader:
    where, data = _numbers_at(memory, code, ends_at, ends), memory[at : at + size]
    return lambda number: bytes(data[where[number] : where[number + 1]])


def _read_texts(memory: memoryview, code: str, ends_at: int, ends: int, at: int, size: int) -> Reader:
    where, data = _numbers_at(memory, code, ends_at, ends), memory[at : at + size]
    return lambda number: str(data[where[number] : where[number + 1]], *_TEXT)


def _read_pickled(memory: memoryview, code: str, ends_at: int, ends: int, at: int, size: int) -> Reader:
    where, data, loads = _numbers_at(memory, code, ends_at, ends), memory[at : at + size], pickle.loads
    return lambda number: loads(data[where[number] : where[number + 1]])


def _read_dicts(memory: memoryview, keys: tuple[str, ...], columns: list[Shape]) -> Reader:
    readers = [(key, reader(column, memory)) for key, column in zip(keys, columns, strict=True)]
    return lambda number: {key: read(number) for key, read in readers}


def _read_records(memory: memoryview, name: str, columns: list[Shape]) -> Reader:
    readers = [reader(column, memory) for column in columns]
    if name == "list":
        return lambda number: [read(number) for read in readers]
    return lambda number: tuple([read(number) for read in readers])


def _read_vectors(memory: memoryview, name: str, length: int, code: str, at: int, count: int) -> Reader:
    numbers = _numbers_at(memory, code, at, count)
    if name == "list":
        return lambda number: numbers[number * length : (number + 1) * length].tolist()
    return lambda number: tuple(numbers[number * length : (number + 1) * length])


def _read_lists(memory: memoryview, name: str, code: str, ends_at: int, ends: int, items: Shape) -> Reader:
    where, kind = _numbers_at(memory, code, ends_at, ends), list if name == "list" else tuple
    if items[0] == "numbers":
        numbers = _numbers_at(memory, *items[1:])
        return lambda number: kind(numbers[where[number] : where[number + 1]])
    read = reader(items, memory)
    return lambda number: kind(map(read, range(where[number], where[number + 1])))


def _read_arrays(memory: memoryview, dtype: str, shape: tuple[int, ...], at: int, count: int) -> Reader:
    whole = _array_at(memory, dtype, at, count * int(np.prod(shape))).reshape(count, *shape)
    return lambda number: np.array(whole[number])  # a copy: rows are the reader's own, and may be written to


def _read_ragged(
    memory: memoryview, dtype: str, ndim: int, sizes_at: int, code: str, ends_at: int, ends: int, at: int, size: int
) -> Reader:
    sizes = _array_at(memory, "int64", sizes_at, (ends - 1) * ndim).reshape(ends - 1, ndim)
    where, whole = _numbers_at(memory, code, ends_at, ends), _array_at(memory, dtype, at, size)
    return lambda number: np.array(whole[where[number] : where[number + 1]]).reshape(sizes[number])


def _read_tensors(memory: memoryview, shape: Shape) -> Reader:
    read = reader(shape, memory)
    return lambda number: torch.from_numpy(read(number))


def _read_optional(memory: memoryview, at: int, count: int, shape: Shape) -> Reader:
    places, read = _numbers_at(memory, "i", at, count), reader(shape, memory)

    def optional(number: int) -> Any:
        place = places[number]
        return None if place < 0 else read(place)

    return optional


_READERS: dict[str, Callable[..., Reader]] = {
    "none": _read_none,
    "numbers": _read_numbers,
    "scalars": _read_scalars,
    "bytes": _read_bytes,
    "texts": _read_texts,
    "pickled": _read_pickled,
    "dicts": _read_dicts,
    "records": _read_records,
    "vectors": _read_vectors,
    "lists": _read_lists,
    "arrays": _read_arrays,
    "ragged": _read_ragged,
    "tensors": _read_tensors,
    "optional": _read_optional,
}
