"""The spec of all workers of a loader, pickled once: the dataset and the user's functions, under spawn and forkserver.

    parent:   pickle 5 ──> pickle | buffer | buffer ...   in one memfd (a temporary file where there is none)
    workers:  map it privately, unpickle around the mapping: arrays stay where they are, shared until written to

So start-up does not grow with the number of workers times the size of the dataset.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import io
import os
import pickle
import sys
import types
from collections.abc import Callable, Mapping
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any, Generic, TypeVar

import cloudpickle
import numpy as np
import torch
from numpy.typing import NDArray

from asyncloader.errors import ConfigurationError
from asyncloader.messages.mapped_pickle import open_mapped, write_pickle

T = TypeVar("T")

_AT_LAUNCH = "this is shared between processes through inheritance only"
"""As multiprocessing says it of its own objects: they are pickled while a process is launched."""


class PickledSpec(Generic[T]):
    """An object that is pickled once into a memory file. Made and closed by the parent; workers get what unpickles it.

    An object that can only be pickled while a process is launched (it holds a lock, queue or shared value of
    :mod:`multiprocessing`, or what the user has registered a reducer with ForkingPickler for) is kept and pickled then,
    for each worker.
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
            if not _works_at_launch(error):
                raise
            self._late = content
            return
        self._fd, self._sizes = write_pickle([data, *(buffer.raw() for buffer in buffers)])

    def close(self) -> None:
        """Let go of the memory; workers that have opened it keep theirs."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._late = None

    def __reduce__(self) -> Any:
        if self._late is not None:
            data, buffers = _pickle(self._late, _registered())
            return functools.partial, (_open_late, data, [bytes(buffer.raw()) for buffer in buffers])
        return functools.partial, (open_mapped, DupFd(self._fd), self._sizes)


def _open_late(data: bytes, buffers: list[bytes]) -> Any:
    """Unpickle what was pickled at launch."""
    return pickle.loads(data, buffers=[bytearray(buffer) for buffer in buffers])


def _works_at_launch(error: Exception) -> bool:
    """Whether an object could not be pickled only because no process is being launched, in multiprocessing's words."""
    return isinstance(error, RuntimeError) and "inheritance" in str(error)


Table = Mapping[type, Any]


def _pickler(base: Any, usual: Table) -> Any:
    """Return a pickler that has large buffers outside of its pickle.

    Args:
        base: Pickles by reference, or by value.
        usual: Its reducers.
    """

    class Pickler(base):  # type: ignore[misc]
        """See above; ``reducers`` are multiprocessing's own, which only work while a process is launched."""

        def __init__(self, file: io.BytesIO, collect: Callable[[Any], Any], reducers: Table | None) -> None:
            self._is_launching = reducers is not None
            self._reducers = {**usual, **reducers} if reducers else usual
            super().__init__(file, 5, buffer_callback=collect)

        @property
        def dispatch_table(self) -> Any:
            # The C code asks for it as it begins. An attribute would be hidden behind that of cloudpickle's class.
            return self._reducers

        def reducer_override(self, obj: Any) -> Any:
            reduced = _reduce(obj, self._is_launching)
            if reduced is NotImplemented and base is cloudpickle.Pickler:
                return super().reducer_override(obj)
            return reduced

    return Pickler


_by_reference = _pickler(pickle.Pickler, copyreg.dispatch_table)
_by_value = _pickler(cloudpickle.Pickler, cloudpickle.Pickler.dispatch_table)


def _registered() -> Table:
    """Reducers that multiprocessing pickles with what it hands to a process: its own, torch's, the user's."""
    return ForkingPickler._extra_reducers  # type: ignore[attr-defined,no-any-return]


_ANY_TIME = (types.MethodType, type(list.append), type(int.__add__), functools.partial)
"""What multiprocessing has reducers for that do not need a process: pickle has its own for them."""


