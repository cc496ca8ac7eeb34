"""Signals: their handlers of Python wait while something is done that must be done whole.

CPython calls a handler in the main thread, between any two steps of it, and what the handler raises comes out of there:
Ctrl-C would leave a lock held, a process that nobody knows, a sample that is neither here nor there.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import contextlib
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any

# Those of the module `signal` make enumerations of all that they are given and return, which takes ten times as long.
_get, _set = _signal.getsignal, _signal.signal
_ALL = tuple(map(int, signal.valid_signals()))
_waiting: list[HandlersWait] = []  # of the main thread, the innermost last


class HandlersWait:
    """Lets Python's handlers of signals wait, in the main thread; in other threads, where none is called, does nothing.

    Signals that came meanwhile are raised again at the end. So is what the handlers raise.
    """

    __slots__ = ("_came", "_error", "_handlers", "_stand_in", "_thread")

    def __init__(self) -> None:
        self._handlers: list[tuple[int, Any]] = []
        self._came: list[int] = []
        self._error: BaseException | None = None
        self._stand_in = self._note
        self._thread = threading.get_ident()

    def __enter__(self) -> None:
        self.begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def _note(self, number: int, frame: Any) -> None:
        self._came.append(number)

    def begin(self) -> None:
        """Have handlers wait from now on, unless they do so already."""
        if self._handlers or self._thread != threading.main_thread().ident:
            return
        try:
            _waiting.append(self)
            for number in _with_handlers():
                self._handlers.append((number, _get(number)))
                _set(number, self._stand_in)
        except BaseException:  # of the handler of another signal, for which nothing stands in yet
            self.end()
            raise

    def end(self) -> None:
        """Have handlers be called again, now for what came meanwhile: all of them, also behind one that raises."""
        while self._handlers or self._came:
            try:
                self._set_again()
                while self._came:
                    number = self._came[0]
                    del self._came[0]
                    signal.raise_signal(number)
            except BaseException as error:
                error.__context__ = self._error
                self._error = error
        if (raised := self._error) is not None:
            self._error = None
            try:
                raise raised
            finally:
                del raised  # whose frames have this one: what else they hold, a lease for example, would stay as long

    def _set_again(self) -> None:
        while self._handlers:
            number, handler = self._handlers[-1]
            if _get(number) == self._stand_in:
                _set(number, handler)
            self._handlers.pop()
        if self in _waiting:
            _waiting.remove(self)

    def end_in_fork(self) -> None:
        """Set the handlers again where another thread has forked: the one that would do it is not there."""
        if self._thread != threading.get_ident():
            self._came.clear()
            self._set_again()


def _with_handlers() -> list[int]:
    """Return the signals whose handlers are to wait: those of Python."""
    # The handler that asyncio and uvloop set does nothing; they hear of signals in another way.
    return [
        number
        for number in _ALL
        if callable(handler := _get(number)) and not getattr(handler, "__name__", "").endswith("sighandler_noop")
    ]


@contextlib.contextmanager
def masked(how: int, signals: Iterable[int]) -> Iterator[None]:
    """Change the calling thread's mask of blocked signals for a while."""
    mask = signal.pthread_sigmask(how, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _begin_in_child() -> None:
    for each in reversed(tuple(_waiting)):
        each.end_in_fork()


os.register_at_fork(after_in_child=_begin_in_child)
