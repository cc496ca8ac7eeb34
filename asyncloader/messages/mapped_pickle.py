"""Pieces of bytes in one file in memory, for all workers of a machine: a pickle, and the buffers that it refers to.

    write_pickle ──> pickle │ buffer │ buffer ...  ──> open_mapped, in a worker: maps the file privately, unpickles

Imports little: a process that only writes or passes on such a file has no need of torch.
"""

from __future__ import annotations

import mmap
import os
import pickle
from collections.abc import Sequence
from typing import Any

_ALIGNMENT = 64


class InheritedFd:
    """A descriptor that something in a pickle refers to, by its number among those that come with the pickle.

    Attributes:
        given: What this process has come by.
    """

    given: Sequence[Any] = ()

    def __init__(self, number: int) -> None:
        self._number = number

    def detach(self) -> int:
        """Return it, once."""
        fd: int = self.given[self._number].detach()
        return fd


def open_mapped(fds: Sequence[Any], sizes: list[int]) -> Any:
    """Unpickle what `write_pickle` has written, in a worker. The mapping stays as long as something in it is used.

    Args:
        fds: Descriptors on their way, whose `detach` gives them: what is in the pickle refers to, and the file.
        sizes: The sizes of the pieces in the file.
    """
    InheritedFd.given, fd = fds, fds[-1].detach()
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
    fd = os.memfd_create("asyncloader-dataset", os.MFD_CLOEXEC)
    try:
        with open(fd, "wb", closefd=False) as file:
            for part in parts:
                file.write(part)
                file.write(bytes(_aligned(len(part)) - len(part)))
    except BaseException:
        os.close(fd)
        raise
    return fd, [len(part) for part in parts]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
