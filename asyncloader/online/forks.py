"""Forks: what a fork of the process does not have, and how a feed sees that it is in one."""

from __future__ import annotations

import os
import weakref
from typing import Protocol, TypeVar


class Closes(Protocol):
    """Something with a descriptor of the system: a socket, or a file without a buffer."""

    def close(self) -> None:
        """Close it."""


C = TypeVar("C", bound=Closes)
_of_this_process: weakref.WeakSet[Closes] = weakref.WeakSet()
_ancestors = 0  # of this process, back to the one that has imported this module


def keep_from_forks(descriptor: C) -> C:
    """Return a socket, or file, that forks of this process will not have.

    Otherwise a fork would hold it when this process has ended: the other side of a socket would not see its end, and
    the lock of a file would go on.
    """
    _of_this_process.add(descriptor)
    return descriptor


def generation() -> int:
    """Return a number that is another one in forks of this process. In place of os.getpid, which asks the system."""
    return _ancestors


def _begin_in_child() -> None:
    global _ancestors
    _ancestors += 1
    for descriptor in tuple(_of_this_process):
        descriptor.close()
    _of_this_process.clear()


os.register_at_fork(after_in_child=_begin_in_child)
