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
(multiprocessing's ``resource_sharer``: each pickle is good for one process, and a pickled dataset is read by many).
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
from typing import Any, ClassVar, Self

HEAD = 64
"""Bytes at the beginning of a file that say what it is: 8 for the kind, 16 for the token, the rest for the kind."""

_KIND = slice(0, 8)
_TOKEN = slice(8, 24)
_HAS_PROC = sys.platform == "linux"
_PROC = "/proc/"
_SEALS = sum(getattr(fcntl, f"F_SEAL_{change}", 0) for change in ("SEAL", "SHRINK", "GROW", "WRITE"))


class MemoryFile:
    """A file that processes share, open in this one; whoever asks for the same file here gets the same object.

    Args:
        fd: Its descriptor, which belongs to this object from now on and is closed with it; -1 for memory that came by
            value.
        token: Bytes that tell this file from all others.
        path: Where it is, if it has a name.
    """

    _known: ClassVar[weakref.WeakValueDictionary[bytes, MemoryFile]] = weakref.WeakValueDictionary()

    def __init__(self, fd: int, token: bytes, path: str | None = None) -> None:
        self.fd = fd
        self.token = token
        self.path = path
        self._mapping: memoryview | None = None
        if fd >= 0:
            self._close_with_it()

    def _close_with_it(self) -> None:
        # os.close alone, which a garbage collection in any thread may call, and a forked child for its own copy.
        weakref.finalize(self, os.close, self.fd).atexit = False

    @classmethod
    def create(cls, kind: bytes) -> Self:
        """Make a new one, with room for the head.

        Args:
            kind: 8 bytes that name the kind of content.
        """
        fd = _memory_fd()
        try:
            token = secrets.token_bytes(16)
            write_at(fd, (kind + token).ljust(HEAD, b"\0"), 0)
        except BaseException:
            os.close(fd)
            raise
        made = cls(fd, token)
        cls._known[token] = made
        return made

    @classmethod
    def open(cls, path: str, kind: bytes, token: bytes | None = None) -> Self:
        """Open one by its path: to write as well, where that is allowed.

        Raises:
            ValueError: The file is something else, or has another token.
        """
        mode = os.O_RDWR if os.access(path, os.W_OK) else os.O_RDONLY
        fd = os.open(path, mode | os.O_CLOEXEC | os.O_NONBLOCK)  # what is in its place may be a pipe
        try:
            head = os.pread(fd, HEAD, 0)
            if len(head) < HEAD or head[_KIND] != kind or token not in (None, head[_TOKEN]):
                raise ValueError(f"{path} is not the file that was expected")
        except BaseException:
            os.close(fd)
            raise
        return cls._admit(fd, head[_TOKEN], path)

    @classmethod
    def _admit(cls, fd: int, token: bytes, path: str | None = None) -> Self:
        """Take a descriptor, unless the file is known already.

        Two threads that open a file at the same moment have two objects of it, which does no harm.
        """
        if (known := cls._known.get(token)) is not None:
            os.close(fd)
            return known  # type: ignore[return-value]
        made = cls(fd, token, None if path is None or path.startswith(_PROC) else path)
        cls._known[token] = made
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
            return _from_value, (self.token, pickle.PickleBuffer(self.map()))
        if self.fd < 0:  # it came by value, and goes on to a process of this machine
            self.fd = _memory_fd()
            self._close_with_it()
            write_at(self.fd, self.map(), 0)
        if self.path is None and multiprocessing.context.get_spawning_popen() is not None:
            return _inherit, (self.token, DupFd(self.fd))
        if self.path is None and not _HAS_PROC:
            raise RuntimeError("shared memory can be passed to another process through inheritance only")
        path = self.path or f"{_PROC}{os.getpid()}/fd/{self.fd}"
        return _open, (path, os.pread(self.fd, 8, 0), self.token)


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


def _from_value(token: bytes, content: Any) -> MemoryFile:
    if (known := MemoryFile._known.get(token)) is not None:
        return known
    made = MemoryFile._known[token] = MemoryFile(-1, token)
    made._mapping = memoryview(content).cast("B")
    return made


def _open(path: str, kind: bytes, token: bytes) -> MemoryFile:
    """Open the file by its name, or by way of a process that has it open."""
    if (known := MemoryFile._known.get(token)) is not None:
        return known
    try:
        return MemoryFile.open(path, kind, token)
    except (OSError, ValueError) as error:
        if not path.startswith(_PROC):
            raise
        process = path.split("/")[2]
        if isinstance(error, PermissionError):
            why = f"shared memory of process {process}, which is another user's"
            raise PermissionError(errno.EACCES, why, path) from error
        raise FileNotFoundError(
            errno.ENOENT,
            f"shared memory is not there: process {process}, which pickled it, has ended, has let go of it, or runs in "
            "another container or on another machine",
            path,
        ) from error


def _inherit(token: bytes, fd: Any) -> MemoryFile:
    descriptor = fd.detach()
    os.set_inheritable(descriptor, False)
    return MemoryFile._admit(descriptor, token)


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
