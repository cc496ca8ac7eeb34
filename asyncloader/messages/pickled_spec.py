"""The spec of all workers of a loader, pickled once: the dataset and the user's functions, under spawn and forkserver.

    parent:   pickle 5 ──> pickle | buffer | buffer ...   in one memfd
                      └──> descriptors of what is shared between processes
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
from collections.abc import Callable
from multiprocessing.context import get_spawning_popen, set_spawning_popen
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from asyncloader.errors import ConfigurationError
from asyncloader.messages.mapped_pickle import InheritedFd, open_mapped, write_pickle
from asyncloader.transport.codec import by_reference, by_value

_AT_LAUNCH = "this is shared between processes through inheritance only"
"""As multiprocessing says it of its own objects: they are pickled while a process is launched."""

_ANY_TIME = (types.MethodType, type(list.append), type(int.__add__), functools.partial, torch.storage.TypedStorage)
"""What multiprocessing's pickler has reducers for that do not need a process."""


class PickledSpec:
    """An object that is pickled once into a memory file. Made and closed by the parent; workers get what unpickles it.

    To multiprocessing's reducers (those of its locks, queues and shared values, torch's for shared memory, the user's)
    it is the process that is being launched: it keeps copies of the descriptors that they pass on, for all workers.

    Args:
        content: The object.
        is_kept: Write the pickle down; otherwise this only shows whether there can be one.

    Raises:
        Exception: whatever pickling the content raises, if neither pickle nor cloudpickle can do it.
    """

    DupFd = InheritedFd

    def __init__(self, content: Any, *, is_kept: bool = True) -> None:
        self._fds: list[int] = []
        set_spawning_popen(cast(Any, self))
        try:
            parts = self._pickle(content)
            file, self._sizes = write_pickle(parts if is_kept else [])
        except BaseException:
            self.close()
            raise
        finally:
            set_spawning_popen(None)
        self._fds.append(file)

    def _pickle(self, content: Any) -> list[Any]:
        """Pickle by reference where a worker can import what is referred to, otherwise by value."""
        if _main_is_importable():
            with contextlib.suppress(pickle.PicklingError, AttributeError, TypeError):
                return _parts(by_reference, content)
            self.close()
        return _parts(by_value, content)

    def duplicate_for_child(self, fd: int) -> int:
        """Keep a descriptor for the workers; return its number. A copy: whoever has it may close it."""
        self._fds.append(os.dup(fd))
        return len(self._fds) - 1

    def close(self) -> None:
        """Let go of the memory, and of the descriptors; workers that have opened it keep theirs."""
        while self._fds:
            os.close(self._fds.pop())

    def __reduce__(self) -> Any:
        return functools.partial, (open_mapped, [DupFd(fd) for fd in self._fds], self._sizes)


class _Reducers(dict[type, Any]):
    """The dispatch table of a pickler for datasets.

    Memory that is shared stays shared with the trainer: torch passes its descriptor on. Other memory is not shared by
    it, as multiprocessing's pickler would have it.
    """

    def __missing__(self, kind: type) -> Callable[[Any], Any]:
        if issubclass(kind, torch.Tensor):
            return _reduce_tensor
        if kind is torch.UntypedStorage:
            return _reduce_storage
        if kind in ForkingPickler._extra_reducers:  # type: ignore[attr-defined]
            return _registered(kind)
        return copyreg.dispatch_table[kind]


def _registered(kind: type) -> Callable[[Any], Any]:
    """Return multiprocessing's own reducer, torch's or the user's: most pass on what only a child can be given."""
    if get_spawning_popen() is None and kind not in _ANY_TIME:
        raise RuntimeError(_AT_LAUNCH)
    return ForkingPickler._extra_reducers[kind]  # type: ignore[attr-defined,no-any-return]


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    """Pickle a plain tensor that has its memory to itself as an array, which travels out of band."""
    if tensor.device.type == "cpu" and tensor.layout is torch.strided:
        if tensor._is_zerotensor():  # zeros without memory, which torch refuses to pickle
            return _reduce_tensor(tensor.clone())
        is_plain = type(tensor) is torch.Tensor and tensor.is_contiguous() and not tensor.requires_grad
        if is_plain and not tensor.is_shared() and tensor.untyped_storage().nbytes() == tensor.nbytes:  # type: ignore[no-untyped-call]
            with contextlib.suppress(TypeError, RuntimeError):  # a dtype that numpy does not have, a conjugate view
                return torch.from_numpy, (tensor.numpy(),)
    return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]


def _reduce_storage(storage: torch.UntypedStorage) -> Any:
    """Pickle a storage by its bytes; the pickle of torch's own reduction cannot be unpickled (torch 2.13)."""
    if storage.device.type != "cpu" or storage.is_shared():
        return _registered(torch.UntypedStorage)(storage)
    return _storage, (torch.empty(0, dtype=torch.uint8).set_(storage).numpy(),)


def _storage(array: NDArray[np.uint8]) -> torch.UntypedStorage:
    return torch.from_numpy(array).untyped_storage()


def _parts(make_pickler: Callable[..., pickle.Pickler], content: Any) -> list[Any]:
    """Pickle, with large buffers outside of the pickle: pieces of bytes, as `write_pickle` takes them."""
    stream = io.BytesIO()
    buffers: list[pickle.PickleBuffer] = []
    make_pickler(stream, _Reducers(), buffers.append).dump(content)
    return [stream.getvalue(), *(buffer.raw() for buffer in buffers)]


def is_picklable(content: Any) -> bool:
    """Whether workers can be sent it."""
    try:
        PickledSpec(content, is_kept=False).close()
    except Exception:
        return False
    return True


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
        return _parts(by_value, content)
    except RuntimeError as error:
        if "inheritance" not in str(error):  # multiprocessing's word for it
            raise
        raise ConfigurationError(
            "the dataset, or a function that it is used with, holds what processes of one machine share: a tensor "
            "after share_memory_(), a lock, queue or value of multiprocessing. Workers on other machines cannot: give "
            "them plain data, or what opens them there"
        ) from error
