"""A sample as bytes, and back: pickled, with the memory of arrays and tensors beside the pickle.

    how many buffers, length of the pickle, lengths of the buffers | pickle | buffer | buffer ...

To read one is one copy, from the file into memory of its own, in which arrays and tensors stay and may be written to.
A view of a tensor is pickled without the memory around it, which pickle by itself would take along.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import struct
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_COUNTS = struct.Struct("<II")
_ALIGNMENT = 64


def pack(sample: Any) -> list[Any]:
    """Return the pieces of a sample's bytes, each to be put at the next multiple of 64.

    Raises:
        Exception: Pickling the sample failed.
    """
    file = io.BytesIO()
    buffers: list[pickle.PickleBuffer] = []
    Pickler(file, protocol=5, buffer_callback=buffers.append).dump(sample)
    raw = [buffer.raw() for buffer in buffers]
    data = file.getbuffer()
    lengths = struct.pack(f"<{len(raw)}Q", *map(len, raw))
    return [b"".join((_COUNTS.pack(len(raw), len(data)), lengths, data)), *raw]


def unpack(memory: memoryview) -> Any:
    """Make the sample of its bytes; its arrays stay in them."""
    count, length = _COUNTS.unpack_from(memory)
    lengths = struct.unpack_from(f"<{count}Q", memory, _COUNTS.size)
    begin = _COUNTS.size + 8 * count
    at, buffers = aligned(begin + length), []
    for size in lengths:
        buffers.append(memory[at : at + size])
        at = aligned(at + size)
    return pickle.loads(memory[begin : begin + length], buffers=buffers)


def pickled(value: Any) -> bytes:
    """Return the pickle of a value, with views of tensors cut out of the memory around them."""
    file = io.BytesIO()
    Pickler(file, protocol=5).dump(value)
    return file.getvalue()


def tensor_of(data: NDArray[np.uint8], dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> torch.Tensor:
    """Make a tensor of its bytes, which stay its memory. Pickles name this function: it stays where it is."""
    return torch.from_numpy(data).view(dtype).reshape(shape).requires_grad_(requires_grad)


def aligned(size: int) -> int:
    """Return the next multiple of 64."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def empty(size: int) -> Any:
    """Return memory that nobody has filled with zeros."""
    return np.empty(size, np.uint8)


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
