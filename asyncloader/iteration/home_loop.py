"""The event loop that an async dataset without workers has to run on: the one that objects it holds belong to.

    dataset ── attributes, closures, a few levels in ──> asyncio.Queue, Event, Future, a session, ...
                  └─ one of them belongs to a loop of the user's ──> that loop;  None ──> the portal's

Most datasets hold nothing of the kind, and run on the portal's loop, where batches are made while a training step
blocks the loop of the trainer. An object of another loop would never wake them there.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import islice
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from asyncloader.errors import ConfigurationError
from asyncloader.protocols import members

log = logging.getLogger("asyncloader")

_DEEPEST = 6
_MOST_ENTRIES = 64
"""So many entries of a container are looked at, and no more."""
_MOST_OBJECTS = 2000

_HANDED_OVER = (asyncio.Queue, asyncio.Event, asyncio.Condition, asyncio.StreamReader)
"""What one task waits for and another one gives. It belongs to no loop until somebody has waited for it. Locks and
semaphores, which belong to none either, are not among these: a dataset has them to limit its own samples."""

_NOT_ENTERED = (str, bytes, int, float, complex, type, ModuleType, torch.Tensor, np.ndarray, asyncio.AbstractEventLoop)


class Bound(NamedTuple):
    """What a dataset holds that belongs to a loop.

    Attributes:
        path: Where it is, as from the dataset: "queue", "source.inbox".
        thing: The object.
        loop: Its loop; None if it will be that of the first task that waits for it.
    """

    path: str
    thing: Any
    loop: asyncio.AbstractEventLoop | None


def find_home(dataset: Any, portal_loop: asyncio.AbstractEventLoop) -> asyncio.AbstractEventLoop | None:
    """Return the loop of the user's that an async dataset has to run on; None if the portal's will do.

    Args:
        dataset: Of a loader without workers.
        portal_loop: What belongs to it was opened there by an earlier run.
    """
    here = asyncio._get_running_loop()
    unbound: Bound | None = None
    for bound in bound_objects(dataset):
        if bound.loop is None:
            unbound = unbound or bound
        elif bound.loop is not portal_loop and bound.loop.is_running():
            _tell(bound)
            return bound.loop
    if unbound is not None and here is not None and here is not portal_loop:
        _tell(unbound)
        return here
    return None


def _tell(bound: Bound) -> None:
    log.info(
        "The dataset runs on the event loop that its %s (%s) belongs to, and not on the background loop: a training "
        "step that blocks that loop holds up the dataset too.",
        bound.path,
        type(bound.thing).__qualname__,
    )


def refuse_to_block(home: asyncio.AbstractEventLoop | None) -> None:
    """Refuse a caller who would block the loop that makes the batches it waits for.

    Raises:
        ConfigurationError: if the caller is on that loop.
    """
    if is_here(home):
        raise ConfigurationError(
            "this dataset holds an object of the event loop that runs here (an asyncio.Queue, a client session), so "
            "its code runs on this loop, and `for` or next() would block it for ever: use `async for`, or iterate "
            "inside asyncio.to_thread"
        )


def is_here(home: asyncio.AbstractEventLoop | None) -> bool:
    """Whether the caller is on this loop."""
    return home is not None and asyncio._get_running_loop() is home


def bound_objects(dataset: Any) -> Iterator[Bound]:
    """Yield what the dataset holds that belongs to a loop, or will: in its attributes, and in closures of its methods.

    Nothing of the user's is called: properties and ``__getattr__`` stay as they are.
    """
    rest = deque((member, "", 0) for member in members(dataset))
    seen: set[int] = set()
    while rest and len(seen) < _MOST_OBJECTS:
        thing, path, depth = rest.popleft()
        if id(thing) in seen or isinstance(thing, _NOT_ENTERED):
            continue
        seen.add(id(thing))
        if path and (bound := _bound(path, thing)) is not None:
            yield bound
        elif depth < _DEEPEST:
            rest.extend((inner, f"{path}.{name}".strip("."), depth + 1) for name, inner in _inside(thing))


def _bound(path: str, thing: Any) -> Bound | None:
    if asyncio.isfuture(thing):
        return Bound(path, thing, thing.get_loop())
    held = _attributes(thing)
    loop = held.get("_loop", held.get("loop"))
    if isinstance(loop, asyncio.AbstractEventLoop):
        return Bound(path, thing, loop)
    return Bound(path, thing, None) if isinstance(thing, _HANDED_OVER) else None


def _attributes(thing: Any) -> dict[str, Any]:
    found = inspect.getattr_static(thing, "__dict__", None)
    return vars(thing) if found is not None else {}


def _inside(thing: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, dict):
        yield from ((str(key), value) for key, value in islice(thing.items(), _MOST_ENTRIES))
    elif isinstance(thing, (list, tuple, set, frozenset, deque)):
        yield from ((str(number), value) for number, value in enumerate(islice(thing, _MOST_ENTRIES)))
    elif isinstance(thing, FunctionType):
        yield from _of_function(thing)
    elif isinstance(thing, MethodType):
        yield from (("__self__", thing.__self__), ("__func__", thing.__func__))
    elif isinstance(thing, partial):
        yield from (("func", thing.func), ("args", thing.args), ("keywords", thing.keywords))
    elif inspect.isasyncgen(thing) or inspect.iscoroutine(thing):
        frame = thing.ag_frame if inspect.isasyncgen(thing) else thing.cr_frame
        if frame is not None:
            yield from list(frame.f_locals.items())
    else:
        yield from list(_attributes(thing).items())
        for kind in type(thing).__mro__:
            if not kind.__module__.startswith(("torch.", "asyncloader.", "builtins", "typing")):
                yield from ((name, value) for name, value in vars(kind).items() if isinstance(value, FunctionType))


def _of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield what a function refers to: its closure, and what its code calls by the name of a global."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # it is assigned later
            continue
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, _HANDED_OVER) or asyncio.isfuture(value):
            yield name, value
