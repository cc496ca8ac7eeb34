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
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from asyncloader.log import log

_FOLDER = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
_O_PATH = getattr(os, "O_PATH", 0)


class OpenFile(NamedTuple):
    """A file that is open.

    Attributes:
        fd: Its descriptor.
        flags: Its access mode and status flags.
        offset: Where it is read next.
    """

    fd: int
    flags: int
    offset: int


def files_to_reopen() -> list[OpenFile]:
    """Return the regular files that are open for reading only, with their offsets of now: to be called at the fork."""
    found: list[OpenFile] = []
    for fd, status in _inherited():
        if stat.S_ISREG(status.st_mode):
            flags = fcntl.fcntl(fd, fcntl.F_GETFL)
            if flags & os.O_ACCMODE == os.O_RDONLY and not flags & _O_PATH:
                with contextlib.suppress(OSError):  # some files of the kernel's have no offset
                    found.append(OpenFile(fd, flags, os.lseek(fd, 0, os.SEEK_CUR)))
    return found


def reopen(files: Iterable[OpenFile]) -> None:
    """Give this process open file descriptions of its own; a file that cannot be opened again stays as it is.

    The link in /proc leads to the file itself, though it was renamed or deleted, or never had a name.
    """
    for fd, flags, offset in files:
        try:
            new = os.open(f"{_FOLDER}/{fd}", flags & ~os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.lseek(new, offset, os.SEEK_SET)
                os.dup2(new, fd, inheritable=os.get_inheritable(fd))
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
