"""The parts of batches: tensors in containers, and objects that move themselves.

batch                                     what becomes of it
tensor                                    copied
object with a method ``to`` (custom)      ``to(device)``, and ``non_blocking=True`` if it takes that
mapping, tuple, list, dataclass           another one of the same type, with what is in it
strings, numbers, None, and other facts   as they are
anything else                             a TypeError
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import enum
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence, Set
from datetime import date, time, timedelta
from functools import lru_cache
from numbers import Number
from typing import Any, cast

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_FACTS = (
    str, bytes, bytearray, Number, type(None), type, enum.Enum, np.generic, os.PathLike, date, time, timedelta, slice,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
"""What has nothing to be moved."""

Copy = Callable[[torch.Tensor], torch.Tensor]


def copied_to(data: Any, device: torch.device, copy_tensor: Copy, *, non_blocking: bool) -> Any:
    """Return data with what can be moved on a device.

    Args:
        data: A batch.
        device: Where it is to be; for objects with a method ``to``.
        copy_tensor: Copies a tensor there.
        non_blocking: Such objects may begin the copy and return.

    Raises:
        TypeError: if something in there is neither, nor a plain fact; it names the type, and where that is.
    """

    def moved(data: Any, where: str) -> Any:
        if isinstance(data, torch.Tensor):
            return copy_tensor(data)
        if isinstance(data, _FACTS):
            return data
        if has_to(data):
            return _moved_by_itself(data, device, where, non_blocking=non_blocking)
        if isinstance(data, Mapping):
            return _mapping(data, {key: moved(value, f"{where}[{key!r}]") for key, value in data.items()})
        if isinstance(data, (tuple, Sequence)):
            return _sequence(data, [moved(each, f"{where}[{i}]") for i, each in enumerate(data)])
        if dataclasses.is_dataclass(data):
            names = [field.name for field in dataclasses.fields(data)]
            return _dataclass(data, {name: moved(getattr(data, name), f"{where}.{name}") for name in names})
        if isinstance(data, np.ndarray) and data.dtype.kind in "OSUMmV":  # torch has no such tensors
            return data
        if isinstance(data, Set) and all(isinstance(each, _FACTS) for each in data):
            return data
        raise TypeError(_CANNOT.format(kind=_name(type(data)), where=where, device=device))

    return moved(data, "batch")


_CANNOT = (
    "{where} is a {kind}, which cannot be moved to {device}: have collate_fn make a tensor of it, or give the type a "
    "method to(device)"
)


def has_to(data: Any) -> bool:
    """Whether an object moves itself."""
    return callable(getattr(type(data), "to", None))


def _moved_by_itself(data: Any, device: torch.device, where: str, *, non_blocking: bool) -> Any:
    how = {"non_blocking": True} if non_blocking and _takes_non_blocking(cast(Any, type(data))) else {}
    moved = data.to(device, **how)
    # The consumer's stream has to be noted with each tensor. Tensors that cannot be found could be overwritten.
    if next(tensors_in(moved), None) is None and next(tensors_in(data), None) is None:
        kind = _name(type(moved))
        raise TypeError(
            f"{where} is a {kind}, whose tensors are neither in its attributes nor in a container: give it a method "
            f"record_stream(stream) that calls theirs"
        )
    return moved


@lru_cache(maxsize=256)
def _takes_non_blocking(kind: Any) -> bool:
    try:
        parameters = inspect.signature(kind.to).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(each.name == "non_blocking" or each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)


def _mapping(data: Any, parts: dict[Any, Any]) -> Any:
    if all(parts[key] is data[key] for key in parts):
        return data
    with contextlib.suppress(TypeError):  # it takes no mapping, or cannot be copied: then a plain dict
        if isinstance(data, MutableMapping):
            other = copy.copy(data)
            other.update(parts)
            return other
        return type(data)(parts)
    return parts


def _sequence(data: Any, parts: list[Any]) -> Any:
    if all(part is each for part, each in zip(parts, data, strict=True)):
        return data
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*parts)
    with contextlib.suppress(TypeError):  # it takes no list, or cannot be copied: then a plain list
        if isinstance(data, MutableSequence):
            other = copy.copy(data)
            for i, part in enumerate(parts):
                other[i] = part
            return other
        return type(data)(parts)
    return parts


def _dataclass(data: Any, parts: dict[str, Any]) -> Any:
    changed = {name: part for name, part in parts.items() if part is not getattr(data, name)}
    if not changed:
        return data
    other = copy.copy(data)
    for name, part in changed.items():
        object.__setattr__(other, name, part)  # also of a frozen one
    return other


def _name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


# ---------------------------------------------------------------------------------------------- what there is to find


def tensors_in(data: Any, kind: str | None = None, *, opens: bool = False) -> Iterator[Any]:
    """Yield the tensors in data, also in attributes of objects, and objects that have ``record_stream`` themselves.

    Args:
        data: A batch, or whatever a transform has made of it.
        kind: Yield only tensors on this kind of device.
        opens: Yield the tensors in objects that have ``record_stream``, in place of these objects.
    """
    seen: set[int] = set()
    left = [data]
    while left:
        data = left.pop()
        if isinstance(data, _FACTS) or id(data) in seen:
            continue
        seen.add(id(data))
        if isinstance(data, torch.Tensor):
            yield from (part for part in _dense_parts(data) if kind is None or part.device.type == kind)
        elif not opens and callable(getattr(type(data), "record_stream", None)):
            yield data
        elif isinstance(data, Mapping):
            left += data.values()
            left += _attributes(data)
        elif isinstance(data, (Sequence, Set)):
            left += data
            left += _attributes(data)
        elif not (inspect.isroutine(data) or inspect.ismodule(data)):
            left += _attributes(data)


def _attributes(data: Any) -> Iterator[Any]:
    yield from getattr(data, "__dict__", {}).values()
    for kind in type(data).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            with contextlib.suppress(AttributeError):
                yield getattr(data, name)


def _dense_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that have the memory of one: of a sparse or nested one there are several."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _dense_parts(getattr(tensor, name))
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    elif tensor.is_nested:
        yield tensor.values()
    else:
        yield tensor
