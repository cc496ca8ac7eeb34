"""Where coroutines are suspended: the Python stack of a task, through everything that it awaits.

`asyncio.Task.get_stack` shows the outermost frame alone. Here the chain is followed: coroutines, generators and async
generators, tasks that a task waits for, and those that ``gather`` waits for.
"""

from __future__ import annotations

import asyncio
import traceback
from types import FrameType
from typing import Any

from asyncloader.seeding.switch import steps

_LONGEST = 100


def task_stack(task: asyncio.Future[Any]) -> str:
    """Return the stack of a suspended task, outermost frame first, as a traceback shows it; "" if there is none."""
    frames = [*_frames(task)][:_LONGEST]
    summary = traceback.StackSummary.extract((frame, frame.f_lineno) for frame in frames)
    return "".join(summary.format())


def _frames(awaited: Any) -> list[FrameType]:
    frames: list[FrameType] = []
    for _ in range(_LONGEST):
        if isinstance(awaited, asyncio.Task):
            task, awaited = awaited, awaited.get_coro()
            inside, awaited = _suspended(awaited)
            frames += inside
            awaited = _waits_for(task)
        elif isinstance(awaited, asyncio.Future):
            awaited = _waits_for(awaited)
        else:
            break
    return frames


def _suspended(awaited: Any) -> tuple[list[FrameType], Any]:
    """Return the frames of a chain of coroutines and generators, and what stands at its end."""
    frames: list[FrameType] = []
    for _ in range(_LONGEST):
        for kind in ("cr", "gi", "ag"):
            frame = getattr(awaited, f"{kind}_frame", None)
            if isinstance(frame, FrameType):
                if frame.f_code is steps.__code__:  # it sends into the coroutine by itself
                    awaited = frame.f_locals["coroutine"]
                    break
                frames.append(frame)
                awaited = getattr(awaited, f"{kind}_await" if kind != "gi" else "gi_yieldfrom")
                break
        else:
            break
    return frames, awaited


def _waits_for(future: asyncio.Future[Any]) -> Any:
    """Return the task that this one waits for; of a gathering, the first that is not done."""
    waiter = getattr(future, "_fut_waiter", None) if isinstance(future, asyncio.Task) else future
    children = getattr(waiter, "_children", None)
    if children:
        return next((child for child in children if not child.done()), None)
    return waiter if isinstance(waiter, asyncio.Task) else None


def generator_stack(iterator: Any) -> str:
    """Return where an async generator is suspended, which the task that reads it does not show; "" for others."""
    frames, _ = _suspended(iterator)
    return "".join(traceback.StackSummary.extract((frame, frame.f_lineno) for frame in frames).format())
