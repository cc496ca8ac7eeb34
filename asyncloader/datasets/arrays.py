"""Samples that are rows of arrays: in memory, or in files that are mapped."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from asyncloader.datasets.retry import FetchError
from asyncloader.errors import ConfigurationError


class ArrayDataset(Dataset[tuple[torch.Tensor, ...]]):
    """Serve rows of numpy arrays, as torch's TensorDataset does those of tensors.

    A sample is a tuple with a row of each array, as tensors that are copies and may be written to. The rows of a batch
    are gathered from each array at once.

    Arrays that are mapped from files (:class:`numpy.memmap`, ``numpy.load(path, mmap_mode="r")``) go to spawned workers
    by their path, and are read where they are touched; the pages are shared by all processes. If another file has taken
    that path since the dataset was made, such workers raise :class:`FetchError`, since the trainer and forked workers
    still have the old one. Plain arrays are in memory once as well: forked workers have the parent's, and asyncloader's
    loader shares one copy with the others.

    Args:
        arrays: The arrays, at least one, all of equal length.

    Raises:
        ConfigurationError: No array was given, an array has no rows, lengths differ, or torch lacks a dtype.

    Example:
        >>> dataset = ArrayDataset(np.arange(6).reshape(3, 2), np.array([0.5, 1.5, 2.5]))
        >>> dataset[1]
        (tensor([2, 3]), tensor(1.5000, dtype=torch.float64))
    """

    seeds_samples = True

    def __init__(self, *arrays: NDArray[Any]) -> None:
        _check(arrays)
        self.arrays = arrays
        self._files = tuple(map(_file_of, arrays))

    def __len__(self) -> int:
        return len(self.arrays[0])

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        """Return one row of each array."""
        return tuple(torch.from_numpy(np.array(array[index])) for array in self.arrays)

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[torch.Tensor, ...]]:
        """Return the rows of a batch."""
        rows = np.asarray(indices)
        if rows.ndim != 1 or rows.dtype.kind not in "iu":  # keys of other kinds mean what they mean for one sample
            return [self[index] for index in indices]
        gathered = [torch.from_numpy(np.asarray(array[rows])).unbind() for array in self.arrays]
        return list(zip(*gathered, strict=True))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "arrays": tuple(map(_on_its_way, self.arrays, self._files)), "_files": ()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        arrays = (array.open() if isinstance(array, Mapped) else array for array in state["arrays"])
        self.__dict__.update(state, arrays=tuple(arrays))
        self._files = tuple(map(_file_of, self.arrays))


class Mapped(NamedTuple):
    """Where in which file an array is, and how its items lie there."""

    path: str
    dtype: np.dtype[Any]
    offset: int
    shape: tuple[int, ...]
    file: tuple[Any, ...]

    def open(self) -> NDArray[Any]:
        """Map it again.

        Raises:
            FetchError: Another file has taken this path, as far as this process sees the same files as the first one.
        """
        now = _identity(self.path)
        if now != self.file and now[0] == self.file[0]:
            raise FetchError(
                f"{self.path}: another file has taken the place of the one that this dataset has mapped, which the "
                "trainer still reads; make the dataset anew, and write new files under new names"
            )
        return np.memmap(self.path, self.dtype, "r", self.offset, self.shape)


def _file_of(array: Any) -> tuple[Any, ...] | None:
    """Return which file an array is mapped from; None for one in memory, with changes of its own, or of no name."""
    if isinstance(array, np.memmap) and array.mode != "c" and array.filename and array.size:
        with contextlib.suppress(FileNotFoundError):
            return _identity(array.filename)
    return None


def _identity(path: Any) -> tuple[Any, ...]:
    """Return which file is at a path, behind who sees it there: the machine, and the mounts of this process.

    An inode stays that of a file as long as a process has it mapped.
    """
    try:
        seen_by = Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/mnt")
    except OSError:
        seen_by = "", ""
    status = os.stat(path)
    return seen_by, status.st_dev, status.st_ino


def _on_its_way(array: Any, file: tuple[Any, ...] | None) -> Any:
    """Return what is pickled of an array: its place in a file, if it has one that it can be mapped from again.

    The offset is that of the first item. numpy's own is that of the array that this one was cut from.
    """
    if file is None or not array.flags.c_contiguous:
        return np.asarray(array)
    begin = np.frombuffer(
        array._mmap, np.uint8
    ).ctypes.data  # of the page that the first array of this mapping begins in
    offset = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY + array.ctypes.data - begin
    return Mapped(os.path.abspath(array.filename), array.dtype, offset, array.shape, file)


def _check(arrays: Sequence[Any]) -> None:
    if not arrays:
        raise ConfigurationError("ArrayDataset needs at least one array")
    for array in arrays:
        if not isinstance(array, np.ndarray) or not array.ndim:
            raise ConfigurationError(f"ArrayDataset takes numpy arrays with rows, but got {type(array).__name__}")
        if isinstance(array, np.ma.MaskedArray):
            raise ConfigurationError("tensors have no mask, and would show what is behind it: give array.filled(...)")
        try:
            torch.from_numpy(np.empty(0, array.dtype))
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"torch has no tensors of {array.dtype}: {error}") from error
    lengths = {len(array) for array in arrays}
    if len(lengths) > 1:
        raise ConfigurationError(f"the arrays of an ArrayDataset are of one length, but got {sorted(lengths)}")
