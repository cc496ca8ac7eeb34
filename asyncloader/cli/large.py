"""Large lists and dicts that a dataset holds: what each worker's copy of them will take, and what to write instead."""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from asyncloader.datasets.records import pack
from asyncloader.datasets.shared_dict import canonical

_LEAST_BYTES = 10 << 20
_FEW = 100  # containers with fewer items are looked into
_SAMPLED = 500
_DEEPEST = 8
_PAGE = 4096
_OPAQUE = (types.ModuleType, types.FunctionType, type, str, bytes, int, float, np.ndarray, torch.Tensor)


class Large(NamedTuple):
    """A list, tuple, set or dict that is large.

    Attributes:
        owner: Name of the class of the object that holds it.
        name: Name of the attribute.
        kind: "list", "dict" and so on.
        length: How many items it has.
        object_bytes: Bytes that a forked worker copies as it reads the items.
        all_bytes: Bytes that a spawned or forkserver worker holds.
        shared_bytes: Bytes of a SharedList or SharedDict in its place, for all workers together; None if it cannot be
            one.
    """

    owner: str
    name: str
    kind: str
    length: int
    object_bytes: int
    all_bytes: int
    shared_bytes: int | None

    def cost(self, num_workers: int, start_method: str) -> int:
        """Return the bytes that workers will take, beside the one copy that is there."""
        return num_workers * (self.object_bytes if start_method == "fork" else self.all_bytes)

    def advice(self) -> str:
        """Say what to write instead."""
        if self.kind == "set":
            return f"keep it as the keys of a SharedDict, or as a sorted array (numpy.isin), in {self.owner}"
        if self.shared_bytes is None:
            return f"keep it in arrays, or in a file that is mapped, in {self.owner}"
        kind = "SharedDict" if self.kind == "dict" else "SharedList"
        return (
            f"from asyncloader import {kind}; self.{self.name} = {kind}(self.{self.name}) in {self.owner}: "
            f"{_mb(self.shared_bytes)}, once for all workers"
        )


def find_large(dataset: Any) -> list[Large]:
    """Look through a dataset, and what it holds, for large containers; the largest first."""
    found = [_measure(*one) for one in _containers(dataset)]
    return sorted((one for one in found if one.all_bytes >= _LEAST_BYTES), key=lambda one: -one.all_bytes)


def _containers(dataset: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield owner, name and container for each container with many items."""
    seen: set[int] = set()
    rest: list[tuple[str, str, Any, int]] = [("the script", "dataset", dataset, 0)]
    while rest:
        owner, name, thing, depth = rest.pop()
        if id(thing) in seen or depth > _DEEPEST or isinstance(thing, _OPAQUE):
            continue
        seen.add(id(thing))
        if type(thing) in (list, tuple, dict, set, frozenset):
            if len(thing) > _FEW:
                yield owner, name, thing
            items = list(itertools.islice(thing.values() if isinstance(thing, dict) else thing, _FEW))
            if len(thing) <= _FEW:
                rest += [(owner, name, item, depth + 1) for item in items]
        else:
            kind = type(thing).__name__
            rest += [(kind, key, value, depth + 1) for key, value in _attributes(thing).items()]


def _attributes(thing: Any) -> dict[str, Any]:
    found = dict(getattr(thing, "__dict__", {}))
    for kind in type(thing).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            try:
                found[name] = object.__getattribute__(thing, name)
            except AttributeError:
                continue
    return found


def _measure(owner: str, name: str, container: Any) -> Large:
    kind = "set" if isinstance(container, (set, frozenset)) else type(container).__name__
    items: Sequence[Any] = list(container.items()) if kind == "dict" else list(container)
    sample = items[:: max(1, len(items) // _SAMPLED)]
    seen: set[int] = set()
    objects = everything = 0
    for item in sample:
        for one in item if kind == "dict" else (item,):
            touched, whole = _weigh(one, seen)
            objects, everything = objects + touched, everything + whole
    times = len(items) / len(sample)
    own = sys.getsizeof(container)
    shared = _shared_bytes(sample)
    if kind == "set" or (kind == "dict" and any(canonical(key) is None for key, _ in sample)):
        shared = None
    shared_bytes = None if shared is None else int(shared * times)
    # The container's own array holds references, and is not written to by reading.
    return Large(owner, name, kind, len(items), int(objects * times), own + int(everything * times), shared_bytes)


def _weigh(thing: Any, seen: set[int]) -> tuple[int, int]:
    """Return the bytes of the pages that counting references writes to, and all bytes."""
    touched = whole = 0
    rest = [thing]
    while rest:
        one = rest.pop()
        if id(one) in seen or one is None or isinstance(one, (bool, type, types.ModuleType, types.FunctionType)):
            continue
        seen.add(id(one))
        size = sys.getsizeof(one)
        if isinstance(one, torch.Tensor):
            size += one.nbytes
        touched += min(size, _PAGE) if isinstance(one, (str, bytes, np.ndarray, torch.Tensor)) else size
        whole += size
        if isinstance(one, dict):
            rest += [*one.keys(), *one.values()]
        elif isinstance(one, (list, tuple, set, frozenset)):
            rest += one
        elif not isinstance(one, _OPAQUE):
            rest += _attributes(one).values()
    return touched, whole


def _shared_bytes(sample: Sequence[Any]) -> int | None:
    """Return how many bytes rows take in a SharedList; None if they cannot be in one."""
    try:
        return sum(len(piece) for item in sample for piece in pack(item))
    except Exception:  # of the pickling of something of the user's
        return None


def _mb(size: float) -> str:
    return f"{size / 1e6:,.0f} MB"
