"""The first steps of a worker process: its ends of the connections, signals, and what ends it with its parent.

Imports next to nothing: under spawn that comes before :func:`gc.freeze`, and by the import of torch a collection has
come near, which would take 60 ms.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures.process
import concurrent.futures.thread
import contextlib
import faulthandler
import fcntl
import gc
import multiprocessing
import os
import pickle
import select
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any, NoReturn, cast

from asyncloader.errors import NO_GUARD, WorkerStartError
from asyncloader.messages.imports import forget_imports_of_others
from asyncloader.worker.inherited import OpenFile, files_to_reopen

STACK_SIGNAL = getattr(signal, "SIGRTMIN", signal.SIGUSR2) + (9 if hasattr(signal, "SIGRTMIN") else 0)
"""Makes a worker write the stacks of its threads. Not SIGUSR1, which Slurm and Lightning use."""

_LARGEST_KEPT_BYTES = (32 << 20) - 8192  # with malloc's header and a page to spare below DEFAULT_MMAP_THRESHOLD_MAX

CAN_TELL = b"\n"
"""The first that a worker writes into its pipe for output: from now on the signal does not end it."""

_kept: list[Any] = []
"""What a forked worker has of the trainer and takes out of its place. It stays, or a destructor would run, here. What
multiprocessing takes out is kept by :func:`asyncloader.backends.processes.launching.start_process`."""

CANNOT_START = "The worker could not be set up:\n"
"""Stands in its output before the exception, where that came before any of the user's code."""


@dataclass
class Ends:
    """A worker's ends of its connections to the parent.

    Attributes:
        channel: The messages.
        liveness: A pipe into which nobody writes; it hangs up when the parent is gone.
        output: A pipe for what faulthandler writes.
    """

    channel: socket.socket
    liveness: int = -1
    output: int = -1

    def close(self) -> None:
        """Close them, in the parent, once the worker has them."""
        self.channel.close()
        for fd in (self.liveness, self.output):
            if fd >= 0:
                os.close(fd)

    def __reduce__(self) -> Any:
        # Under spawn and forkserver this is pickled while the process is launched, which passes descriptors on.
        return _rebuild, tuple(DupFd(fd) for fd in (self.channel.fileno(), self.liveness, self.output))


def _rebuild(channel: Any, liveness: Any, output: Any) -> Ends:
    return Ends(socket.socket(fileno=channel.detach()), liveness.detach(), output.detach())


class Later:
    """Something that a process that is not forked unpickles when it is asked for.

    By then the process ends with its parent, and can tell what the unpickling, which may import torch, has raised.
    """

    def __init__(self, content: Any) -> None:
        self._content = content

    def __call__(self) -> Any:
        """Return it."""
        return self._content

    def __reduce__(self) -> Any:
        return partial, (pickle.loads, bytes(ForkingPickler.dumps(self._content)))


def start(
    worker_id: int,
    ends: Ends,
    work: Callable[[], Any],
    start_method: str,
    importing: frozenset[str],
) -> None:
    """Make this process a worker and stay until told to end.

    The process is started for this. A task would come through the queue of its executor, for which two threads
    of the parent must have their turns while it forks the next worker: 4 ms of the 22 until a first batch. Nothing is
    raised in here that `serve` has not dealt with.

    Args:
        worker_id: From 0.
        ends: Connections to the parent.
        work: Returns a WorkerSpec, or what returns it when called; its heap of shared memory, or None; the run over the
            data that the first tickets belong to, or None where that is the first message.
        start_method: How the process was started.
        importing: The modules that the thread that iterates is in the middle of importing.
    """
    try:
        if start_method == "fork":
            forget_imports_of_others(importing)  # before anything is imported
        files = _become_worker(ends, start_method)
        from asyncloader.worker.serve import serve

        source, heap, epoch = work()
    except BaseException as error:
        import traceback

        _give_up(ends.output, "".join(traceback.format_exception(error)))

    serve(worker_id, ends.channel, ends.output, source, heap, start_method, epoch, files)


def _give_up(output: int, why: str) -> NoReturn:
    """Tell the parent what has happened, and end."""
    with contextlib.suppress(OSError):
        os.write(output, CAN_TELL + (CANNOT_START + why).encode())
    os._exit(1)


def refuse_in_main() -> None:
    """Refuse to start workers while the main module is imported for one: they would import it, and so on.

    Raises:
        WorkerStartError: in a worker, in the fork server, or in a process of the user's own.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise WorkerStartError(NO_GUARD)


def _become_worker(ends: Ends, start_method: str) -> list[OpenFile]:
    """Return the files that the worker is to open once more."""
    files = files_to_reopen() if start_method == "fork" else []  # at once: the trainer reads on
    keep_freed_memory()
    _settle_signals()
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)  # Ctrl-C in the terminal is for the trainer; and a worker is killed with its children
    die_with_parent(ends.liveness)
    if start_method == "fork":
        _forget_the_parents_exit()
    # All objects that are here by now stay. Under fork a collection would write to, and so copy, every page that holds
    # objects of the trainer; and one over all that torch has brought takes 60 ms.
    gc.freeze()
    faulthandler.enable(ends.output, all_threads=True)
    faulthandler.register(STACK_SIGNAL, ends.output, all_threads=True, chain=False)
    os.write(ends.output, CAN_TELL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # not before: the signal for stacks would have ended the process
    return files


def keep_freed_memory() -> None:
    """Have glibc's malloc keep the memory that a decoder frees, for the next sample.

    malloc maps each block above a threshold anew, and gives back free memory at the end of the heap. Both
    thresholds rise when a mapped block is freed, which in most programs happens soon. Not here: batches are shared
    memory. So one block of nearly the largest size that counts (32 MiB) is freed, and never touched: 30 us. To call
    ``mallopt`` would do the same, and switch off glibc's own adjustment. Other allocators just take and free a block;
    what the user sets by the environment (``MALLOC_*_THRESHOLD_``, ``GLIBC_TUNABLES``) stays in force.

    Measured by tests/benchmarks/decode.py: from 200 page faults for a decoded photograph to none.
    """
    bytes(_LARGEST_KEPT_BYTES)


def _settle_signals() -> None:
    """Undo what a fork inherits: otherwise a SIGTERM to the worker would run the trainer's own handlers."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(handler := signal.getsignal(number)):
            _kept.append(handler)
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio._set_running_loop(None)


def die_with_parent(liveness: int) -> None:
    """Let the kernel kill this process group when the last writer of the pipe is gone.

    A worker that is busy, or holds the interpreter's lock for ever, or left children behind, goes as well. The end of
    the channel would not do: siblings may hold copies of it, and a busy worker does not read.
    """
    fcntl.fcntl(liveness, fcntl.F_SETOWN, -os.getpgrp() if _leads_a_group() else os.getpid())
    fcntl.fcntl(liveness, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(liveness, fcntl.F_SETFL, fcntl.fcntl(liveness, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([liveness], [], [], 0)[0]:
        os._exit(1)  # it was gone already


def _leads_a_group() -> bool:
    """Whether this process has a group of its own. If it was not allowed one (seccomp) it is in the trainer's."""
    return os.getpgrp() == os.getpid()


def _forget_the_parents_exit() -> None:
    """Do not run the trainer's exit handlers at the end of a forked worker. The frame that forked refers to them."""
    atexit._clear()
    wakeups = cast(Any, concurrent.futures.process)._threads_wakeups
    queues = cast(Any, concurrent.futures.thread)._threads_queues
    _kept.extend([*wakeups.values(), *queues.values()])
    wakeups.clear()
    queues.clear()
