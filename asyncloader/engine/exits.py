"""The end of the interpreter: who is waited for, and who gets nothing any more.

    main thread ends ──> threads that train on come to their end: wait_for_users
                     ──> our threads and workers end; daemon threads get no more batches: stop_daemon

Each part of the engine that has something to end registers with ``threading._register_atexit``, and waits for the users
first: ``atexit`` handlers run after threads were joined, which may wait for what we hold.
"""

from __future__ import annotations

import concurrent.futures.process  # its exit hook must be registered before ours
import concurrent.futures.thread
import os
import threading
import time
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")

EXIT_GRACE_S = 1.5
"""Workers and threads get this long to end by themselves. Seconds."""

is_exiting = False
"""Threads that train on have ended, and nobody would end what is made from now on."""

_users: set[threading.Thread] = set()


_began_at = 0.0


def begin() -> None:
    """Wait for those who are waited for; who comes later is too late."""
    global is_exiting, _began_at
    wait_for_users()
    if not is_exiting:
        is_exiting, _began_at = True, time.monotonic()


def grace_left_s() -> float:
    """Return how long workers and threads still have to end by themselves. Seconds."""
    return max(0.0, EXIT_GRACE_S - (time.monotonic() - _began_at))


def note_user() -> None:
    """Remember the calling thread as one that takes batches."""
    thread = threading.current_thread()
    if thread not in _users:
        for other in tuple(_users):
            if not other.is_alive():
                _users.discard(other)
        _users.add(thread)


def wait_for_users() -> None:
    """Let threads that train on after the main thread has returned come to their end.

    All that ever took a batch, for a thread may just be between two epochs. The interpreter would wait for them as
    well, but only after this hook. Threads of an executor end when concurrent.futures' own hook tells them to, which
    would be too late: it is told now.
    """
    while waiting := [thread for thread in tuple(_users) if _may_go_on(thread)]:
        pooled = concurrent.futures.thread._threads_queues
        if any(thread in pooled for thread in waiting):
            concurrent.futures.thread._python_exit()
        for thread in waiting:
            thread.join()


def is_left_behind() -> bool:
    """Whether the caller is a daemon thread, which the interpreter leaves behind."""
    # In a forked worker the main thread still carries the daemon flag of the thread that forked it.
    thread = threading.current_thread()
    return thread.daemon and thread is not threading.main_thread()


def stop_daemon() -> None:
    """Do not return to a daemon thread: the interpreter is exiting.

    It abandons daemon threads in a moment, wherever they are; until then they would write tracebacks of errors that
    nobody made.
    """
    if is_left_behind():
        threading.Event().wait()


def copied(things: Iterable[T]) -> tuple[T, ...]:
    """Copy a set that other threads may add to meanwhile."""
    while True:
        try:
            return tuple(things)
        except RuntimeError:  # it changed its size
            continue


def _may_go_on(thread: threading.Thread) -> bool:
    return thread.is_alive() and not thread.daemon and thread is not threading.main_thread()


def _begin_in_child() -> None:
    global is_exiting
    is_exiting = False
    _users.clear()


os.register_at_fork(after_in_child=_begin_in_child)
