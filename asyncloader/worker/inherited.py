"""Files that a forked worker has from the trainer, each with an offset of its own.

A file that the dataset has opened has one offset in the kernel, which the trainer and all forked workers share: the
worker that seeks moves it for the worker that is about to read, and samples are wrong without an error. So a worker
opens each file that is open for reading only once more, at the same offset, under the same descriptor. Whoever uses the
descriptor (Python, a C library) does not notice. A file that is open for writing is left alone: several writers at one
offset, as in a log, append; at offsets of their own they would overwrite each other.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from asyncloader.log import log

_FOLDER = "/proc/self/fd"

_MOST_ALIKE = 16
"""A copy is looked for among so many descriptors of its file: a thousand mapped arrays of one file have one each."""


class OpenFile(NamedTuple):
    """A file that is open.

    Attributes:
        fd: Its descriptor.
        flags: Its access mode and status flags.
        offset: Where it is read next.
        first: The first of the descriptors that share the offset: the descriptor itself, unless that is a copy.
    """

    fd: int
    flags: int
    offset: int
    first: int


def files_to_reopen() -> list[OpenFile]:
    """Return the regular files that are open for reading only, with their offsets of now: to be called at the fork."""
    found: list[OpenFile] = []
    by_file: dict[tuple[int, int], deque[int]] = {}
    for fd, status in _inherited():
        if stat.S_ISREG(status.st_mode):
            flags = fcntl.fcntl(fd, fcntl.F_GETFL)
            if flags & os.O_ACCMODE == os.O_RDONLY and not flags & os.O_PATH:
                with contextlib.suppress(OSError):  # some files of the kernel's have no offset
                    offset = os.lseek(fd, 0, os.SEEK_CUR)
                    alike = by_file.setdefault((status.st_dev, status.st_ino), deque(maxlen=_MOST_ALIKE))
                    found.append(OpenFile(fd, flags, offset, next((each for each in alike if _is_copy(fd, each)), fd)))
                    alike.append(fd)
    return found


def _is_copy(fd: int, other: int) -> bool:
    """Whether one descriptor is a copy (``os.dup``) of another: then the owner of the one is the owner of the other.

    The kernel sends signals to owners, but none about regular files. Other workers ask at the same time, each with its
    own pid, and may come in between.
    """
    pid = os.getpid()
    with contextlib.suppress(OSError):
        while True:
            fcntl.fcntl(fd, fcntl.F_SETOWN, pid)
            owner = fcntl.fcntl(other, fcntl.F_GETOWN)
            if pid in (owner, fcntl.fcntl(fd, fcntl.F_GETOWN)):
                fcntl.fcntl(fd, fcntl.F_SETOWN, 0)
                return owner == pid
    return False


def reopen(files: Iterable[OpenFile]) -> None:
    """Give this process open file descriptions of its own; a file that cannot be opened again stays as it is.

    The link in /proc leads to the file itself, though it was renamed or deleted, or never had a name.
    """
    for fd, flags, offset, first in files:
        try:
            inheritable = os.get_inheritable(fd)
            if first != fd:
                os.dup2(first, fd, inheritable)
                continue
            new = os.open(f"{_FOLDER}/{fd}", flags & ~os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.lseek(new, offset, os.SEEK_SET)
                os.dup2(new, fd, inheritable)
            finally:
                os.close(new)
        except OSError as error:
            words = "Worker with pid %d shares the offset of descriptor %d, whose file cannot be opened again: %s"
            log.debug(words, os.getpid(), fd, error)


def _inherited() -> Iterator[tuple[int, os.stat_result]]:
    """Return the descriptors of this process, and what they are of. None where /proc is not mounted."""
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = os.listdir(_FOLDER)
    for name in names:
        with contextlib.suppress(OSError):  # the descriptor of the folder itself
            fd = int(name)
            yield fd, os.fstat(fd)
