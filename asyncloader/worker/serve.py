"""The work of a worker process: open the dataset, answer tickets, end cleanly. Runs in the worker's main thread."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import socket
import sys
import threading
import traceback
from collections.abc import Iterable
from typing import Any, cast

from asyncloader.messages.failure import with_notes
from asyncloader.messages.messages import EpochSpec, WorkerSpec
from asyncloader.stack_text import traceback_of
from asyncloader.worker.channel import WorkerChannel
from asyncloader.worker.inherited import OpenFile, reopen
from asyncloader.worker.overlap_loop import make_loop
from asyncloader.worker.transport import ParentGone, ProcessTransport

_KILLED_WITHIN_S = 1.5
_LAST_WORDS_BYTES = 16 << 10


def serve(
    worker_id: int,
    channel_end: socket.socket,
    output: int,
    source: Any,
    heap: Any,
    start_method: str,
    epoch: EpochSpec | None,
    files: Iterable[OpenFile],
) -> None:
    """Stay until told to end; see :func:`asyncloader.worker.bootstrap.start`, which calls it."""
    channel = WorkerChannel(channel_end)
    with contextlib.suppress(OSError), open("/proc/self/comm", "wb", 0) as file:  # Linux only, 15 characters
        file.write(b"asyncloader %d" % worker_id)  # as `top`, `pstree` and `py-spy` show it
    try:
        transport = ProcessTransport(worker_id, channel, None if heap is None or heap.arena is None else heap)
        transport.come_up()  # before the source is opened, which may call the user's code
        reopen(files)  # after the worker has said that it is up: a network drive may take its time
        if epoch is None:  # this process was not forked: it is the first message
            epoch = cast(Any, transport.receive(wait=True))[1]
        loop = make_loop(worker_id, transport, epoch, opened(source))
        loop.work()
        gc.collect()  # what the dataset holds in cycles runs its cleanup too
    except ParentGone:
        _wait_to_be_killed()
    except BaseException as error:
        _leave(error, output)
    finally:
        if start_method != "spawn":
            # No interpreter exit follows that would run them; what the trainer had registered was cleared.
            atexit._run_exitfuncs()
        channel.close()


_BELOW_GUARD = (
    'Workers that are not forked import the main module without what stands below `if __name__ == "__main__":`. Define '
    "classes and functions that the dataset needs above that line, or in a module of their own."
)


def opened(source: Any) -> WorkerSpec | Exception:
    """Return what to work with, or why there is nothing."""
    try:
        spec: WorkerSpec = source() if callable(source) else source
        return spec
    except Exception as error:
        notes = ["The worker was unpickling the dataset and the functions that it needs."]
        is_of_main = isinstance(error, AttributeError) and "__mp_main__" in str(error)
        return with_notes(error, notes + [_BELOW_GUARD] * is_of_main)


def _wait_to_be_killed() -> None:
    """Clean up and stay, for a moment: the connection is gone, so the parent is, or is about to kill this process.

    To return would end it with another exit code than that of a process that was killed.
    """
    with contextlib.suppress(OSError, ValueError):  # whoever read what it prints may be gone as well
        _clean_up()
    threading.Event().wait(_KILLED_WITHIN_S)
    os._exit(1)


def _leave(error: BaseException, output: int) -> None:
    """End the process as an uncaught exception would: the parent sees a death with its exit code, and is told why."""
    with contextlib.suppress(OSError):
        os.write(output, traceback_of(error).encode(errors="replace")[-_LAST_WORDS_BYTES:])
    if not isinstance(error, (SystemExit, KeyboardInterrupt)):  # the main process raises the latter by itself
        traceback.print_exception(error)
    _clean_up()
    os._exit(exit_code(error))  # threads that the dataset has started may not end, and would keep the process


def exit_code(error: BaseException) -> int:
    """Return the exit code of a process that this exception ends."""
    if not isinstance(error, SystemExit):
        return 1
    return error.code if isinstance(error.code, int) else 0 if error.code is None else 1


def _clean_up() -> None:
    """Do what an interpreter does at its end and `os._exit` does not."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
