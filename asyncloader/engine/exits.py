"""The end of the interpreter: who is waited for, and who gets nothing any more.

    main thread ends ──> threads that train on come to their end: wait_for_users
                     ──> our threads and workers end (at_exit); daemon threads get no more batches: stop_daemon
    a thread that is no daemon takes its first batch only now ──> all of it begins anew, and ends when that thread has

The hook is one of ``threading._register_atexit``, and waits for the users first: ``atexit`` handlers run after threads
were joined, which may wait for what we hold. The hook has to be registered before the main thread returns, so `loader`
imports this module, and leaves the rest of the engine until a loader is made.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any, cast

from asyncloader.errors import LoaderClosedError

try:
    from asyncloader.backends.processes import executors  # whose exit hooks must be registered before ours

    cast(Any, threading)._register_atexit(lambda: _end())
except RuntimeError as _error:
    raise LoaderClosedError(
        "asyncloader is imported for the first time after the main thread has returned, when what ends workers with "
        "the interpreter can no longer be registered. Import it (`from asyncloader import DataLoader`) at the top of "
        "the program; loaders may then be made by a thread that goes on."
    ) from _error

EXIT_GRACE_S = 1.5
"""Workers and threads get this long to end by themselves. Seconds."""

is_exiting: bool = False
"""Threads that train on have ended, and nobody would end what is made from now on."""

pid: int = os.getpid()
"""Of this process, without a system call for each batch."""

token: object = object()
"""Another one in each fork, and when the end begins, or all begins anew: who has seen this one need look at neither."""

_users: set[threading.Thread] = set()
_closers: list[Callable[[], None]] = []
_ending = threading.RLock()  # held while everything ends, and by a thread that comes to be waited for
_began_at = 0.0


def at_exit(close: Callable[[], None]) -> None:
    """Have this called at the end, before what was given earlier, and again if anything begins anew."""
    _closers.insert(0, close)


def _end() -> None:
    """Wait for those who are waited for, then close everything."""
    global is_exiting, token, _began_at
    while True:
        wait_for_users()
        with _ending:
            if _waiting():  # one came in the last moment
                continue
            is_exiting, token, _began_at = True, object(), time.monotonic()
            for close in _closers:
                close()
            return


def _begin_anew() -> None:
    """Serve a thread that comes after the end, when executors too have ended; another thread waits for it.

    Raises:
        LoaderClosedError: if Python starts no threads any more, nor processes.
    """
    global is_exiting, token
    try:
        threading.Thread(target=_end_anew, name="asyncloader exit", daemon=False).start()  # waits for `_ending`
    except RuntimeError as error:
        raise LoaderClosedError(
            "Python 3.12.0 and 3.12.1 start no thread and fork no process once the main thread has returned, so no "
            "loader can begin. Have the main thread wait (thread.join()), or use a later version."
        ) from error
    is_exiting, token = False, object()
    executors.open_again()


def _end_anew() -> None:
    with _ending:  # it has begun anew
        pass
    _end()
    with _ending:
        if is_exiting:  # otherwise it has begun once more, and somebody else waits
            executors.end()


def grace_left_s() -> float:
    """Return how long workers and threads still have to end by themselves. Seconds."""
    return max(0.0, EXIT_GRACE_S - (time.monotonic() - _began_at))


def note_user() -> None:
    """Remember the calling thread as one that takes batches, and is waited for at the end, which it may come after.

    Raises:
        LoaderClosedError: if it has come after the end, and Python starts no threads any more.
    """
    thread = threading.current_thread()
    if (thread in _users and not is_exiting) or not _may_go_on(thread):
        return
    with _ending:
        for other in tuple(_users):
            if not other.is_alive():
                _users.discard(other)
        _users.add(thread)
        if is_exiting:
            _begin_anew()


def wait_for_users() -> None:
    """Let threads that train on after the main thread has returned come to their end.

    All that ever took a batch, for a thread may just be between two epochs. The interpreter would wait for them as
    well, but only after this hook. Threads of an executor end when concurrent.futures' own hook tells them to, which
    would be too late: it is told now.
    """
    while waiting := _waiting():
        if any(map(executors.has, waiting)):
            executors.end_threads()
        for thread in waiting:
            thread.join()


def _waiting() -> list[threading.Thread]:
    return [thread for thread in tuple(_users) if _may_go_on(thread)]


def is_left_behind() -> bool:
    """Whether the caller is a daemon thread, which the interpreter leaves behind."""
    # In a forked worker the main thread still carries the daemon flag of the thread that forked it.
    thread = threading.current_thread()
    return thread.daemon and thread is not threading.main_thread()


def stop_daemon() -> None:
    """Do not return to a daemon thread: the interpreter is exiting.

    The interpreter abandons daemon threads in a moment, wherever they are; until then they would write tracebacks of
    errors that nobody made.
    """
    if is_left_behind():
        threading.Event().wait()


def _may_go_on(thread: threading.Thread) -> bool:
    return thread.is_alive() and not thread.daemon and thread is not threading.main_thread()


def _begin_in_child() -> None:
    global is_exiting, pid, token, _ending
    is_exiting, pid, token, _ending = False, os.getpid(), object(), threading.RLock()
    _users.clear()


os.register_at_fork(after_in_child=_begin_in_child)
