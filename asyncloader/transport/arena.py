"""A stretch of shared memory for the whole process: reserved in address space, filled where it is used.

    ┌──────────┬───────┬ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ┐
    │  region  │region │   cold: addresses without memory     │   a sparse file without a name
    └──────────┴───────┴ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ┘

The arena takes the place of a file per batch: one descriptor, one mapping on each side, however many batches a trainer
keeps. The file is a memfd, which /dev/shm (64 MB in Docker) does not bound. Where there are no memfds it is POSIX
shared memory, whose name is removed at once. So in neither case a name is left behind after kill -9.

Each process that makes batches has a heap of addresses of its own in it (:mod:`asyncloader.transport.heap`). Memory of
a region is reserved (`fallocate`) before the first byte is written: writing to a sparse file that cannot grow is
SIGBUS, reserving is an error that can be handled. Punching a hole gives memory back.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import errno
import mmap
import os
import sys
from collections.abc import Iterable
from multiprocessing.reduction import DupFd
from multiprocessing.shared_memory import SharedMemory
from typing import Any

PAGE = mmap.PAGESIZE
_IS_DARWIN = sys.platform == "darwin"
_MAP_NORESERVE = 0 if _IS_DARWIN else 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value
_FALLOC_PUNCH_HOLE = 0x02 | 0x01  # with FALLOC_FL_KEEP_SIZE
_SMALLEST = 1 << 28  # an arena of less than 256 MiB is not worth having

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


_exporters: dict[int, Any] = {}  # types, by the length of the number of bytes


def exporter_at(address: int, nbytes: int) -> Any:
    """Return an object that exports the memory there, as the buffer protocol has it, and can be weakly referred to.

    All tensors, arrays and views of the memory refer to this object. Its type is the ctypes array of the next power of
    two, since ctypes never frees array types; so it exports more than `nbytes`.
    """
    bits = nbytes.bit_length()
    kind = _exporters.get(bits)
    if kind is None:
        kind = _exporters[bits] = ctypes.c_ubyte * (1 << bits)
    return kind.from_address(address)


def create(size: int) -> Arena | None:
    """Make an arena of up to `size` bytes of address space, or None: no descriptor to be had, or no addresses."""
    while size >= _SMALLEST:
        with contextlib.suppress(OSError):
            return Arena(_nameless_file(size), size)
        size //= 2
    return None


class Arena:
    """Shared memory, mapped in this process. Pickled while a worker is launched, it is mapped by the worker too.

    Args:
        fd: The file; the arena closes it.
        size: Bytes of the file.

    Attributes:
        base: The address of the first byte.

    Raises:
        OSError: if there are not so many addresses; the file is closed.
    """

    def __init__(self, fd: int, size: int) -> None:
        self._fd = fd
        self.size = size
        # mmap.mmap would keep a second descriptor (before Python 3.13 it cannot be told not to).
        base = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_NORESERVE, fd, 0)
        if base == _MAP_FAILED:
            code = ctypes.get_errno()
            os.close(fd)
            raise OSError(code, "mmap of an arena")
        self.base: int = int(base)
        if hasattr(mmap, "MADV_DONTDUMP"):
            # A core dump would look at each page of these addresses, and the process would take minutes to die.
            _libc.madvise(self.base, size, mmap.MADV_DONTDUMP)

    def __reduce__(self) -> Any:
        return _attach, (DupFd(self._fd), self.size)

    def reserve(self, offset: int, length: int) -> bool:
        """Back a region with memory. False if there is none; any process may call it.

        macOS cannot reserve, and does not send SIGBUS for want of memory either.
        """
        while not _IS_DARWIN:
            try:
                os.posix_fallocate(self._fd, offset, length)
            except InterruptedError:  # by a signal, and undone
                continue
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT):
                    return False
                raise
            break
        return True

    def reserved_bytes(self) -> int:
        """Return the memory that the file takes, whichever process has reserved it."""
        return os.fstat(self._fd).st_blocks * 512

    def punch(self, offset: int, length: int) -> bool:
        """Give the memory of a region back, its contents are lost. False if the platform cannot."""
        fallocate = getattr(_libc, "fallocate", None)
        if fallocate is None:
            return False
        fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
        return bool(fallocate(self._fd, _FALLOC_PUNCH_HOLE, offset, length) == 0)

    def close(self) -> None:
        """Unmap. Nothing may refer to the memory any more."""
        _libc.munmap(self.base, self.size)
        os.close(self._fd)


def _attach(fd: Any, size: int) -> Arena | None:
    """Map the arena of another process; None if that cannot be done."""
    try:
        descriptor = fd.detach()
        os.set_inheritable(descriptor, False)
        return Arena(descriptor, size)
    except OSError:
        return None


def _nameless_file(size: int) -> int:
    """Open a sparse file in memory that has no name."""
    try:
        fd = os.memfd_create("asyncloader", os.MFD_CLOEXEC)
    except (AttributeError, OSError) as error:
        if getattr(error, "errno", errno.ENOSYS) not in (errno.ENOSYS, errno.EPERM, errno.EACCES):
            raise
        # This platform has no memfds, or a sandbox forbids them.
        memory = SharedMemory(create=True, size=size)
        try:
            memory.unlink()
            return os.dup(memory._fd)  # type: ignore[attr-defined]
        finally:
            memory.close()
    try:
        os.ftruncate(fd, size)
    except OSError:
        os.close(fd)
        raise
    return fd


class Extents:
    """Cold addresses: a sorted list of (offset, length), neighbours merged. First fit."""

    def __init__(self, free: Iterable[tuple[int, int]] = ()) -> None:
        self._free = list(free)

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
