"""A stretch of shared memory for the whole process: reserved in address space, filled where it is used.

    ┌──────────┬───────┬ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ┐
    │  region  │region │   cold: addresses without memory     │   a sparse file without a name
    └──────────┴───────┴ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ┘

The arena takes the place of a file per batch: one descriptor, one mapping on each side, however many batches a trainer
keeps. The file is a memfd, which /dev/shm (64 MB in Docker) does not bound, and which has no name that could be left
behind after kill -9. Where there are no memfds, as in some sandboxes, batches go through the channels.

Each process that makes batches has a heap of addresses of its own in it (:mod:`asyncloader.transport.heap`). Memory of
a region is reserved (`fallocate`) before the first byte is written: writing to a sparse file that cannot grow is
SIGBUS, reserving is an error that can be handled. Punching a hole gives memory back.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from multiprocessing.reduction import DupFd
from typing import Any

PAGE = mmap.PAGESIZE
_MAP_NORESERVE = 0x4000
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
        # A core dump would look at each page of these addresses, and the process would take minutes to die.
        _libc.madvise(self.base, size, mmap.MADV_DONTDUMP)

    def __reduce__(self) -> Any:
        return _attach, (DupFd(self._fd), self.size)

    def reserve(self, offset: int, length: int) -> bool:
        """Back a region with memory. False if there is none; any process may call it."""
        while True:
            try:
                os.posix_fallocate(self._fd, offset, length)
            except InterruptedError:  # by a signal, and undone
                continue
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT):
                    return False
                raise
            return True

    def reserved_bytes(self) -> int:
        """Return the memory that the file takes, whichever process has reserved it."""
        return os.fstat(self._fd).st_blocks * 512

    def punch(self, offset: int, length: int) -> bool:
        """Give the memory of a region back, its contents are lost. False where that cannot be, as in some sandboxes."""
        numbers = map(ctypes.c_int64, (offset, length))
        return bool(_libc.fallocate(self._fd, _FALLOC_PUNCH_HOLE, *numbers) == 0)

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
    fd = os.memfd_create("asyncloader", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size)
    except OSError:
        os.close(fd)
        raise
    return fd
