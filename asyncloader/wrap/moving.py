"""The parts of batches: tensors in containers, and objects that move themselves.

batch                                     what becomes of it
tensor                                    copied
object with a method ``to`` (custom)      ``to(device)``, and ``non_blocking=True`` if it takes that
mapping, tuple, list, dataclass           another one of the same type, with what is in it
anything else without tensors in it       as it is: strings, numbers, None, arrays of numpy
anything else                             a TypeError
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_PLAIN = (str, bytes, bytearray, int, float, type(None))
"""What is not looked into."""

_PARTS = ("_indices", "_values", "crow_indices", "ccol_indices", "col_indices", "row_indices", "values")
"""Methods that return the parts of tensors of other layouts than torch.strided; each layout has some of them."""


def move(batch: Any, device: torch.device, copy_tensor: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Any:
    """Return a batch with whatever can be moved on a device.

    Args:
        batch: Tensors in any containers, and objects that have a method ``to``.
        device: Where it is to be.
        copy_tensor: Begins to copy a tensor there. Objects that move themselves may begin their copies and return, too.
            By default all copies are there when this returns.

    Raises:
        TypeError: if a tensor in there is in something that cannot be moved; it names the type.
    """

    def moved(data: Any) -> Any:
        if isinstance(data, torch.Tensor):
            return data.to(device) if copy_tensor is None else copy_tensor(data)
        if isinstance(data, _PLAIN):
            return data
        if callable(getattr(type(data), "to", None)):
            return _moved_by_itself(data, device, non_blocking=copy_tensor is not None)
        if (parts := _parts_of(data)) is not None:
            changed = {key: there for key, part in parts if (there := moved(part)) is not part}
            return _with(data, changed) if changed else data
        if next(tensors_in(data), None) is not None:
            raise TypeError(
                f"a {_name(data)} of the batch has tensors, and cannot be moved to {device}: have collate_fn put them "
                "into a tuple or a dict, or give the type a method to(device)"
            )
        return data

    return moved(batch)


def _moved_by_itself(data: Any, device: torch.device, *, non_blocking: bool) -> Any:
    try:
        moved = data.to(device, non_blocking=non_blocking)
    except TypeError:  # it takes no such argument
        moved = data.to(device)
    # The consumer's stream has to be noted with each tensor. Tensors that cannot be found could be overwritten.
    if not any(True for each in (moved, data) for _ in tensors_in(each)):
        raise TypeError(
            f"a {_name(moved)} of the batch has its tensors neither in its attributes nor in a container: give it a "
            "method record_stream(stream) that calls theirs"
        )
    return moved


def _parts_of(data: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return the parts of a container with their keys, indices or names; None if it is no container."""
    if isinstance(data, Mapping):
        return data.items()
    if isinstance(data, Sequence):
        return enumerate(data)
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        return [(field.name, getattr(data, field.name)) for field in dataclasses.fields(data)]
    return None


def _with(data: Any, changed: dict[Any, Any]) -> Any:
    """Return a container like this one, with other parts."""
    if isinstance(data, tuple):
        parts = [changed.get(index, part) for index, part in enumerate(data)]
        return type(data)(*parts) if hasattr(data, "_fields") else type(data)(parts)
    other = copy.copy(data)
    for key, part in changed.items():
        if isinstance(data, (Mapping, Sequence)):
            other[key] = part
        else:
            object.__setattr__(other, key, part)  # also of a frozen dataclass
    return other


def _name(data: Any) -> str:
    return f"{type(data).__module__}.{type(data).__qualname__}"


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
        if isinstance(data, _PLAIN) or id(data) in seen:
            continue
        seen.add(id(data))
        if isinstance(data, torch.Tensor):
            yield from (part for part in _dense_parts(data) if kind is None or part.device.type == kind)
        elif not opens and callable(getattr(type(data), "record_stream", None)):
            yield data
        elif not (inspect.isroutine(data) or inspect.ismodule(data) or inspect.isclass(data)):
            left += data.values() if isinstance(data, Mapping) else data if isinstance(data, (Sequence, Set)) else ()
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
    elif tensor.layout is torch.strided and not tensor.is_nested:
        yield tensor
    else:
        for name in _PARTS:
            with contextlib.suppress(RuntimeError):
                yield getattr(tensor, name)()
