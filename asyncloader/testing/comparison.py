"""Whether two samples are the same, to the last bit, and if not, where they differ.

Containers and dataclasses are compared part by part; tensors, arrays and numbers by their bits, so NaN is NaN, and -0.0
is not 0.0; other objects by ``==`` if their class says so, and otherwise by what pickle would write, part by part.
"""

from __future__ import annotations

import dataclasses
import re
import struct
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from asyncloader.transport.parts import BUFFERS, bits_of_array, bits_of_tensor, parts_of, reduction_of
from asyncloader.transport.tensors import Array

_PLAIN = (int, bool, str, bytes, type(None), type(...))
_PICKLED = " (as pickled)"
_ADDRESS = re.compile(" at 0x[0-9a-f]+")
_LONG = 400
"""Characters of a thing that are told."""


class CannotCompareError(Exception):
    """Nothing says whether two parts of samples are the same."""


class Difference(NamedTuple):
    """Where in a sample, and how, it differs from another: "[0].image" "has 3 items, and should have 4"."""

    path: str
    how: str


_Found: TypeAlias = "Difference | None"


def difference(one: Any, other: Any) -> Difference | None:
    """Where two samples or batches differ first; None if they are the same.

    Raises:
        CannotCompareError: a part that nobody can compare, and where it is.
        RecursionError: they are nested too deeply.
    """
    return _Comparison().difference(one, other, "")


