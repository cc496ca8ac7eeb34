"""The digest of a batch: 64 bits that are the same for the same data, and for other data, almost certainly, others.

    batch ── walked ──> leaves: XXH3 of dtype, shape and the bytes in C order ──┐
                        containers: XXH3 of their kind and of these <───────────┘  (a Merkle tree)

Types count by their names, keys of mappings and elements of sets in no order, tensors and arrays by their bits; not
their strides, byte order, memory or device. Other objects count by what pickle would write of them, part by part: a
pickle itself differs where two equal strings are one object in one process and two in another. Objects that cannot be
looked at are left out, but for their type, and named in the log.

Each object is looked into once: nine objects that refer to each other have 100,000 ways through them, which took 17 s.
In a circle, digests depend on where it was entered. So they are forgotten with it, and a sample has the same digest
whether others of the batch share its objects or not. Inside a circle of objects, the order of sets counts.

XXH3 of Yann Collet's xxHash (https://xxhash.com), whose values have been fixed since its version 0.8.0: 38.5 MB take
2.6 ms, as long as reading them takes (a sum of them: 2.6), while zlib's crc32 takes 16, zlib-ng's 3.5, BLAKE3 7.1. The
digest is no defence against someone who wants two batches to be alike.
"""

from __future__ import annotations

import enum
import functools
import logging
import os
import struct
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Set
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np
import torch
import xxhash

from asyncloader.transport.parts import BUFFERS, bits_of_array, bits_of_tensor, parts_of, reduction_of

log = logging.getLogger("asyncloader")

_BUILT_IN = (dict, list, tuple, deque, set, frozenset)


class Unsteady(Exception):
    """An object is not the same when it is looked at again."""


@functools.lru_cache(1024)
def _seed(kind: str) -> int:
    return xxhash.xxh3_64_intdigest(kind.encode())


def _hash(kind: str, contents: Any) -> int:
    """Return the digest of what is of this kind: bytes, or an array without gaps."""
    return xxhash.xxh3_64_intdigest(contents, _seed(kind))


def _joined(kind: str, digests: list[int]) -> int:
    return _hash(kind, struct.pack(f"<{len(digests)}Q", *digests))


def _int(number: int) -> int:
    return _hash("int", number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True))


def _named(thing: Any) -> int:
    return _hash(f"named {thing.__qualname__}", b"")


_LEAVES: dict[type, Callable[[Any], int]] = {
    int: _int,
    bool: lambda truth: _hash("bool", b"\1" if truth else b"\0"),
    float: lambda number: _hash("float", struct.pack("<d", number)),
    complex: lambda number: _hash("complex", struct.pack("<dd", number.real, number.imag)),
    str: lambda text: _hash("str", text.encode("utf-8", "surrogatepass")),
    bytes: lambda contents: _hash("bytes", contents),
    type(None): lambda _: _hash("None", b""),
    type(...): lambda _: _hash("...", b""),
    **dict.fromkeys((type, FunctionType, BuiltinFunctionType), _named),
}


