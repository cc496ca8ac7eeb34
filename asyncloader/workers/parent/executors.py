"""What Python's executors do at the end of the interpreter, and how they are had back from there.

    main thread ends ──> concurrent.futures' own hook: executors take no tasks any more, their threads end
                     ──> open_again: a thread trains on, and begins anew ──> end: that thread has ended too

Imported before :mod:`asyncloader.engine.exits` registers its hook, which so runs before that of concurrent.futures.
"""

from __future__ import annotations

import concurrent.futures.process
import concurrent.futures.thread
import threading
from typing import Any, cast

_processes, _threads = cast(Any, concurrent.futures.process), cast(Any, concurrent.futures.thread)


def are_open() -> bool:
    """Whether executors take tasks."""
    return not _processes._global_shutdown


def open_again() -> None:
    """Have executors take tasks, as before the end."""
    _switch(is_open=True)


def end() -> None:
    """Have executors take no tasks any more, and end what is left of them, without waiting for it."""
    _switch(is_open=False)
    for tasks in list(_threads._threads_queues.values()):
        tasks.put(None)
    for wakeup in list(_processes._threads_wakeups.values()):
        wakeup.wakeup()


def _switch(*, is_open: bool) -> None:
    with _threads._global_shutdown_lock:
        _processes._global_shutdown = _threads._shutdown = not is_open


def has(thread: threading.Thread) -> bool:
    """Whether this thread is one of an executor's."""
    return thread in _threads._threads_queues


def end_threads() -> None:
    """Do now what the hook of concurrent.futures does with threads: tell them to end, and wait for them."""
    _threads._python_exit()
