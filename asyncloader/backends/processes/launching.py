"""The moment in which a process is made: in which thread, with which signals, and whether there is room for it.

with HandlersWait(), masked(SIG_BLOCK, all): fork
"""

from __future__ import annotations

import atexit
import contextlib
import os
from multiprocessing import util
from multiprocessing.process import BaseProcess, current_process
from typing import Any, cast

_DAEMON = (
    "This process is a daemon, as those of multiprocessing.Pool are, and may not start worker processes. Use a "
    'concurrent.futures.ProcessPoolExecutor in place of the Pool; or worker_backend="thread", or num_workers=0, here.'
)

_finalizers: dict[Any, Any] = util._finalizer_registry  # type: ignore[attr-defined]


def try_descriptors(count: int) -> None:
    """See whether so many descriptors can be had, before others find out: those lose what they have opened already.

    Descriptors 0, 1 and 2 are not among them. Where the program has closed one of these, ``/dev/null`` takes its place
    for good: libuv aborts a process that closes such a descriptor of a loop, and multiprocessing closes descriptor 0 in
    each child, which may be the child's channel by then.

    Raises:
        OSError: if not.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:  # the lowest number that is free
        os.set_inheritable(fd, True)
    os.close(fd)
    tried: list[int] = []
    try:
        for _ in range(count):
            tried.append(os.open(os.devnull, os.O_RDONLY))
    finally:
        for fd in tried:
            os.close(fd)


def start_process(process: BaseProcess) -> None:
    """Start a process, in the calling thread."""
    dropped = _dropped_in_child()  # and kept: where a process is forked this frame is there too, to the end
    try:
        process.start()
    except AssertionError as error:
        if current_process().daemon:
            error.add_note(_DAEMON)
        raise
    finally:
        del dropped


def _dropped_in_child() -> list[Any]:
    """Return what multiprocessing, or we, let go of in a forked child: exit handlers, and its own finalizers.

    The last reference that goes runs a destructor, there, while this process goes on: a temporary directory would be
    deleted, a connection ended; some would crash. Objects that only ``atexit.register`` refers to cannot be found.
    """
    found: list[Any] = [_finalizers.copy()]  # at once, whatever other threads do
    with contextlib.suppress(Exception):  # of a handler's own __eq__
        atexit.unregister(cast(Any, _Collector(found)))
    return found


class _Collector:
    """Collects what it is compared to, and equals none of it: thus all exit handlers, which nothing else lists."""

    __hash__ = object.__hash__

    def __init__(self, found: list[Any]) -> None:
        self.found = found

    def __eq__(self, other: object) -> bool:
        self.found.append(other)
        return False
