"""Pickles of values without the memory around a tensor that is a view, which pickle by itself takes along."""

from __future__ import annotations

import contextlib
import io
import pickle
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


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
