"""A future that a consumer's thread waits for and the loop thread answers, whatever a Ctrl-C leaves undone.

``with`` on a lock of C is one instruction, behind which no handler of a signal runs; on a `threading.Condition`, as
`concurrent.futures.Future` has one, it is a function of Python. A handler that raises where this function returns
leaves the lock held for ever, and the loop thread, which takes it to answer, would stand still for all loaders.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from operator import attrgetter
from typing import TypeVar

T = TypeVar("T")


class _Condition(threading.Condition):
    """A condition that ``with`` takes by methods of C: those of its lock."""

    __enter__ = property(attrgetter("_lock.__enter__"))
    __exit__ = property(attrgetter("_lock.__exit__"))


class Answer(Future[T]):
    """A future whose lock is held by nobody who was interrupted."""

    def __init__(self) -> None:
        super().__init__()
        self._condition = _Condition()
