"""The moment in which a process is made: in which thread, with which signals, and whether there is room for it.

with handlers_wait(), masked(SIG_BLOCK, all): fork
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from multiprocessing import util
from multiprocessing.process import BaseProcess
from typing import Any, TypeAlias, TypeVar, cast

from asyncloader.backends.backend import Launch

T = TypeVar("T")

Forking: TypeAlias = Callable[[], contextlib.AbstractContextManager[None]]
"""Gives what a fork is to be made in."""

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


def carry_out(steps: Generator[Launch, None, T]) -> T:
    """Take the steps of a start, and launch what they launch, all in the calling thread: the loop's."""
    try:
        launch = next(steps)
        while True:
            try:
                launch()
            except BaseException as error:
                launch = steps.throw(error)
            else:
                launch = next(steps)
    except StopIteration as end:
        result: T = end.value
        return result


def start_process(process: BaseProcess) -> None:
    """Start a process, in the calling thread."""
    dropped = _dropped_in_child()  # and kept: where a process is forked this frame is there too, to the end
    process.start()
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


@contextlib.contextmanager
def handlers_wait(again: Callable[[int], object] = signal.raise_signal) -> Iterator[None]:
    """Let Python's handlers of signals wait in the main thread: one that raises must not meet a process half known.

    The launching thread blocks signals meanwhile, but another thread may get them, and Python runs the handlers in the
    main thread all the same.

    Args:
        again: Is given the number of each signal that came, at the end.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    is_over = False

    def wait(number: int, frame: Any) -> None:
        if is_over:  # another handler has raised before its own was set again
            waiting[number](number, frame)
        else:
            came.append(number)

    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    # The handler that asyncio and uvloop set does nothing; they hear of signals in another way.
    waiting: dict[int, Any] = {
        number: handler
        for number, handler in handlers.items()
        if callable(handler) and not getattr(handler, "__name__", "").endswith("sighandler_noop")
    }
    try:
        for number in waiting:
            signal.signal(number, wait)
        yield
    finally:
        is_over = True
        try:
            with masked(signal.SIG_BLOCK, came):  # all at once: those behind one that raises come at the next look
                for number in came:
                    again(number)
        finally:
            for number, handler in waiting.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def masked(how: int, signals: Iterable[int]) -> Iterator[None]:
    """Change the calling thread's mask of blocked signals for a while."""
    mask = signal.pthread_sigmask(how, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
