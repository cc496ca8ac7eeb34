"""torch's default collation, with results stacked straight into memory that is used again.

torch collates by a map from element type to function. Our functions take the places of torch's own in that map: nested
structures, errors and edge cases stay torch's, a user's additions to the map stay the user's, and a `collate_fn` that
calls `default_collate` profits as well. All but the plainly common cases are left to torch.

In a worker, torch's own functions would put every tensor into a shared memory file of its own.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import frombuffer
from torch.utils.data._utils import collate as torch_collate

from asyncloader.transport.codec import Encoder
from asyncloader.transport.recycle import RECYCLED_MIN, Recycler
from asyncloader.transport.tensors import INLINE_MAX, Array, held, numpy_dtypes
from asyncloader.transport.whole import Whole

Allocate = Callable[[int], memoryview | None]
Map = dict[Any, Callable[..., Any]]
Tensors = list[torch.Tensor] | tuple[torch.Tensor, ...]

_count_modes, _default_device = torch._C._len_torch_function_stack, torch._C._get_default_device
_NUMPY_SCALARS = (np.bool_, np.number, np.object_)  # a key of torch's map


def install(encoder: Encoder) -> Stacker:
    """Put our functions into torch's own map, in a worker process, where the user has not replaced torch's.

    Returns:
        The stacker, which gathers a `Whole`.
    """
    stacker = Stacker(encoder.allocate, INLINE_MAX, in_worker=True)
    torch_collate.default_collate_fn_map.update(_replacements(stacker))
    return stacker


def is_default(collate_fn: Any) -> bool:
    """Whether this is the function that loaders collate with unless they are given another."""
    return collate_fn is torch.utils.data.default_collate


def stacks_tuples() -> bool:
    """Whether torch's default now makes of tuples and dicts what it always does: users may change its map."""
    there: Map = torch_collate.default_collate_fn_map
    function = there.get(torch.Tensor)
    is_torchs = function is torch_collate.collate_tensor_fn or isinstance(getattr(function, "__self__", None), Stacker)
    return is_torchs and not any(issubclass(tuple, kind) or issubclass(dict, kind) for kind in there)


