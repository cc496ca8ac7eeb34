"""Pickles of values without the memory around a tensor that is a view, which pickle by itself takes along."""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

SMALL = 1 << 16
"""Bytes that are copied, with a pickle for example, rather than sent by themselves."""
_PIECE = 1 << 20
"""Bytes that are copied at a time, before other threads have their turn."""


def pickled(value: Any) -> bytes:
    """Return the pickle of a value, with views of tensors cut out of the memory around them."""
    file = io.BytesIO()
    Pickler(file, protocol=5).dump(value)
    return file.getvalue()


def tensor_of(data: NDArray[np.uint8], dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> torch.Tensor:
    """Make a tensor of its bytes, which stay its memory. Pickles name this function: it stays where it is."""
    return torch.from_numpy(data).view(dtype).reshape(shape).requires_grad_(requires_grad)


class Pickler(pickle.Pickler):
    """Pickles of tensors what they show."""

    def reducer_override(self, obj: Any) -> Any:
        """Pickle plain tensors as arrays: a view then is no more than it shows, and its memory goes out of band."""
        if type(obj) is not torch.Tensor or obj.device.type != "cpu" or obj.is_quantized or obj.__dict__:
            return NotImplemented
        try:
            shown = obj.detach().resolve_conj().resolve_neg().contiguous()
            if shown._is_zerotensor():  # zeros without memory
                shown = shown.clone()
            if not obj.requires_grad:
                with contextlib.suppress(TypeError):  # a dtype that numpy does not have
                    return torch.from_numpy, (shown.numpy(),)
            data = shown.reshape(-1).view(torch.uint8).numpy()
        except (TypeError, RuntimeError):  # a layout without bytes of its own: sparse, nested
            return NotImplemented
        return tensor_of, (data, obj.dtype, tuple(obj.shape), obj.requires_grad)


class Pickles:
    """Pickles, one behind the other, with large buffers beside them. Views are cut out of the memory around them.

    What the values share is there once. Other threads have their turn between two values.

    Args:
        values: Are pickled.
    """

    def __init__(self, values: Iterable[Any] = ()) -> None:
        self._file, self._views, self._count = io.BytesIO(), list[memoryview](), 0
        self._pickler = Pickler(self._file, protocol=5, buffer_callback=self._goes_in)
        for self._count, value in enumerate(values, 1):
            self._pickler.dump(value)

    def __reduce__(self) -> Any:
        buffers = [[*map(pickle.PickleBuffer, memory)] for memory in (self._pieces(), self._views)]
        return _unpickled, (self._count, *buffers)

    def copied(self) -> list[Any]:
        """Return copies of the values. To copy a large buffer holds up nobody: numpy lets go of the interpreter."""
        return _unpickled(self._count, self._pieces(), map(np.array, self._views))

    def _pieces(self) -> list[memoryview]:
        data = self._file.getbuffer()
        return [data[at : at + _PIECE] for at in range(0, len(data), _PIECE)]

    def only(self, message: Any) -> tuple[bytes, list[memoryview]]:
        """Return the pickle of a message in place of what there was, and the buffers beside it."""
        self._file.seek(0)
        self._pickler.dump(message)
        self._pickler.clear_memo()  # which keeps what was pickled
        self._file.truncate()
        views, self._views = self._views, []
        return self._file.getvalue(), views

    def _goes_in(self, buffer: pickle.PickleBuffer) -> bool:
        if is_small := (view := buffer.raw()).nbytes < SMALL:
            return is_small
        self._views.append(view)
        return False


_unused: list[Pickles] = []  # to make one takes four times as long as to pickle a small message


def packed(message: Any) -> tuple[bytes, list[memoryview]]:
    """Return a pickle, and the large buffers beside it. In any thread, and in the garbage collector."""
    try:
        pickles = _unused.pop()
    except IndexError:
        pickles = Pickles()
    pickled, views = pickles.only(message)
    if len(pickled) < SMALL:  # otherwise that memory would be kept
        _unused.append(pickles)
    return pickled, views


def _unpickled(count: int, pieces: list[Any], buffers: Iterable[Any]) -> list[Any]:
    file = io.BytesIO()
    for piece in pieces:
        file.write(piece)
    file.seek(0)
    unpickler = pickle.Unpickler(file, buffers=buffers)
    return [unpickler.load() for _ in range(count)]
