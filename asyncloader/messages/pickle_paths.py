"""The part of a dataset that cannot be sent to workers, or is large to send: its path, as one writes it in Python.

    dataset.cfg['log'].lock              cannot pickle '_thread.lock' object
    dataset.transform's variable model   the same of what a function closes over
    dataset.annotations                  list, 312 MB

Objects are taken apart as pickle does it: attributes, items. Each step pickles the parts once more, so this is for what
has failed, or takes long anyway.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from typing import Any, TypeAlias

from asyncloader.messages.messages import WorkerSpec
from asyncloader.messages.pickled_spec import count_copied_bytes, is_picklable
from asyncloader.seeding.holdings import closed_over

MANY_BYTES = 100 << 20
"""From here on, what a dataset makes workers copy is told of."""

_told: set[type] = set()
"""Classes of datasets that have been told of: to find what is large takes as long as several picklings."""

_DEEPEST = 8
_FEW = 100  # parts of what is large; what has more is named as a whole


_Part: TypeAlias = tuple[str, Any]
"""Part of an object, with its path."""


def say_unpicklable(spec: WorkerSpec) -> str:
    """Say which part of a spec cannot be pickled, and what to do about it."""
    part = ("dataset", spec.dataset)
    inside = [part, ("collate_fn", spec.collate_fn), ("worker_init_fn", spec.worker_init_fn)]
    for _ in range(_DEEPEST):
        if (bad := _first_bad(inside)) is None:
            break
        part, inside = bad, _parts(bad)
    path, thing = part
    return (
        f"{path} ({type(thing).__name__}) cannot be sent to a worker. Make it in the worker, at its first "
        'use or in __setstate__; or fork workers: multiprocessing_context="fork".'
    )


def _first_bad(parts: list[_Part]) -> _Part | None:
    """Return the first part that cannot be pickled: halves of many are pickled together."""
    if is_picklable([thing for _, thing in parts]):
        return None
    while len(parts) > 1:
        half = parts[: len(parts) // 2]
        parts = parts[len(half) :] if is_picklable([thing for _, thing in half]) else half
    return parts[0]


def say_large(spec: WorkerSpec, copied_bytes: int) -> str | None:
    """Say what most of a large pickle is for, and what to do about it; None where it is not large, or was told before.

    Args:
        spec: The spec that is sent.
        copied_bytes: How much of it each worker unpickles into memory of its own.
    """
    if copied_bytes < MANY_BYTES or type(spec.dataset) in _told:
        return None
    _told.add(type(spec.dataset))
    part, part_bytes = ("dataset", spec.dataset), copied_bytes
    for _ in range(_DEEPEST):
        inside = _parts(part)
        sizes = ((count_copied_bytes(inner[1]), inner) for inner in inside if len(inside) <= _FEW)
        size, largest = max(sizes, key=lambda sized: sized[0], default=(0, part))
        if 2 * size < copied_bytes:
            break
        part, part_bytes = largest, size
    path, thing = part
    return (
        f"Each worker unpickles {copied_bytes >> 20} MB into memory of its own whenever it is started; "
        f"{part_bytes >> 20} MB of that are {path} ({type(thing).__name__}). Keep them in an array, a "
        "tensor, a SharedList or a SharedDict, which workers share; and keep the workers: persistent_workers=True."
    )


def _parts(whole: _Part) -> list[_Part]:
    """List what pickle takes an object apart into: its state, and its items; of a function what it closes over."""
    path, thing = whole
    if isinstance(thing, type):
        return []
    if isinstance(thing, types.FunctionType):
        found = [(f"{path}'s variable {name}", value) for name, value in closed_over(thing)]
        defaults = [*enumerate(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).items()]
        return found + [(f"{path}'s default {key}", value) for key, value in defaults]
    if isinstance(thing, types.MethodType):
        return [(f"{path}.__self__", thing.__self__)]
    found = _state(whole)
    if isinstance(thing, functools.partial):
        found += [(f"{path}.{name}", getattr(thing, name)) for name in ("func", "args", "keywords")]
    elif isinstance(thing, Mapping):
        found += [(f"{path}[{key!r}]", value) for key, value in thing.items()]
    elif isinstance(thing, (list, tuple)):
        found += [(f"{path}[{number}]", item) for number, item in enumerate(thing)]
    elif isinstance(thing, (set, frozenset)):
        found += [(f"an element of {path}", item) for item in thing]
    return found


def _state(whole: _Part) -> list[_Part]:
    """List the attributes that are pickled: those in slots too, and none that ``__getstate__`` leaves out."""
    path, thing = whole
    try:
        state = thing.__getstate__()
    except Exception:  # the user's
        return []
    slots: Any = None
    if isinstance(state, tuple) and len(state) == 2:
        state, slots = state
    attributes = [pair for each in (state, slots) if isinstance(each, dict) for pair in each.items()]
    return [
        (f"{path}.{name}" if getattr(thing, str(name), None) is value else f"{path}.__getstate__()[{name!r}]", value)
        for name, value in attributes
    ]
