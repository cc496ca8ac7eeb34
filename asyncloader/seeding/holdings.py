"""Objects that a dataset holds: in attributes, a few levels in, in closures of functions, as globals that these name.

    dataset ── members of torch's wrappers ── attributes, containers, closures ── wanted? ──> (path, object)

Nothing of the user's is called: properties and ``__getattr__`` are not asked. The number of objects that are looked at
is bounded, so this takes some milliseconds at most, whatever a dataset holds.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from asyncloader.protocols import members

_DEEPEST = 10
_MOST_ENTRIES = 64
"""So many entries of a container are looked at, and no more."""
_MOST_OBJECTS = 2000

_CLOSED = (
    str, bytes, bytearray, memoryview, int, float, complex, type(None), type, ModuleType, torch.Tensor, np.ndarray,
    asyncio.AbstractEventLoop,
)  # fmt: skip
"""Nothing in these is looked for."""
_CONTAINERS = (dict, list, tuple, deque)
_LIBRARIES = ("torch.", "numpy.", "asyncio.", "builtins", "typing", "abc", "collections")
"""Methods of classes from these hold nothing of the user's."""


def held(dataset: Any, is_wanted: Callable[[Any], bool]) -> Iterator[tuple[str, Any]]:
    """Yield what the dataset holds and is wanted, once each, with its path from the dataset: "transform.rng".

    The order is the same in each process. Sets, which have none, are not looked into. Containers come after objects, by
    how many of them one is inside of: what is wanted is in attributes, or in a list of transforms, and lists in lists
    are data, of which there may be more than are looked at.
    """
    objects = deque((member, "", 0) for member in members(dataset) if not issubclass(type(member), _CLOSED))
    containers: deque[tuple[Any, str, int]] = deque()
    seen: set[int] = set()
    kinds: set[type] = set()
    while (objects or containers) and len(seen) < _MOST_OBJECTS:
        thing, path, depth = (objects or containers).popleft()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        try:
            found = bool(path) and is_wanted(thing)
            inside = list(parts_of(thing, is_wanted, kinds)) if not found and depth < _DEEPEST else []
        except Exception:  # a lazy proxy whose `__class__` raises, a key without a text: it holds nothing for us
            continue
        if found:
            yield path, thing
        for name, inner in inside:
            if not issubclass(kind := type(inner), _CLOSED):
                rest = containers if issubclass(kind, _CONTAINERS) else objects
                rest.append((inner, f"{path}.{name}" if path else name, depth + 1))


def attributes_of(thing: Any) -> dict[str, Any]:
    """Return the attributes in the ``__dict__`` of an object, if it has one; a ``__getattr__`` is not asked."""
    try:
        found = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, dict) else {}


def closed_over(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the variables that a function closes over, by their names, but for those that are assigned later."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue


def parts_of(thing: Any, is_wanted: Callable[[Any], bool], kinds: set[type]) -> Iterator[tuple[str, Any]]:
    """Yield what a thing refers to itself, with names; of classes that were not met before what is wanted, too."""
    if isinstance(thing, dict):
        yield from ((str(key), value) for key, value in islice(dict.items(thing), _MOST_ENTRIES))
    elif isinstance(thing, _CONTAINERS):
        yield from ((str(number), value) for number, value in enumerate(islice(thing, _MOST_ENTRIES)))
    elif isinstance(thing, FunctionType):
        yield from _of_function(thing, is_wanted)
    elif isinstance(thing, MethodType):
        yield from (("__self__", thing.__self__), ("__func__", thing.__func__))
    elif isinstance(thing, partial):
        yield from (("func", thing.func), ("args", thing.args), ("keywords", thing.keywords))
    elif inspect.isasyncgen(thing) and thing.ag_frame is not None:
        yield from list(thing.ag_frame.f_locals.items())
    else:
        yield from list(attributes_of(thing).items())
        for kind in type(thing).__mro__:
            if not (kind in kinds or str(kind.__module__).startswith(_LIBRARIES)):
                kinds.add(kind)
                found = list(vars(kind).items())
                yield from ((name, value) for name, value in found if type(value) is FunctionType or is_wanted(value))


def _of_function(function: FunctionType, is_wanted: Callable[[Any], bool]) -> Iterator[tuple[str, Any]]:
    """Yield what a function refers to: its closure, its defaults, and what is wanted among the globals it names."""
    yield from closed_over(function)
    yield from (("defaults", value) for value in function.__defaults__ or ())
    for name in function.__code__.co_names:
        if is_wanted(value := function.__globals__.get(name)):
            yield name, value
