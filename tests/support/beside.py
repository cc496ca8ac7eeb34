"""Tests beside one another in several processes (pytest-xdist), and those that have to be alone.

A test marked `alone` is about time, or about how busy the machine is. It begins when the tests of the other processes
have ended theirs, and they wait for its end. Locks on two bytes of a file do that. Whoever comes passes the door first:

    byte 0   the door     held while one waits for the room: who wants it alone is not overtaken by those who come later
    byte 1   the room     shared by tests; exclusive to one that is alone

They are record locks (fcntl), which belong to a process: workers that a test forks do not hold them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator

DOOR, ROOM = 0, 1


class Room:
    """Where the tests of one run, in however many processes, meet.

    Args:
        path: A file that the processes have in common, and that stays until all have ended; None: there is one process.
    """

    def __init__(self, path: str | None) -> None:
        self._fd = None if path is None else os.open(path, os.O_RDWR | os.O_CLOEXEC)

    @contextlib.contextmanager
    def entered(self, *, alone: bool) -> Iterator[None]:
        """Be in the room, with others or not."""
        if self._fd is None:
            yield
            return
        fcntl.lockf(self._fd, fcntl.LOCK_EX, 1, DOOR)
        fcntl.lockf(self._fd, fcntl.LOCK_EX if alone else fcntl.LOCK_SH, 1, ROOM)
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, DOOR)
        try:
            yield
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, ROOM)