def _reduce(obj: Any, is_launching: bool) -> Any:
    """Reduce what is not pickled as ever; find out what has to wait until a process is launched.

    Memory that is shared stays shared with the trainer: torch passes its descriptor on, at launch. Other objects that
    torch has reducers for can be sent at any time.
    """
    if isinstance(obj, torch.Tensor):
        return _reduce_tensor(obj, is_launching)
    if type(obj) is torch.UntypedStorage and obj.device.type == "cpu" and not obj.is_shared():
        return _storage, (torch.empty(0, dtype=torch.uint8).set_(obj).numpy(),)
    if is_launching:
        return NotImplemented
    if isinstance(obj, (torch.UntypedStorage, torch.TypedStorage)):
        untyped = obj._untyped_storage if isinstance(obj, torch.TypedStorage) else obj  # the typed one's method warns
        if untyped.is_shared():
            raise RuntimeError(_AT_LAUNCH)
    elif type(obj) in _registered() and not isinstance(obj, _ANY_TIME):
        raise RuntimeError(_AT_LAUNCH)
    return NotImplemented


def _storage(array: NDArray[np.uint8]) -> torch.UntypedStorage:
    """Make a storage of its bytes; the pickle of torch's own reduction cannot be unpickled (torch 2.13)."""
    return torch.from_numpy(array).untyped_storage()


def _reduce_tensor(tensor: torch.Tensor, is_launching: bool) -> Any:
    """Pickle a plain tensor that has its memory to itself as an array, which travels out of band."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return NotImplemented
    if tensor._is_zerotensor():  # zeros without memory, which torch refuses to pickle
        return _reduce_tensor(tensor.clone(), is_launching)
    if tensor.is_shared():  # type: ignore[no-untyped-call]
        if is_launching:
            return NotImplemented
        raise RuntimeError(_AT_LAUNCH)
    if type(tensor) is not torch.Tensor or tensor.requires_grad:
        return NotImplemented
    if not tensor.is_contiguous() or tensor.untyped_storage().nbytes() != tensor.nbytes:
        return NotImplemented
    try:
        return torch.from_numpy, (tensor.numpy(),)
    except (TypeError, RuntimeError):  # a dtype that numpy does not have, a conjugate view
        return NotImplemented


def _pickle(content: Any, reducers: Table | None = None) -> tuple[bytes, list[pickle.PickleBuffer]]:
    """Pickle by reference where a worker can import what is referred to, otherwise by value."""
    if _main_is_importable():
        # The process that is being launched notes down what descriptors it is to be given, and takes none twice.
        noted: list[int] = getattr(get_spawning_popen(), "_fds", [])
        count = len(noted)
        with contextlib.suppress(pickle.PicklingError, AttributeError, TypeError):
            return _dump(_by_reference, content, reducers)
        del noted[count:]
    return _dump(_by_value, content, reducers)


def is_picklable(content: Any) -> bool:
    """Whether workers can be sent it, now or while their process is launched."""
    try:
        _pickle(content)
    except Exception as error:
        return _works_at_launch(error)
    return True


def _dump(pickler: Any, content: Any, reducers: Table | None) -> tuple[bytes, list[pickle.PickleBuffer]]:
    file = io.BytesIO()
    buffers: list[pickle.PickleBuffer] = []
    pickler(file, buffers.append, reducers).dump(content)
    return file.getvalue(), buffers


def _main_is_importable() -> bool:
    """Whether a spawned process imports the main module again; it cannot in a notebook or after ``python -c``."""
    main = sys.modules["__main__"]
    return getattr(main, "__spec__", None) is not None or os.path.isfile(getattr(main, "__file__", None) or "")


def pickle_by_value(content: Any) -> list[Any]:
    """Pickle an object for other machines, by value where those cannot import it: what is in the main module.

    Returns:
        Pieces of bytes, as `write_pickle` takes them.

    Raises:
        ConfigurationError: if something in it is shared with other processes of this machine.
        Exception: whatever else its pickling raises.
    """
    try:
        data, buffers = _dump(_by_value, content, None)
    except RuntimeError as error:
        if not _works_at_launch(error):
            raise
        raise ConfigurationError(
            "the dataset, or a function that it is used with, holds what processes of one machine share: a tensor "
            "after share_memory_(), a lock, queue or value of multiprocessing. Workers on other machines cannot: give "
            "them plain data, or what opens them there"
        ) from error
    return [data, *(buffer.raw() for buffer in buffers)]
