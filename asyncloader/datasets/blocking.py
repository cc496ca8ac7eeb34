"""Threads for what would block the loop: reads of local files, and decoding in the trainer's process.

They belong to the process, as the portal does, and wait idle for the next call.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

THREAD_NAME = "asyncloader dataset"
_MOST_THREADS = 16

_made: tuple[int, ThreadPoolExecutor] | None = None  # by the process with this pid


def executor() -> ThreadPoolExecutor:
    """Return the threads of this process: a forked child has none of its parent's."""
    global _made
    if _made is None or _made[0] != os.getpid():
        _made = os.getpid(), ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix=THREAD_NAME)
    return _made[1]


async def in_thread(function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    """Call a function on one of the threads, with the context of the caller (:func:`asyncloader.sample_rng`)."""
    context = contextvars.copy_context()
    return await asyncio.get_running_loop().run_in_executor(executor(), lambda: context.run(function, *args, **kwargs))
