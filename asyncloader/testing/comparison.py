"""Samples and batches, part by part: whether two are the same, where they differ, and a fingerprint of many."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Set
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from asyncloader.datasets.records import Pickler

_LONG = 400
"""Characters of a part that are shown."""


def parts_of(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the parts of a sample, each with its path; for a container its class and length, then what is in it."""
    inside = _inside(value)
    if inside is None:
        yield path, value
    else:
        yield path, (type(value).__qualname__, len(inside))
        for name, part in inside:
            yield from parts_of(part, path + name)


def _inside(value: Any) -> list[tuple[str, Any]] | None:
    """Return the parts of a container in an order that depends on them alone; None for what is no container."""
    if isinstance(value, Mapping):
        return sorted(((f"[{key!r}]", part) for key, part in value.items()), key=itemgetter(0))
    if isinstance(value, (list, tuple, deque)):
        return [(f"[{number}]", part) for number, part in enumerate(value)]
    if isinstance(value, Set):
        return [(f"{{{part!r}}}", part) for part in sorted(value, key=repr)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f".{each.name}", getattr(value, each.name)) for each in dataclasses.fields(value) if each.compare]
    return None


def difference(one: Any, other: Any) -> str | None:
    """Say where two samples or batches differ first, and how; None if they are the same.

    Raises:
        Exception: as pickling raises it, for a part whose class does not say what is equal and cannot be pickled.
        RecursionError: A container holds itself.
    """
    for (path, ours), (other_path, theirs) in zip(parts_of(one), parts_of(other), strict=False):
        if path != other_path:
            return f"it has {path}, and should have {other_path}"
        if (how := _unlike(ours, theirs)) is not None:
            return f"{path or 'it'}: {how}"
    return None


def _unlike(one: Any, other: Any) -> str | None:
    """Say how two parts differ: arrays by their values, others where both their class and pickle say so."""
    if type(one) is type(other):
        if isinstance(one, (torch.Tensor, np.ndarray)):
            with contextlib.suppress(TypeError, RuntimeError):  # what torch or numpy does not compare, as float8
                return _unlike_arrays(one, other)
        elif one is other or _says_equal(one, other):
            return None
        if bits_of(one) == bits_of(other):
            return None
    ours, theirs = (f"{_words(each)} ({type(each).__qualname__})" for each in (one, other))
    return f"is {ours}, and should be {theirs}"


def _unlike_arrays(one: Any, other: Any) -> str | None:
    """Say how two tensors, or two arrays, differ. A NaN is equal to a NaN; strides and `requires_grad` do not count.

    `torch.testing.assert_close` would import sympy to know whether a tensor is distributed: 2 s, and 75 MB.
    """
    for name in ("dtype", "shape", "device", "layout"):
        ours, theirs = (getattr(each, name, None) for each in (one, other))
        if ours != theirs:
            return f"its {name} is {ours}, and should be {theirs}"
    if isinstance(one, torch.Tensor):
        one, other = one.detach().to_dense(), other.detach().to_dense()
    elif one.dtype.kind in "OV":
        raise TypeError("objects, and fields of which one may be a NaN and another not, are compared as pickles")
    places = torch.as_tensor((one != other) & ((one == one) | (other == other))).nonzero().tolist()
    if not places:
        return None
    first = tuple(places[0])
    found = f"{len(places)} of {math.prod(one.shape)} values differ, the first at {[*first]}"
    return f"{found}: it is {one[first]}, and should be {other[first]}"


def _says_equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other) or (isinstance(one, (float, complex, np.number)) and one != one and other != other)
    except Exception:  # of a class whose `==` gives no truth value
        return False


def _words(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONG else f"{text[:_LONG]}..."


def bits_of(value: Any) -> bytes:
    """Return the pickle of a part, in which two equal strings are the same whether or not they are one object."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
    elif isinstance(value, np.ndarray):
        value = value.copy(order="C")
    file = io.BytesIO()
    pickler = Pickler(file, protocol=5)
    pickler.fast = True  # without a memo
    pickler.dump(value)
    return file.getvalue()


def fingerprint(batches: Iterable[Any]) -> str:
    """Return 16 hexadecimal digits that are the same for the same batches, and almost certainly others for others.

    Types and structure count, keys of mappings and elements of sets in no order, tensors and arrays by dtype, shape and
    bits, whatever memory and device they are on; other objects by what pickle writes of them. Batches count in order.

    Args:
        batches: The batches, all of which are taken: a loader, an iterator, or ``[batch]`` for one of them.

    Raises:
        Exception: as pickling a part raises it.

    Example:
        >>> fingerprint([{"a": torch.arange(3)}]) == fingerprint([{"a": torch.arange(6)[:3]}])
        True
    """
    found = hashlib.blake2b(digest_size=8)
    for batch in batches:
        for path, part in parts_of(batch):
            found.update(f"{path}\0".encode())
            found.update(bits_of(part))
    return found.hexdigest()
