"""The digest of a batch: 64 bits that are the same for the same data, and for other data, almost certainly, others.

    batch ── walked ──> leaves: XXH3 of dtype, shape and the bytes in C order ──┐
                        containers: XXH3 of their kind and of these <───────────┘  (a Merkle tree)

Types count by their names, keys of mappings and elements of sets in no order, tensors and arrays by their bits; not
their strides, their memory or their device. Other objects count by what pickle would write of them, part by part: a
pickle itself differs where two equal strings are one object in one process and two in another. What cannot be looked
at is left out, but for its type, and named in the log.

XXH3 of Yann Collet's xxHash (https://xxhash.com), whose values have been fixed since its version 0.8.0: 38.5 MB take
2.6 ms, as long as reading them takes (a sum of them: 2.6), while zlib's crc32 takes 16, zlib-ng's 3.5, BLAKE3 7.1. It
is no defence against who wants two batches to be alike.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import logging
import os
import struct
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Set
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np
import torch
import xxhash

from asyncloader.transport.parts import BUFFERS, bits_of_array, bits_of_tensor, fields_of, parts_of, reduction_of

log = logging.getLogger("asyncloader")

_NAMED = (type, FunctionType, BuiltinFunctionType)


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


_LEAVES: dict[type, Callable[[Any], int]] = {
    int: _int,
    bool: lambda truth: _hash("bool", b"\1" if truth else b"\0"),
    float: lambda number: _hash("float", struct.pack("<d", number)),
    complex: lambda number: _hash("complex", struct.pack("<dd", number.real, number.imag)),
    str: lambda text: _hash("str", text.encode("utf-8", "surrogatepass")),
    bytes: lambda contents: _hash("bytes", contents),
    type(None): lambda _: _hash("None", b""),
    type(...): lambda _: _hash("...", b""),
}


class Digester:
    """Makes the digests of batches. For one thread at a time."""

    def __init__(self) -> None:
        self._around: list[int] = []  # ids of the containers that are being looked into: they may hold themselves
        self._steady: set[type] = set()
        self._told: set[type] = set()

    def __call__(self, batch: Any) -> int:
        """Return the digest of a batch, which is never 0. Takes as long as reading its memory once."""
        self._around.clear()
        return self._of(batch) or 1

    def _of(self, thing: Any) -> int:
        kind = type(thing)
        if (leaf := _LEAVES.get(kind)) is not None:
            return leaf(thing)
        if id(thing) in self._around:
            return _int(len(self._around) - self._around.index(id(thing)))
        self._around.append(id(thing))
        try:
            return self._inside(thing, kind.__qualname__)
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
            self._around.pop()

    def _inside(self, thing: Any, name: str) -> int:
        if isinstance(thing, torch.Tensor):
            return self._tensor(thing, name)
        if isinstance(thing, (np.ndarray, np.generic)):
            return self._array(np.asanyarray(thing), name)
        if isinstance(thing, Mapping):
            return self._mapping(name, thing)
        if isinstance(thing, (list, tuple, deque)):
            return self._sequence(name, thing)
        if isinstance(thing, BUFFERS):
            memory = memoryview(thing)
            return _hash(f"{name} {memory.format} {memory.shape}", memory.tobytes())
        if isinstance(thing, Set):
            return self._unordered(name, map(self._of, thing))
        if isinstance(thing, _NAMED):
            return _hash(f"named {thing.__qualname__}", b"")
        if isinstance(thing, enum.Enum):
            return self._sequence(name, [thing.name, thing.value])
        if isinstance(thing, os.PathLike):
            return _hash(name, os.fsencode(thing))
        if dataclasses.is_dataclass(thing):
            return self._mapping(name, fields_of(thing))
        return self._object(thing, name)

    # -------------------------------------------------------------------------------------------------- containers

    def _sequence(self, name: str, things: Iterable[Any]) -> int:
        return _joined(name, [self._of(each) for each in things])

    def _mapping(self, name: str, things: Mapping[Any, Any]) -> int:
        return self._unordered(name, (_joined("item", [self._of(key), self._of(things[key])]) for key in things))

    def _unordered(self, name: str, digests: Iterable[int]) -> int:
        return _joined(name, sorted(digests))

    def _object(self, thing: Any, name: str) -> int:
        """Return the digest of what pickle would write; of the first of a class, look whether it is the same twice."""
        found = self._reduction(thing, name)
        if type(thing) not in self._steady:
            if self._reduction(thing, name) != found:
                raise Unsteady("it is not the same when it is looked at twice (__reduce_ex__, __getstate__)")
            self._steady.add(type(thing))
        return found

    def _reduction(self, thing: Any, name: str) -> int:
        maker, made_of, states, items, by_key = reduction_of(thing)
        return _joined(name, [self._of(each) for each in (maker, made_of, *states, items, by_key)])

    # ------------------------------------------------------------------------------------------ tensors and arrays

    def _tensor(self, tensor: torch.Tensor, name: str) -> int:
        if type(tensor) is not torch.Tensor:
            if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:  # made of other tensors
                return self._object(tensor, name)
            with torch._C.DisableTorchFunctionSubclass():
                plain = tensor.as_subclass(torch.Tensor)
            return _joined(name, [self._tensor(plain, "Tensor"), self._mapping("dict", vars(tensor))])
        if (memory := _plain_memory(tensor)) is not None:  # most tensors
            return _hash(f"Tensor {tensor.dtype} {memory.shape}", memory)
        tensor = tensor.detach()
        head = f"Tensor {tensor.dtype} {'nested' if tensor.is_nested else tuple(tensor.shape)}"
        if (parts := parts_of(tensor)) is not None:
            return self._mapping(f"{head} {tensor.layout}", parts)
        return _hash(head, b"" if tensor.is_meta or not tensor.nbytes else bits_of_tensor(tensor))

    def _array(self, values: Any, name: str) -> int:
        head = f"{name} {values.dtype.str} {values.shape}"
        if isinstance(values, np.ma.MaskedArray):
            return self._sequence(head, [np.ma.getmaskarray(values), values.filled()])
        if values.dtype.names:
            return self._mapping(head, {each: np.asarray(values[each]) for each in values.dtype.names})
        if values.dtype.hasobject:
            return self._sequence(head, values.flat)
        return _hash(head, bits_of_array(np.asarray(values)) if values.nbytes else b"")


def _plain_memory(tensor: torch.Tensor) -> Any:
    """Return a tensor as an array over its memory, if it has no gaps and numpy takes it; otherwise None."""
    try:
        array = tensor.numpy()
    except (RuntimeError, TypeError):
        return None
    return array if array.flags.c_contiguous and array.size and tensor.data_ptr() else None  # not invented by numpy()