class Digester:
    """Makes the digests of batches. For one thread at a time."""

    def __init__(self) -> None:
        self._around: dict[int, int] = {}  # by id, the levels of what is being looked into: it may hold itself
        self._reach = 0  # the outermost of these levels that something inside the innermost one refers to
        self._known: dict[int, tuple[Any, int, int]] = {}  # by id: objects, their digests, and how far these reach
        self._open: list[int] = []  # ids of those in a circle
        self._steady: set[type] = set()
        self._told: set[type] = set()

    def __call__(self, batch: Any) -> int:
        """Return the digest of a batch, which is never 0. Takes as long as reading its memory once."""
        try:
            return self._of(batch) or 1
        finally:
            self._around.clear()
            self._known.clear()
            self._open.clear()

    def _of(self, thing: Any) -> int:
        kind: Any = type(thing)
        if (leaf := _LEAVES.get(kind)) is not None:
            return leaf(thing)
        around, outer = self._around, self._reach
        if (there := around.get(id(thing))) is not None:
            self._reach = min(outer, there)
            return _int(len(around) - there)
        level, num_open = len(around), len(self._open)
        around[id(thing)], self._reach = level, level + 1
        try:
            return _way(kind)(self, thing, kind.__qualname__)
        except Exception as error:
            if kind not in self._told:
                self._told.add(kind)
                log.warning(
                    "The fingerprint leaves out what is in objects of the class %s.%s, so differences in them are not "
                    "seen: %s: %s",
                    kind.__module__,
                    kind.__qualname__,
                    type(error).__name__,
                    error,
                )
            return _hash(f"left out {kind.__qualname__}", b"")
        finally:
            del around[id(thing)]
            while self._reach >= level and len(self._open) > num_open:
                del self._known[self._open.pop()]
            self._reach = min(outer, self._reach)

    # -------------------------------------------------------------------------------------------------- containers

    def _derived(self, thing: Any, name: str) -> int:
        """Return the digest of a container of a class that is derived from a built-in one: it may have attributes."""
        contents, attributes = _way_of_base(thing.__class__)(self, thing, name), thing.__getstate__()
        return contents if attributes is None else _joined(name, [contents, self._of(attributes)])

    def _sequence(self, things: Iterable[Any], name: str) -> int:
        return _joined(name, [self._of(each) for each in things])

    def _mapping(self, things: Mapping[Any, Any], name: str) -> int:
        # `items`: what iterates over its rows (tensordict) tells its keys there
        pairs = [_joined("item", [self._of(key), self._of(value)]) for key, value in things.items()]
        return _joined(name, sorted(pairs))

    def _set(self, things: Iterable[Any], name: str) -> int:
        return _joined(name, sorted(map(self._of, things)))

    def _buffer(self, thing: Any, name: str) -> int:
        memory = memoryview(thing)
        return _hash(f"{name} {memory.format} {memory.shape}", memory.tobytes())

    def _enum(self, member: enum.Enum, name: str) -> int:
        return self._sequence([member.name, member.value], name)

    # ---------------------------------------------------------------------------------------------------- objects

    def _object(self, thing: Any, name: str) -> int:
        """Return the digest of what pickle would write."""
        if (known := self._known.get(id(thing))) is None:
            found = self._steadily(thing, name)
            known = self._known[id(thing)] = thing, found, self._reach
            if self._reach < len(self._around):  # in a circle
                self._open.append(id(thing))
        _, found, reach = known
        self._reach = min(self._reach, reach)
        return found

    def _steadily(self, thing: Any, name: str) -> int:
        """Look at an object; at the first of a class twice, whether it is the same."""
        found = self._reduction(thing, name)
        if type(thing) not in self._steady:
            if self._reduction(thing, name) != found:
                raise Unsteady("it is not the same when it is looked at twice (__reduce_ex__, __getstate__)")
            self._steady.add(type(thing))
        return found

    def _reduction(self, thing: Any, name: str) -> int:
        maker, made_of, states, items, by_key = reduction_of(thing)
        found = [self._of(maker), self._of(made_of), *(0 if each is None else self._of(each) for each in states)]
        found += [self._sequence(items, "list") if items else 0, self._mapping(by_key, "dict") if by_key else 0]
        return _joined(name, found)

    # ------------------------------------------------------------------------------------------ tensors and arrays

    def _tensor(self, tensor: torch.Tensor, name: str) -> int:
        if type(tensor) is not torch.Tensor:
            if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:  # made of other tensors
                return self._object(tensor, name)
            with torch._C.DisableTorchFunctionSubclass():
                plain = tensor.as_subclass(torch.Tensor)
            return _joined(name, [self._tensor(plain, "Tensor"), self._mapping(vars(tensor), "dict")])
        if (memory := _plain_memory(tensor)) is not None:  # most tensors
            return _hash(f"Tensor {tensor.dtype} {memory.shape}", memory)
        tensor = tensor.detach()
        head = f"Tensor {tensor.dtype} {'nested' if tensor.is_nested else tuple(tensor.shape)}"
        if (parts := parts_of(tensor)) is not None:
            return self._mapping(parts, f"{head} {tensor.layout}")
        return _hash(head, b"" if tensor.is_meta or not tensor.nbytes else bits_of_tensor(tensor))

    def _array(self, thing: Any, name: str) -> int:
        values = np.asanyarray(thing)
        if not values.dtype.isnative:  # a copy may have the byte order of the machine
            values = values.astype(values.dtype.newbyteorder("="))
        head = f"{name} {values.dtype.str} {values.shape}"
        if isinstance(values, np.ma.MaskedArray):
            return self._sequence([np.ma.getmaskarray(values), values.filled()], head)
        if values.dtype.names:
            return self._mapping({each: np.asarray(values[each]) for each in values.dtype.names}, head)
        if values.dtype.hasobject:
            return self._sequence(values.flat, head)
        return _hash(head, bits_of_array(np.asarray(values)) if values.nbytes else b"")


_WAYS: list[tuple[tuple[type, ...], Callable[[Digester, Any, str], int]]] = [
    ((torch.Tensor,), Digester._tensor),
    ((np.ndarray, np.generic), Digester._array),
    ((Mapping,), Digester._mapping),
    ((list, tuple, deque), Digester._sequence),
    ((Set,), Digester._set),
    (BUFFERS, Digester._buffer),
    ((type,), lambda _, thing, name: _named(thing)),
    ((enum.Enum,), Digester._enum),
    ((PurePath,), lambda _, path, name: _hash(name, os.fsencode(path))),
    ((object,), Digester._object),
]


@functools.lru_cache(1024)
def _way_of_base(kind: type) -> Callable[[Digester, Any, str], int]:
    return next(way for types, way in _WAYS if issubclass(kind, types))


@functools.lru_cache(1024)
def _way(kind: type) -> Callable[[Digester, Any, str], int]:
    """Return what makes the digests of things of this class, which also gets the class's name."""
    is_derived = kind not in _BUILT_IN and issubclass(kind, _BUILT_IN)
    return Digester._derived if is_derived else _way_of_base(kind)


def _plain_memory(tensor: torch.Tensor) -> Any:
    """Return a tensor as an array over its memory, if it has no gaps and numpy takes it; otherwise None."""
    try:
        array = tensor.numpy()
    except (RuntimeError, TypeError):
        return None
    return array if array.flags.c_contiguous and array.size and tensor.data_ptr() else None  # not invented by numpy()
