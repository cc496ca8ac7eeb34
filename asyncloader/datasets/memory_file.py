"""A file in memory without a name, which other processes of the machine can be given.

    creator   memfd ──> written ──> sealed: nobody can change it any more, the creator included
    fork      the child has it
    spawn     pickled as a handle: the descriptor at launch, /proc/<pid>/fd/<number> at any other time
    ranks     the same handle, through whatever carries a pickle (torch.distributed.broadcast_object_list)
    elsewhere by value, where whoever pickles says so (`by_value`): the memory itself, out of band, read where it lands

The kernel frees it with the last process that has it open, however that ends; there is no name to be left behind. The
kernel says who may open it: /proc/<pid>/fd is for processes of the same user. A random token in the file's
first bytes and in the handle tells a process id that was given to another process meanwhile.

Rejected: a name in /dev/shm (64 MB in Docker, left behind by kill -9), and a socket from which to fetch the descriptor
(multiprocessing's ``resource_sharer``: each pickle is good for one process, and a pickled dataset is read by many). A
process that unpickles a file twice has two descriptors of it, and its pages once.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import multiprocessing.context
import os
import pickle
import secrets
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator
from multiprocessing.reduction import DupFd
from typing import Any, Self

HEAD = 64
"""Bytes at the beginning of a file: the token, and room for what is in it to say where."""

_TOKEN_BYTES = 16
_HAS_PROC = sys.platform == "linux"
_SEALS = sum(getattr(fcntl, f"F_SEAL_{change}", 0) for change in ("SEAL", "SHRINK", "GROW", "WRITE"))


class MemoryFile:
    """A file that processes share, open in this one.

    Args:
        fd: Its descriptor, which belongs to this object from now on and is closed with it; -1 for memory that came by
            value.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._mapping: memoryview | None = None
        if fd >= 0:
            self._close_with_it()

    def _close_with_it(self) -> None:
        # os.close alone, which a garbage collection in any thread may call, and a forked child for its own copy.
        weakref.finalize(self, os.close, self.fd).atexit = False

    @classmethod
    def create(cls) -> Self:
        """Make a new one in memory, with room for the head."""
        made = cls(_memory_fd())
        write_at(made.fd, secrets.token_bytes(_TOKEN_BYTES).ljust(HEAD, b"\0"), 0)
        return made

    def seal(self) -> None:
        """Have the kernel refuse every change from now on, where it can."""
        with contextlib.suppress(OSError):  # a file that is no memfd
            fcntl.fcntl(self.fd, getattr(fcntl, "F_ADD_SEALS", 0), _SEALS)

    def map(self) -> memoryview:
        """Return the whole file, for reading. The mapping lives as long as something refers to it."""
        if self._mapping is None:
            options: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
            # Private: a sealed file cannot be mapped as shared; what nobody writes to is shared all the same.
            mapping = mmap.mmap(self.fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ, **options)
            self._mapping = memoryview(mapping)
        return self._mapping

    def __reduce__(self) -> Any:
        if is_by_value():
            return _from_value, (pickle.PickleBuffer(self.map()),)
        if self.fd < 0:  # it came by value, and goes on to a process of this machine
            self.fd = _memory_fd()
            self._close_with_it()
            write_at(self.fd, self.map(), 0)
        if multiprocessing.context.get_spawning_popen() is not None:
            return _inherit, (DupFd(self.fd),)
        if not _HAS_PROC:
            raise RuntimeError("shared memory can be passed to another process through inheritance only")
        return _open, (os.getpid(), self.fd, os.pread(self.fd, _TOKEN_BYTES, 0))


_asked = threading.local()


@contextlib.contextmanager
def by_value() -> Iterator[None]:
    """Have shared memory be pickled with its content, in this thread: for processes of other machines.

    In pickles of protocol 5 with a `buffer_callback`, as Ray's, the content is a buffer out of band, and is read where
    that lies after unpickling, without a copy.
    """
    _asked.by_value = True
    try:
        yield
    finally:
        _asked.by_value = False


def is_by_value() -> bool:
    """Whether what this thread pickles is for processes of other machines."""
    return getattr(_asked, "by_value", False)


def _from_value(content: Any) -> MemoryFile:
    made = MemoryFile(-1)
    made._mapping = memoryview(content).cast("B")
    return made


def _inherit(fd: Any) -> MemoryFile:
    descriptor = fd.detach()
    os.set_inheritable(descriptor, False)
    return MemoryFile(descriptor)


def _open(pid: int, number: int, token: bytes) -> MemoryFile:
    """Open the file by way of a process that has it open."""
    path = f"/proc/{pid}/fd/{number}"
    try:
        file = MemoryFile(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))  # it may be a pipe by now
        if os.pread(file.fd, _TOKEN_BYTES, 0) != token:
            raise FileNotFoundError(errno.ENOENT, "another file", path)
    except PermissionError as error:
        raise PermissionError(errno.EACCES, f"shared memory of process {pid}, which is another user's", path) from error
    except OSError as error:
        raise FileNotFoundError(
            errno.ENOENT,
            f"shared memory is not there: process {pid}, which pickled it, has ended, has let go of it, or runs in "
            "another container or on another machine",
            path,
        ) from error
    return file


def write_at(fd: int, data: Any, offset: int) -> None:
    """Write all of it.

    Raises:
        OSError: Memory is full.
    """
    rest = memoryview(data).cast("B")
    while rest:
        count = os.pwrite(fd, rest, offset)
        rest, offset = rest[count:], offset + count


def _memory_fd() -> int:
    if hasattr(os, "memfd_create"):
        with contextlib.suppress(OSError):  # a sandbox forbids it
            return os.memfd_create("asyncloader-shared", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
