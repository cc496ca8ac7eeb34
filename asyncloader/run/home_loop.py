"""The event loop that an async dataset without workers has to run on: the one that objects it holds belong to.

    dataset ── attributes, closures, a few levels in ──> asyncio.Queue, Event, Future, a session, ...
                  └─ one of them belongs to a loop of the user's ──> that loop;  None ──> the portal's

Most datasets hold nothing of the kind, and run on the portal's loop, where batches are made while a training step
blocks the loop of the trainer. An object of another loop would never wake them there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

from asyncloader.errors import ConfigurationError
from asyncloader.seeding.holdings import attributes_of, held

log = logging.getLogger("asyncloader")

_HANDED_OVER = (asyncio.Queue, asyncio.Event, asyncio.Condition, asyncio.StreamReader)
"""What one task waits for and another one gives. It belongs to no loop until somebody has waited for it. Locks and
semaphores, which belong to none either, are not among these: a dataset has them to limit its own samples."""


class Bound(NamedTuple):
    """An object that a dataset holds and that belongs to a loop.

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
        dataset: The dataset of a loader without workers.
        portal_loop: The portal's. Objects that belong to it were opened there by an earlier run.
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
    """Yield what the dataset holds that belongs to a loop, or will."""
    for path, thing in held(dataset, _is_bound):
        yield Bound(path, thing, _loop_of(thing))


def _is_bound(thing: Any) -> bool:
    return isinstance(thing, _HANDED_OVER) or _loop_of(thing) is not None


def _loop_of(thing: Any) -> asyncio.AbstractEventLoop | None:
    if asyncio.isfuture(thing):
        return thing.get_loop()
    attributes = attributes_of(thing)
    loop = attributes.get("_loop", attributes.get("loop"))
    return loop if isinstance(loop, asyncio.AbstractEventLoop) else None
