"""The parts of a batch, down to their bits, for comparisons and digests."""

from __future__ import annotations

import array
import copyreg
import pickle
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch

from asyncloader.transport.tensors import Array, carrier

BUFFERS = (bytearray, memoryview, array.array, pickle.PickleBuffer)
"""Types of plain memory."""


class Reduction(NamedTuple):
    """The parts that pickle writes of an object."""

    maker: Any
    made_of: Any
    states: list[Any]  # two
    items: list[Any]
    by_key: dict[Any, Any]


def reduction_of(thing: Any) -> Reduction:
    """Return what pickle would write of an object.

    Raises:
        Exception: whatever keeps it from being pickled.
    """
    if isinstance(thing, FunctionType):  # of which pickle would write the name, if it has one
        cells = [cell.cell_contents for cell in thing.__closure__ or ()]
        return Reduction(None, (thing.__code__, thing.__defaults__, thing.__kwdefaults__, cells), [None] * 2, [], {})
    reducer = copyreg.dispatch_table.get(type(thing))
    reduced = thing.__reduce_ex__(4) if reducer is None else reducer(thing)
    if isinstance(reduced, str):
        return Reduction(None, reduced, [None] * 2, [], {})
    maker, made_of, *more = reduced
    state, items, by_key = (*more, None, None, None)[:3]
    has_slots = isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict)
    states = list(state) if has_slots else [state, None]
    return Reduction(maker, made_of, states, list(items or ()), dict(by_key or ()))


def parts_of(tensor: torch.Tensor) -> dict[str, Any] | None:
    """Return the parts of a tensor; None if it is dense memory."""
    if tensor.is_nested:
        names = ["unbind"]
    elif tensor.is_mkldnn:
        names = ["to_dense"]
    elif tensor.layout is torch.sparse_coo:
        names = ["_indices", "_values", "is_coalesced"]
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        names = ["crow_indices", "col_indices", "values"]
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        names = ["ccol_indices", "row_indices", "values"]
    elif tensor.is_quantized and "channel" in str(tensor.qscheme()):
        names = ["qscheme", "int_repr", "q_per_channel_scales", "q_per_channel_zero_points", "q_per_channel_axis"]
    elif tensor.is_quantized:
        names = ["qscheme", "int_repr", "q_scale", "q_zero_point"]
    else:
        return None
    return {f"{name}()": getattr(tensor, name)() for name in names}


def bits_of_tensor(tensor: torch.Tensor) -> Array:
    """Return the bytes of a dense tensor, a row for each element: its own memory where that has no gaps."""
    tensor = tensor.clone() if tensor._is_zerotensor() else tensor
    tensor = tensor.resolve_conj() if tensor.is_conj() else tensor
    tensor = tensor.resolve_neg() if tensor.is_neg() else tensor
    row = tensor.view(carrier(tensor.dtype)).cpu().contiguous().reshape(-1)
    return row.view(torch.uint8).numpy().reshape(tensor.numel(), tensor.itemsize)


def bits_of_array(values: Array) -> Array:
    """Return the bytes of an array of numbers or texts, a row for each element: its own memory if that has no gaps."""
    size = count = values.itemsize
    if values.dtype.kind in "fc" and np.finfo(values.dtype).nmant == 63:  # x86's long double: 10 bytes, and padding
        values = values.astype(values.dtype.newbyteorder("="))
        size, count = np.dtype(np.longdouble).itemsize, 10
    row = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    bits = row.reshape(values.size, values.itemsize // size, size)
    return bits[:, :, :count].reshape(values.size, -1)
