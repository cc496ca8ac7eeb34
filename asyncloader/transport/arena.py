"""One stretch of shared memory for the whole process: reserved in address space, filled where it is used.

    ┌──────────┬───────┬ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ┐
    │  region  │region │   cold: addresses without memory     │   a sparse file without a name (memfd)
    └──────────┴───────┴ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ┘

One arena instead of one file per batch: one descriptor, one mapping on each side, however many batches a trainer keeps.
A memfd is not bounded by /dev/shm (64 MB in Docker) and has no name that could be left behind after kill -9.

Memory of a region is reserved (`fallocate`) before the first byte is written: writing to a sparse file that cannot grow
is SIGBUS, reserving is an error that can be handled. It is given back by punching a hole.
"""

from __future__ import annotations

import atexit
import bisect
import contextlib
import ctypes
import errno
import mmap
import os
import sys
from multiprocessing.reduction import DupFd
from multiprocessing.shared_memory import SharedMemory
from typing import Any, Protocol

PAGE = mmap.PAGESIZE
_MAP_NORESERVE = 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value
_FALLOC_PUNCH_HOLE = 0x02 | 0x01  # with FALLOC_FL_KEEP_SIZE
_SMALLEST = 1 << 28  # an arena of less than 256 MiB is not worth having

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Arena(Protocol):
    """Shared memory of `size` bytes at `base`, mapped in this process."""

    base: int
    size: int

    def reserve(self, offset: int, length: int) -> bool:
        """Back a region with memory. False if there is none; any process may call it."""

    def punch(self, offset: int, length: int) -> bool:
        """Give the memory of a region back, its contents are lost. False if the platform cannot."""

    def close(self) -> None:
        """Unmap. Nothing may refer to the memory any more."""

    def ticket(self) -> Any:
        """What another process needs to map the same memory, picklable while a process is being launched."""


def create(size: int) -> Arena | None:
    """Make an arena of up to `size` bytes of address space, or None: no descriptor to be had, or no addresses."""
    kind: type[MemfdArena] | type[NamedArena] = MemfdArena if _has_memfd() else NamedArena
    while size >= _SMALLEST:
        with contextlib.suppress(OSError):
            return kind.create(size)
        size //= 2
    return None


def _has_memfd() -> bool:
    """Whether this platform has memfds, and no sandbox forbids them."""
    try:
        os.close(os.memfd_create("asyncloader"))
    except AttributeError:
        return False
    except OSError as error:
        return error.errno not in (errno.ENOSYS, errno.EPERM, errno.EACCES)
    return True


class MemfdArena:
    """An arena in a memfd (Linux)."""

    def __init__(self, fd: int, size: int) -> None:
        self._fd = fd
        self.size = size
        # mmap.mmap would keep a second descriptor (before Python 3.13 it cannot be told not to).
        self.base = _map(fd, size)

    @classmethod
    def create(cls, size: int) -> MemfdArena:
        """Make one in this process, which owns it."""
        fd = os.memfd_create("asyncloader", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, size)
            return cls(fd, size)
        except OSError:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: Any, size: int) -> MemfdArena:
        """Map that of another process."""
        descriptor = fd.detach()
        os.set_inheritable(descriptor, False)
        return cls(descriptor, size)

    def reserve(self, offset: int, length: int) -> bool:
        """See Arena."""
        return _reserve(self._fd, offset, length)

    def punch(self, offset: int, length: int) -> bool:
        """See Arena."""
        return _punch(self._fd, offset, length)

    def close(self) -> None:
        """See Arena."""
        _libc.munmap(self.base, self.size)
        os.close(self._fd)

    def ticket(self) -> Any:
        """See Arena."""
        return MemfdArena, (DupFd(self._fd), self.size)


class NamedArena:
    """An arena in named shared memory, for platforms without memfd. /dev/shm bounds it where there is one.

    The name is removed at exit; after kill -9 by multiprocessing's resource tracker.
    """

    def __init__(self, memory: SharedMemory, *, is_owner: bool) -> None:
        self._memory = memory
        self._owner = os.getpid() if is_owner else 0
        self.size = memory.size
        assert memory.buf is not None
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(memory.buf))
        if is_owner:
            atexit.register(self._unlink)

    @classmethod
    def create(cls, size: int) -> NamedArena:
        """Make one in this process, which owns it."""
        return cls(SharedMemory(create=True, size=size), is_owner=True)

    @classmethod
    def attach(cls, name: str) -> NamedArena:
        """Map that of another process."""
        return cls(SharedMemory(name), is_owner=False)

    def reserve(self, offset: int, length: int) -> bool:
        """See Arena. macOS cannot reserve; it does not send SIGBUS for want of memory either."""
        return sys.platform == "darwin" or _reserve(self._memory._fd, offset, length)  # type: ignore[attr-defined]

    def punch(self, offset: int, length: int) -> bool:
        """See Arena."""
        return sys.platform != "darwin" and _punch(self._memory._fd, offset, length)  # type: ignore[attr-defined]

    def close(self) -> None:
        """See Arena."""
        self._memory.close()
        self._unlink()

    def ticket(self) -> Any:
        """See Arena."""
        return NamedArena, (self._memory.name,)

    def _unlink(self) -> None:
        atexit.unregister(self._unlink)
        if self._owner == os.getpid():
            self._owner = 0
            with contextlib.suppress(FileNotFoundError):
                self._memory.unlink()


def _map(fd: int, size: int) -> int:
    base = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_NORESERVE, fd, 0)
    if base == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), "mmap of an arena")
    return int(base)


def _reserve(fd: int, offset: int, length: int) -> bool:
    while True:
        try:
            os.posix_fallocate(fd, offset, length)
        except InterruptedError:  # by a signal, and undone
            continue
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT):
                return False
            raise
        return True


def _punch(fd: int, offset: int, length: int) -> bool:
    fallocate = getattr(_libc, "fallocate", None)
    if fallocate is None:
        return False
    fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return bool(fallocate(fd, _FALLOC_PUNCH_HOLE, offset, length) == 0)


class Extents:
    """Cold addresses: a sorted list of (offset, length), neighbours merged. First fit."""

    def __init__(self, size: int) -> None:
        self._free = [(0, size)]

    def take(self, length: int) -> int | None:
        """Return the offset of `length` bytes, or None."""
        for i, (offset, there) in enumerate(self._free):
            if there >= length:
                self._free[i : i + 1] = [(offset + length, there - length)] if there > length else []
                return offset
        return None

    def give(self, offset: int, length: int) -> None:
        """Take back what was taken."""
        i = bisect.bisect(self._free, (offset, length))
        first, last = offset, offset + length
        before, after = i, i
        if i > 0 and sum(self._free[i - 1]) == first:
            before, first = i - 1, self._free[i - 1][0]
        if i < len(self._free) and self._free[i][0] == last:
            after, last = i + 1, sum(self._free[i])
        self._free[before:after] = [(first, last - first)]