def recycling_collate(collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return an equivalent of `collate_fn` that uses the memory of dropped batches again, if it is torch's default.

    For batches made in the trainer's process. The memory belongs to what is returned, and is freed with it and the
    batches. Several threads may call the function.
    """
    if not is_default(collate_fn):
        return collate_fn
    recycler = Recycler()
    stacker = Stacker(recycler.allocate, RECYCLED_MIN, in_worker=False)
    seen: Map = {}  # torch's map as it was last
    ours: Map = {}  # what is collated with then

    def collate(batch: Any) -> Any:
        nonlocal ours, seen
        if recycler.free:
            recycler.begin_batch()
        if isinstance(batch, Whole):
            return batch.batch(stacker.rows)
        # Numbers and arrays become tensors on the default device. ``with torch.device()`` and `set_default_device` are
        # function modes, which torch 2.6's `get_default_device` ignores.
        if (_count_modes() or _default_device() != "cpu") and torch.empty(0).device.type != "cpu":
            return collate_fn(batch)
        if seen != torch_collate.default_collate_fn_map:  # which the user may change between two batches
            there: Map = dict(torch_collate.default_collate_fn_map)
            ours, seen = {**there, **_replacements(stacker)}, there  # in this order: several threads may call this
        if (function := ours.get(type(batch[0]))) is not None:  # as torch's `collate` begins
            return function(batch, collate_fn_map=ours)
        return torch_collate.collate(batch, collate_fn_map=ours)

    return collate


def _replacements(stacker: Stacker) -> Map:
    """Our functions, for those keys of torch's map that have torch's functions."""
    ours: dict[Any, tuple[Any, Callable[..., Any]]] = {
        torch.Tensor: (torch_collate.collate_tensor_fn, stacker.tensors),
        np.ndarray: (torch_collate.collate_numpy_array_fn, stacker.arrays),
        _NUMPY_SCALARS: (torch_collate.collate_numpy_scalar_fn, collate_numpy_scalars),
        float: (torch_collate.collate_float_fn, _collate_floats),
        int: (torch_collate.collate_int_fn, _collate_ints),
    }
    there: Map = torch_collate.default_collate_fn_map
    return {key: new for key, (old, new) in ours.items() if there.get(key) is old}


class Stacker:
    """Stacks tensors and arrays of a batch, or gathers rows of them.

    Args:
        allocate: gives memory for so many bytes, or None.
        min_bytes: results of at most so many bytes are allocated as ever.
        in_worker: do as torch does in a worker, where the first sample decides about the dtype (else the samples are
            promoted to a common one) and none may require grad.
    """

    def __init__(self, allocate: Allocate, min_bytes: int, *, in_worker: bool) -> None:
        self._allocate = allocate
        self._min_bytes = min_bytes
        self._in_worker = in_worker

    def tensors(self, batch: Tensors, *, collate_fn_map: Map | None = None) -> torch.Tensor:
        """Stack tensors of one shape; torch's `collate_tensor_fn`."""
        first = batch[0]
        if first.is_nested or first.layout is not torch.strided:
            return torch_collate.collate_tensor_fn(batch, collate_fn_map=collate_fn_map)  # type: ignore[no-any-return]
        nbytes = first.nbytes * len(batch)
        if nbytes > self._min_bytes and self._may_allocate(batch):
            shape = (len(batch), *first.shape)
            if (memory := self._allocate(nbytes)) is not None:
                out = held(torch.frombuffer(memory, dtype=first.dtype), memory)
                return torch.stack(batch, 0, out=out.view(shape))
        stacked = torch.stack(batch, 0)
        if self._in_worker and (stacked.dtype is not first.dtype or stacked.requires_grad or not _is_plain(stacked)):
            return torch.stack(batch, 0, out=first.new_empty(stacked.shape))
        return stacked

    def arrays(self, batch: Sequence[Array], *, collate_fn_map: Map | None = None) -> Any:
        """Stack arrays of one shape; torch's `collate_numpy_array_fn`."""
        first = batch[0]
        ours = collate_fn_map is not None and collate_fn_map.get(torch.Tensor) == self.tensors
        if not ours or not _are_alike(batch):
            return torch_collate.collate_numpy_array_fn(batch, collate_fn_map=collate_fn_map)
        nbytes = first.nbytes * len(batch)
        memory = self._allocate(nbytes) if nbytes > self._min_bytes else None
        out = np.ndarray((len(batch), *first.shape), first.dtype, memory)  # allocates without memory
        # half the time of numpy.stack and a seventh of that of 256 small tensors made of arrays
        np.concatenate(batch, out=out.reshape(-1, *first.shape[1:]))
        return held(torch.from_numpy(out), out)

    def rows(self, source: torch.Tensor, numbers: NDArray[np.int64]) -> torch.Tensor:
        """Gather rows of a tensor, which are in range."""
        shape = (len(numbers), *source.shape[1:])
        nbytes = source.nbytes // source.shape[0] * len(numbers)
        index = torch.from_numpy(numbers)
        if source.device.type != "cpu":
            return source.index_select(0, index.to(source.device))
        if nbytes <= self._min_bytes or (memory := self._allocate(nbytes)) is None:
            return source.index_select(0, index)
        out = held(torch.frombuffer(memory, dtype=source.dtype), memory).view(shape)
        return torch.index_select(source, 0, index, out=out)

    def _may_allocate(self, batch: Tensors) -> bool:
        first = batch[0]
        if type(first) is not torch.Tensor or first.is_quantized or first.device.type != "cpu":
            return False
        return self._in_worker or all(t.dtype is first.dtype and not t.requires_grad for t in batch)


def _is_plain(stacked: torch.Tensor) -> bool:
    """Whether the result has torch's layout: stacked without memory, samples in channels-last order keep theirs."""
    return type(stacked) is not torch.Tensor or stacked.is_contiguous()


def _are_alike(batch: Sequence[Array]) -> bool:
    """Whether concatenating these arrays is all there is to do (torch refuses negative strides, other byte orders)."""
    dtype, shape = batch[0].dtype, batch[0].shape
    if dtype not in numpy_dtypes or not shape or 0 in shape:
        return False
    return all(type(a) is np.ndarray and a.dtype is dtype and a.shape == shape and a.flags.c_contiguous for a in batch)


# Lists of numbers: torch.tensor takes 90 us for 1024 ints, an array 10. What no number of eight bytes can be made of is
# an error there, and goes to torch's own function. But an array takes one thing that torch refuses: behind an int, what
# is none and has an ``__index__``.


def _collate_numbers(
    kind: type,
    code: str,
    dtype: torch.dtype,
    torchs: Callable[..., torch.Tensor],
    batch: Sequence[Any],
    *,
    collate_fn_map: Map | None = None,
) -> torch.Tensor:
    """Make a tensor of a list that begins with a number of Python's, as torch's own function does."""
    if type(batch[0]) is kind:  # bools are ints as well, and make a tensor of bools
        try:
            return frombuffer(array(code, batch), dtype=dtype)
        except (ValueError, TypeError, OverflowError, RuntimeError):
            pass
    return torchs(batch, collate_fn_map=collate_fn_map)


_collate_ints = partial(_collate_numbers, int, "q", torch.int64, torch_collate.collate_int_fn)
_collate_floats = partial(_collate_numbers, float, "d", torch.float64, torch_collate.collate_float_fn)


def collate_numpy_scalars(batch: Sequence[Any], *, collate_fn_map: Map | None = None) -> torch.Tensor:
    """Make a tensor of a list that begins with a number of numpy's; torch's `collate_numpy_scalar_fn`."""
    kind = type(batch[0])
    if np.dtype(kind) not in numpy_dtypes or set(map(type, batch)) != {kind}:
        made: torch.Tensor = torch_collate.collate_numpy_scalar_fn(batch, collate_fn_map=collate_fn_map)
        return made
    dtype = torch.as_tensor(batch[:1]).dtype  # torch's choice: not always numpy's own
    return torch.from_numpy(np.fromiter(batch, kind, len(batch))).to(dtype)
