"""Forks: what a fork of the process does not have, and how a feed sees that it is in one."""

from __future__ import annotations

import os
import weakref
from socket import socket

_of_this_process: weakref.WeakSet[socket] = weakref.WeakSet()
_ancestors = 0  # of this process, back to the one that has imported this module


def keep_from_forks(sock: socket) -> socket:
    """Return a socket that forks of this process will not have: otherwise the other side would not see its end."""
    _of_this_process.add(sock)
    return sock


def generation() -> int:
    """Return a number that is another one in forks of this process. In place of os.getpid, which asks the system."""
    return _ancestors


def _begin_in_child() -> None:
    global _ancestors
    _ancestors += 1
    for sock in tuple(_of_this_process):
        sock.close()
    _of_this_process.clear()


os.register_at_fork(after_in_child=_begin_in_child)
