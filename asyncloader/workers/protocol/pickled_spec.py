"""What all workers of a loader need, pickled once: the dataset and the user's functions, under spawn and forkserver.

    parent:   pickle 5 ──> pickle | buffer | buffer ...   in one memfd (a temporary file elsewhere)
    workers:  map it privately, unpickle around the mapping: arrays stay where they are, shared until written to

So start-up does not grow with the number of workers times the size of the dataset.
"""

from __future__ import annotations

import contextlib
import copyreg
import io
import mmap
import os
import pickle
import sys
import tempfile
from collections import ChainMap
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any, Generic, TypeVar

import cloudpickle
import torch

T = TypeVar("T")

_ALIGNMENT = 64


class Parcel(Generic[T]):
    """One pickled object in a memory file. Made and closed by the parent, opened by workers.

    An object that can only be pickled while a process is launched (it holds a lock, queue or shared value of
    :mod:`multiprocessing`) is kept and pickled then, for each worker.
    """

    def __init__(self, content: T) -> None:
        """Pickle the content.

        Raises:
            Exception: whatever its pickling raises, if neither pickle nor cloudpickle can do it.
        """
        self._late: T | None = None
        self._fd = -1
        self._sizes: list[int] = []
        try:
            data, buffers = _pickle(content)
        except RuntimeError as error:
            if "inheritance" not in str(error):
                raise
            self._late = content
            return
        self._fd, self._sizes = _write([data, *(buffer.raw() for buffer in buffers)])

    def close(self) -> None:
        """Let go of the memory; workers that have opened it keep theirs."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._late = None

    def __reduce__(self) -> Any:
        if self._late is not None:
            data, buffers = _pickle(self._late, ForkingPickler._extra_reducers)  # type: ignore[attr-defined]
            return _Late, (data, [bytes(buffer.raw()) for buffer in buffers])
        return _Opener, (DupFd(self._fd), self._sizes)


class _Opener:
    """The parcel as a worker gets it."""

    def __init__(self, fd: Any, sizes: list[int]) -> None:
        self._fd = fd
        self._sizes = sizes

    def open(self) -> Any:
        """Unpickle. The mapping stays as long as something in it is used."""
        fd = self._fd.detach()
        total = sum(map(_aligned, self._sizes))
        mapping = memoryview(mmap.mmap(fd, total, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE))
        os.close(fd)
        parts, offset = [], 0
        for size in self._sizes:
            parts.append(mapping[offset : offset + size])
            offset += _aligned(size)
        return pickle.loads(parts[0], buffers=parts[1:])


class _Late:
    """A parcel that was pickled at launch."""

    def __init__(self, data: bytes, buffers: list[bytes]) -> None:
        self._data = data
        self._buffers = buffers

    def open(self) -> Any:
        """Unpickle."""
        return pickle.loads(self._data, buffers=[bytearray(buffer) for buffer in self._buffers])


class _Pickler(pickle.Pickler):
    is_late = False

    def reducer_override(self, obj: Any) -> Any:
        return _reduce_tensor(obj, self.is_late)


class _CloudPickler(cloudpickle.Pickler):  # type: ignore[misc]
    is_late = False

    def reducer_override(self, obj: Any) -> Any:
        reduced = _reduce_tensor(obj, self.is_late)
        return super().reducer_override(obj) if reduced is NotImplemented else reduced


def _reduce_tensor(obj: Any, is_late: bool) -> Any:
    """Pickle a plain tensor that has its memory to itself as an array, which travels out of band.

    A tensor in shared memory stays shared with the trainer: torch passes its descriptor on, at launch.
    """
    if not isinstance(obj, torch.Tensor) or obj.device.type != "cpu" or obj.layout != torch.strided:
        return NotImplemented
    if obj.is_shared():  # type: ignore[no-untyped-call]
        if is_late:
            return NotImplemented
        raise RuntimeError("shared tensors are passed on through inheritance")
    if type(obj) is not torch.Tensor or obj.requires_grad:
        return NotImplemented
    if not obj.is_contiguous() or obj.untyped_storage().nbytes() != obj.nbytes:
        return NotImplemented
    try:
        return torch.from_numpy, (obj.numpy(),)
    except (TypeError, RuntimeError):  # a dtype that numpy does not have, a conjugate view
        return NotImplemented


def _pickle(content: Any, reducers: Any = None) -> tuple[bytes, list[pickle.PickleBuffer]]:
    """Pickle by reference where a worker can import what is referred to, else by value.

    Args:
        content: What to pickle.
        reducers: multiprocessing's own, which only work while a process is launched.
    """
    if _main_is_importable():
        with contextlib.suppress(pickle.PicklingError, AttributeError, TypeError):
            return _dump(_Pickler, content, reducers)
    return _dump(_CloudPickler, content, reducers)


def _dump(pickler: Any, content: Any, reducers: Any) -> tuple[bytes, list[pickle.PickleBuffer]]:
    file = io.BytesIO()
    buffers: list[pickle.PickleBuffer] = []
    made = pickler(file, protocol=5, buffer_callback=buffers.append)
    if reducers is not None:
        made.is_late = True
        made.dispatch_table = ChainMap(reducers, getattr(made, "dispatch_table", copyreg.dispatch_table))
    made.dump(content)
    return file.getvalue(), buffers


def _main_is_importable() -> bool:
    """Whether a spawned process imports the main module again; it cannot in a notebook or after ``python -c``."""
    main = sys.modules["__main__"]
    return getattr(main, "__spec__", None) is not None or os.path.isfile(getattr(main, "__file__", None) or "")


def _write(parts: list[Any]) -> tuple[int, list[int]]:
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