def told_apart(one: Any, other: Any) -> str:
    """Say what is and what should be; of what is long, the characters from where it begins to differ."""
    words = [_words(one), _words(other)]
    begin = 0
    if max(map(len, words)) > _LONG and words[0] != words[1]:
        alike = next((n for n, (a, b) in enumerate(zip(*words, strict=False)) if a != b), min(map(len, words)))
        begin = max(0, alike - _LONG // 4)
    ours, theirs = (_excerpt(text, begin) for text in words)
    return f"is {ours}, and should be {theirs}"


class _Comparison:
    """Compares two samples, or parts of them. Each method returns the first difference as seen from a path."""

    def __init__(self) -> None:
        # Pairs that are compared, or have been and did not differ: samples may hold themselves.
        self._met: dict[tuple[int, int], tuple[Any, Any]] = {}

    def difference(self, one: Any, other: Any, path: str) -> _Found:
        if one is other:
            return None
        if type(one) is not type(other):
            return Difference(path, f"is of type {_name(type(one))}, and should be of type {_name(type(other))}")
        if type(one) in _PLAIN or isinstance(one, type):
            return None if one == other else _unlike(path, one, other)
        if type(one) is float and struct.pack("<d", one) == struct.pack("<d", other):
            return None
        pair, count = (id(one), id(other)), len(self._met)
        if pair in self._met:
            return None
        self._met[pair] = (one, other)
        found = self._inside(one, other, path)
        while found is not None and len(self._met) > count:
            self._met.popitem()
        return found

    def _inside(self, one: Any, other: Any, path: str) -> _Found:
        if isinstance(one, torch.Tensor):
            return self._tensors(one, other, path)
        if isinstance(one, np.ndarray):
            return self._arrays(one, other, path)
        if isinstance(one, (np.generic, float, complex)):
            return self._arrays(np.asarray(one), np.asarray(other), path)
        if isinstance(one, BUFFERS):
            ours, theirs = memoryview(one), memoryview(other)
            is_same = (ours.format, ours.shape, ours.tobytes()) == (theirs.format, theirs.shape, theirs.tobytes())
            return None if is_same else _unlike(path, one, other)
        if isinstance(one, Mapping):
            return self._mappings(one, other, path, _item)
        if isinstance(one, (list, tuple, deque)):
            return self._sequences(one, other, path)
        if isinstance(one, Set):
            return self._sets(one, other, path)
        if dataclasses.is_dataclass(one):
            return self._mappings(_fields_of(one), _fields_of(other), path, _attribute)
        return self._objects(one, other, path)

    def _first(self, parts: Iterable[tuple[Any, Any, str]]) -> _Found:
        return next((found for part in parts if (found := self.difference(*part)) is not None), None)

    # -------------------------------------------------------------------------------------------------- containers
    def _mappings(self, one: Any, other: Any, path: str, place: Callable[[str, Any], str]) -> _Found:
        keys, others = list(one), list(other)
        if self.difference(keys, others, path) is not None:  # others, or the same in another order
            known = {key: key for key in others}
            if lacking := [key for key in others if key not in one]:
                return Difference(path, f"lacks {_excerpt(_words(lacking))}")
            if added := [key for key in keys if key not in known]:
                return Difference(path, f"has {_excerpt(_words(added))}, and should not")
            others = [known[key] for key in keys]
            if found := self.difference(keys, others, f"{path} (keys)"):  # 1 and True; 0.0 and -0.0
                return found
        return self._first((one[key], other[its], place(path, key)) for key, its in zip(keys, others, strict=True))

    def _sequences(self, one: Any, other: Any, path: str) -> _Found:
        if len(one) != len(other):
            return Difference(path, f"has {len(one)} items, and should have {len(other)}")
        names = getattr(one, "_fields", None) if isinstance(one, tuple) else None
        places = [_attribute(path, each) for each in names] if names else (_item(path, n) for n in range(len(one)))
        return self._first(zip(one, other, places, strict=True))

    def _sets(self, one: Any, other: Any, path: str) -> _Found:
        if len(one) != len(other):
            return Difference(path, f"has {len(one)} elements, and should have {len(other)}")
        left = list(other)
        for element in one:
            at = next((n for n, each in enumerate(left) if self.difference(element, each, path) is None), None)
            if at is None:
                return Difference(path, f"has {_excerpt(_words(element))}, and should not")
            del left[at]
        return None

    # ------------------------------------------------------------------------------------------ tensors and arrays
    def _tensors(self, one: torch.Tensor, other: torch.Tensor, path: str) -> _Found:
        if found := _unlike_looks(path, one, other, "dtype", "layout", "device", "is_nested"):
            return found
        if not one.is_nested:
            if found := _unlike_looks(path, one, other, "shape"):
                return found
            if type(one).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:  # made of other tensors
                return self._objects(one, other, path)
            if type(one) is not torch.Tensor:
                if found := self._mappings(vars(one), vars(other), path, _attribute):
                    return found
                with torch._C.DisableTorchFunctionSubclass():
                    one, other = one.as_subclass(torch.Tensor), other.as_subclass(torch.Tensor)
        one, other = one.detach(), other.detach()
        parts = parts_of(one)
        if parts is not None:
            return self._mappings(parts, parts_of(other), path, _attribute)
        return None if one.is_meta else _unlike_elements(path, one, other, bits_of_tensor)

    def _arrays(self, one: Any, other: Any, path: str) -> _Found:
        if found := _unlike_looks(path, one, other, "dtype", "shape"):
            return found
        if isinstance(one, np.ma.MaskedArray):
            ours, theirs = ({"mask": np.ma.getmaskarray(each), "filled()": each.filled()} for each in (one, other))
            return self._mappings(ours, theirs, path, _attribute)
        if one.dtype.names:
            return self._first((one[name], other[name], _item(path, name)) for name in one.dtype.names)
        if not one.dtype.hasobject:
            return _unlike_elements(path, np.asarray(one), np.asarray(other), bits_of_array)
        places = (f"{path}[{', '.join(map(str, index))}]" for index in np.ndindex(one.shape))
        return self._first(zip(one.flat, other.flat, places, strict=True))

    # ---------------------------------------------------------------------------------------- whatever else there is
    def _objects(self, one: Any, other: Any, path: str) -> _Found:
        says = _says_equal(one, other)
        if says:
            return None
        try:
            return self._reductions(one, other, path)
        except Exception as error:
            if says is False:
                return _unlike(path, one, other)
            if isinstance(error, (CannotCompareError, RecursionError)):
                raise
            why = f"its class {_name(type(one))} does not say what is equal (__eq__), and it cannot be pickled: {error}"
            raise CannotCompareError(f"{path or 'it'} is {_excerpt(_words(one))}; {why}") from error

    def _reductions(self, one: Any, other: Any, path: str) -> _Found:
        """Compare what pickle would write of two objects of one class."""
        ours, theirs = reduction_of(one), reduction_of(other)
        pickled = path if _PICKLED in path else path + _PICKLED
        if found := self.difference(ours[:2], theirs[:2], pickled):
            is_told = _has_own(one, "__repr__") and _ADDRESS.sub("", _words(one)) != _ADDRESS.sub("", _words(other))
            return _unlike(path, one, other) if is_told else found
        for mine, its in zip(ours.states, theirs.states, strict=True):
            if isinstance(mine, dict | None) and isinstance(its, dict | None):
                found = self._mappings(mine or {}, its or {}, path, _attribute)
            else:
                found = self.difference(mine, its, pickled)
            if found:
                return found
        found = self.difference(ours.items, theirs.items, path)
        return found or self._mappings(ours.by_key, theirs.by_key, path, _item)


def _fields_of(thing: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that are for comparison."""
    names = [field.name for field in dataclasses.fields(thing) if field.compare]
    return {name: getattr(thing, name) for name in names if hasattr(thing, name)}


def _says_equal(one: Any, other: Any) -> bool | None:
    """Return the answer of the class's ``__eq__`` about two objects; None if it has none."""
    if not _has_own(one, "__eq__"):
        return None
    try:
        answer = one == other
    except Exception:
        return None
    return bool(answer) if isinstance(answer, (bool, np.bool_)) else None


def _has_own(thing: Any, method: str) -> bool:
    return getattr(type(thing), method) is not getattr(object, method)


# ------------------------------------------------------------------------------------------------------------ elements
def _unlike_elements(path: str, one: Any, other: Any, bits_of: Callable[[Any], Array]) -> _Found:
    """Compare tensors or arrays of one dtype and shape."""
    if not one.nbytes:
        return None
    ours, theirs = bits_of(one), bits_of(other)
    if np.array_equal(ours, theirs):
        return None
    unlike = (ours != theirs).any(1)
    first = int(unlike.argmax())
    words = [_value(each, first) for each in (one, other)]
    if words[0] == words[1]:
        words = [f"0x{bits[first].tobytes()[::-1].hex()}" for bits in (ours, theirs)]
    told = f"is {words[0]}, and should be {words[1]}"
    if not one.shape:
        return Difference(path, told)
    where = [int(number) for number in np.unravel_index(first, tuple(one.shape))]
    return Difference(path, f"differs in {unlike.sum()} of {len(unlike)} elements; the first, {where}, {told}")


def _unlike_looks(path: str, one: Any, other: Any, *names: str) -> _Found:
    for name in names:
        ours, theirs = getattr(one, name), getattr(other, name)
        if ours != theirs:
            return Difference(path, f"has the {name} {ours}, and should have {theirs}")
    return None


# -------------------------------------------------------------------------------------------------------------- words
def _item(path: str, key: Any) -> str:
    return f"{path}[{key!r}]"


def _attribute(path: str, name: Any) -> str:
    return f"{path}.{name}"


def _unlike(path: str, one: Any, other: Any) -> Difference:
    return Difference(path, told_apart(one, other))


def _value(thing: Any, number: int) -> str:
    """Show an element of a tensor or an array; nothing if torch has no value for it."""
    try:
        return repr(thing.reshape(-1)[number].item())
    except (NotImplementedError, RuntimeError):
        return ""


def _name(cls: type) -> str:
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def _words(thing: Any) -> str:
    try:
        return repr(thing)
    except Exception:  # torch's of rare dtypes; the user's
        return object.__repr__(thing)


def _excerpt(text: str, begin: int = 0) -> str:
    end = begin + _LONG
    return f"{'...' if begin else ''}{text[begin:end]}{'...' if len(text) > end else ''}"
