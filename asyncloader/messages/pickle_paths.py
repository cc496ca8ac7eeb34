"""The part of a dataset that cannot be sent to workers: its path, as one writes it in Python.

    dataset.cfg['log'].lock              cannot pickle '_thread.lock' object
    dataset.transform's variable model   the same of what a function closes over

Objects are taken apart as pickle does it: attributes, items. Each step pickles the parts once more, so this is for what
has failed.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from typing import Any, TypeAlias

from asyncloader.messages.messages import WorkerSpec
from asyncloader.messages.pickled_spec import is_picklable
from asyncloader.seeding.holdings import closed_over

_DEEPEST = 8


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
