"""The executors that worker processes belong to, and what Python's executors do at the end of the interpreter.

An executor starts its processes when it gets its first task, and each has two threads, which write to memory that a
fork shares with the child: with an executor for each worker, started with it, a worker cost this process half as much
again as torch's. So workers are launched first, one after the other, and then all given to one executor. Its queues are
not used. If one dies, the executor takes itself for broken, and waits for the others, which it would have ended.

    main thread ends ──> concurrent.futures' own hook: executors take no tasks any more, their threads end
                     ──> open_again: a thread trains on, and begins anew ──> end: that thread has ended too

Imported before :mod:`asyncloader.engine.exits` registers its hook, which so runs before that of concurrent.futures.
"""

from __future__ import annotations

import concurrent.futures.process
import concurrent.futures.thread
import os
import signal
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import wait
from multiprocessing.context import ForkContext
from typing import Any, cast

from asyncloader.signals import HandlersWait, masked

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


class Running:
    """A process that runs already, as the executor that it belongs to sees it: it learns of the end, and does not reap.

    Its sentinel is a pidfd, not multiprocessing's pipe, which a child that the process has left behind holds open: the
    interpreter's exit waits for the executor.

    Args:
        pid: The id of the process.
        pidfd: A descriptor of the process; this has a copy.
    """

    exitcode = None

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self.sentinel: int = os.dup(pidfd)
        weakref.finalize(self, os.close, self.sentinel).atexit = False

    def start(self) -> None:
        """Nothing: it runs."""

    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return not wait([self.sentinel], 0)

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended."""
        wait([self.sentinel], timeout)

    def terminate(self) -> None:
        """Nothing: an executor that is broken would end the others too."""

    kill = terminate


class _Adopting(ForkContext):
    """Gives an executor processes that run already; nothing that a fork context makes needs a resource tracker."""

    def __init__(self, processes: Sequence[Running]) -> None:
        self._given = iter(processes)

    def Process(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Return the next one."""
        return next(self._given)


def adopt(processes: Sequence[Running]) -> threading.Thread:
    """Have an executor take processes, which are not to be none; return its thread, which ends after the last of them.

    Executors refuse once Python's exit hook has run. The hook may come just after ours
    (:mod:`asyncloader.engine.exits`), when a thread that trains on has begun anew; whoever may not is refused before.
    """
    executor = ProcessPoolExecutor(len(processes), mp_context=_Adopting(processes))
    with HandlersWait(), masked(signal.SIG_BLOCK, signal.valid_signals()):
        try:
            executor.submit(int)
        except RuntimeError:
            if are_open():
                raise
            open_again()
            executor.submit(int)
        manager: threading.Thread = cast(Any, executor)._executor_manager_thread
        # Until Python 3.13.0 at least, what tells the thread that the executor is gone waits for a lock. From 3.12 on a
        # broken executor's thread holds the lock until the last process has ended: if a worker died during the start,
        # this would never return. So the thread takes the executor for gone already, and is told nothing.
        cast(Any, manager).executor_reference = _gone
        # Nor by concurrent.futures' exit hook, here or in a forked child: that writes to a pipe which the thread, whose
        # workers have just ended, may be closing. The interpreter waits for it as for any thread.
        _processes._threads_wakeups.pop(manager, None)
    return manager


def _gone() -> None:
    """Stand for a weak reference to an executor that does not exist any more."""
