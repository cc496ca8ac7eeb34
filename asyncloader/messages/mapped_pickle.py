"""Pieces of bytes in one file in memory, for all workers of a machine: a pickle, and the buffers that it refers to.

    write_pickle ──> pickle │ buffer │ buffer ...  ──> open_mapped, in a worker: maps the file privately, unpickles

Imports little: a process that only writes or passes on such a file has no need of torch.
"""

from __future__ import annotations

import mmap
import os
import pickle
import tempfile
from typing import Any

_ALIGNMENT = 64


def open_mapped(fd: Any, sizes: list[int]) -> Any:
    """Unpickle what `write_pickle` has written, in a worker. The mapping stays as long as something in it is used.

    Args:
        fd: A descriptor on its way: its `detach` gives it.
        sizes: The sizes of the pieces in the file.
    """
    fd = fd.detach()
    mapping = mmap.mmap(fd, sum(map(_aligned, sizes)), flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    os.close(fd)
    parts, offset = [], 0
    for size in sizes:
        parts.append(memoryview(mapping)[offset : offset + size])
        offset += _aligned(size)
    return pickle.loads(parts[0], buffers=parts[1:])


def write_pickle(parts: list[Any]) -> tuple[int, list[int]]:
    """Write pieces of bytes into a file in memory; return its descriptor, and the size of each.

    Raises:
        OSError: if there is no room.
    """
    fd = _memory_file()
    try:
        for part in parts:
            _write_all(fd, memoryview(part).cast("B"))
            _write_all(fd, memoryview(bytes(_aligned(len(part)) - len(part))))
    except BaseException:
        os.close(fd)
        raise
    return fd, [len(part) for part in parts]


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _memory_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("asyncloader-dataset", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
