"""Threads that run the user's code, and the end of the interpreter.

They are daemons, so that one that hangs does not hold up the end of the program. But a daemon thread that comes back
from C++, a torch operation for example, while the interpreter is torn down is unwound by it (before Python 3.14), which
C++ answers with ``std::terminate``: the program would abort with a core dump after everything went well. So whoever
ends the interpreter calls `end_all` before: threads that still run are made to raise SystemExit at their next line of
Python, and are waited for, but not those that wait for something else than a core.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from contextvars import Context
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

LONGEST_S = 10.0
"""An operation that computes at the end of the program is waited for no longer. Seconds."""

LATER = object()
"""Is returned by what asks a thread to end, if others begin anew that need it: all is ended again after them."""

_LOOK_EVERY_S = 0.02
_IDLE_S = 0.3  # who has not run for so long is waiting for something

is_ending: bool = False
"""Threads raise what nobody need hear of."""

_is_fork = False
"""This process is a fork in which no thread was started."""


awaited: weakref.WeakSet[Any] = weakref.WeakSet()
"""What threads of the user's, and other processes, may wait for. The interpreter waits for these.

`end_all` calls the method `end_with_program` of each, which has nobody wait any more, and does not block.
"""

_threads: weakref.WeakKeyDictionary[threading.Thread, Callable[[], object] | None] = weakref.WeakKeyDictionary()


def start(target: Callable[[], object], name: str, end: Callable[[], object] | None = None) -> threading.Thread:
    """Start a thread that `end_all` knows of.

    Args:
        target: The function that the thread runs.
        name: Name of the thread.
        end: Asks it to end.

    Raises:
        RuntimeError: if the system has no room for it.
    """
    global _is_fork
    if _is_fork and (torch := sys.modules.get("torch")):
        # In a fork where their number was set, the first new thread that comes to torch makes its pool of threads anew;
        # who comes to that meanwhile finds none.
        first = threading.Thread(target=torch.get_num_threads)
        first.start()
        first.join()
    _is_fork = False
    # From Python 3.14 on a thread keeps its context, in which the dataset is known, for as long as there is a `Thread`.
    thread = threading.Thread(target=partial(Context().run, target), name=name, daemon=True)
    adopt(thread, end)
    thread.start()
    return thread


def adopt(thread: threading.Thread, end: Callable[[], object] | None) -> None:
    """Have `end_all` know of a thread: see `start`."""
    _threads[thread] = end


def end_all(grace_s: float) -> None:
    """End what others wait for. Ask the threads to end, and wait for them; give up those that wait for something.

    Args:
        grace_s: How long they have to end by themselves. Seconds.
    """
    for each in copied(awaited):
        each.end_with_program()
    ending = [thread for thread, end in copied(_threads.items()) if end is None or end() is not LATER]
    left = _join(ending, grace_s)
    began = time.monotonic()
    ran_at = dict.fromkeys(left, began)
    while left and (now := time.monotonic()) < began + LONGEST_S:
        for thread in left:
            interrupt(thread)
            if _is_running(thread):
                ran_at[thread] = now
        left = [thread for thread in _join(left, _LOOK_EVERY_S) if now - ran_at[thread] < _IDLE_S]


def interrupt(thread: threading.Thread) -> None:
    """Have a thread raise SystemExit at its next line of Python, because the interpreter ends.

    That line may be in a finalizer, which Python would have tell of it.
    """
    global is_ending
    if not is_ending:
        is_ending, sys.unraisablehook = True, partial(_tell_others, sys.unraisablehook)
    if thread.ident is not None and thread.is_alive():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))


def _tell_others(tell: Callable[[Any], object], unraisable: Any) -> None:
    if unraisable.exc_type is not SystemExit:
        tell(unraisable)


def waited_for() -> list[threading.Thread]:
    """Return the threads that the interpreter waits for when the main one has ended: no daemons."""
    main = threading.main_thread()
    return [thread for thread in threading.enumerate() if thread is not main and not thread.daemon]


def copied(things: Iterable[T]) -> tuple[T, ...]:
    """Copy a set, or the like, that other threads may add to meanwhile."""
    while True:
        try:
            return tuple(things)
        except RuntimeError:  # it changed its size
            continue


def _join(threads: Iterable[threading.Thread], timeout_s: float) -> list[threading.Thread]:
    """Wait for all of them; return those that are still there."""
    deadline = time.monotonic() + timeout_s
    alive = [thread for thread in threads if thread.is_alive() and thread is not threading.current_thread()]
    for thread in alive:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [thread for thread in alive if thread.is_alive()]


def _is_running(thread: threading.Thread) -> bool:
    """Whether it has a core, or waits for one. Where nobody can tell, it may."""
    try:
        return kernel_stat(Path(f"/proc/self/task/{thread.native_id}"))[0] == "R"
    except OSError:
        return True


def kernel_stat(folder: Path) -> list[str]:
    """Return what the kernel's stat of a process or thread has behind its name, from its state on.

    Args:
        folder: Its folder in /proc.

    Raises:
        OSError: if it has ended, or nobody tells.
    """
    return (folder / "stat").read_text().rpartition(")")[2].split()  # the name, in parentheses, may contain anything


def _begin_in_child() -> None:
    global _is_fork
    _is_fork = True


os.register_at_fork(after_in_child=_begin_in_child)
os.register_at_fork(after_in_child=_threads.clear)
os.register_at_fork(after_in_child=awaited.clear)
