"""Where coroutines are suspended: the Python stack of a task, through the coroutines that it awaits.

`asyncio.Task.get_stack` shows the outermost frame alone. Here the chain is followed: coroutines, generators and async
generators, up to the line that awaits another task, a ``gather`` or a future.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any

from asyncloader.seeding.switch import steps

_KINDS = {"cr": "cr_await", "gi": "gi_yieldfrom", "ag": "ag_await"}
"""What coroutines, generators and async generators call what they wait for."""


def await_stack(awaited: Any) -> str:
    """Return the stack of a suspended task or async generator, outermost frame first; "" if there is none.

    The task that reads an async generator does not show where that is suspended.
    """
    frames = ((frame, frame.f_lineno) for frame in _frames(awaited))
    return "".join(traceback.StackSummary.extract(frames).format())


def _frames(awaited: Any) -> Iterator[FrameType]:
    """Yield the frames of a chain of coroutines and generators, or of that of a task."""
    if isinstance(awaited, asyncio.Task):
        awaited = awaited.get_coro()
    while kind := next((kind for kind in _KINDS if isinstance(getattr(awaited, f"{kind}_frame", None), FrameType)), ""):
        frame = getattr(awaited, f"{kind}_frame")
        if frame.f_code is steps.__code__:  # it sends into the coroutine by itself
            awaited = frame.f_locals["coroutine"]
        else:
            yield frame
            awaited = getattr(awaited, _KINDS[kind])
