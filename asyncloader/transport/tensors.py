"""Tensors and arrays in a payload: a few numbers, a shape, and a buffer.

    worker                                                     parent
    tensor ── numpy() ──> (dtype code, shape, buffer) ──────> numpy array over the buffer ── from_numpy ──> tensor
                                       └ small: a bytearray in the pickle. large: placed outside it (see codec)

torch's own pickling of a small tensor costs some 80 us (it saves the storage as a file), and torch's DataLoader pays
for a descriptor, a segment and a mapping on top; through numpy it is 1-2 us on each side. Tensors that
numpy cannot hold (bfloat16, float8, conjugate views, ...) go as plain bytes; tensors that are not dense, or not on the
CPU, go by torch's own pickling, whose parts come here again.

Tensors of one batch that overlap in memory still do so when they arrive, with the strides that they had, as long as the
memory that they span is at most twice the bytes of their elements. Others use a small part of some memory: the columns
of a wide matrix, windows of a long series. Such tensors travel one by one, without the gaps, which keeps their values
and the order of their strides; a write to one of them is then not seen through another. Arrays of numpy always travel
one by one.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, MutableSequence, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import torch

# Buffers of at most this many bytes travel inside the pickle, through the channel; larger ones are placed in slabs.
# Measured, a tensor there and back, inline and by slab: 32 KiB 24 and 34 us, 64 KiB 26 and 37, 128 KiB 43 and 43,
# 256 KiB 90 and 39, 1 MiB 654 and 118. In the parent alone (CPU) they cost the same from 110 KiB on.
INLINE_MAX = 64 * 1024

Array: TypeAlias = "np.ndarray[Any, Any]"
Reduction = tuple[Any, ...]
Placer = Callable[[int, Array], Any]


# ------------------------------------------------------------------------------------------------ dtypes, by number
# Both sides run the same torch: the numbers are never stored.
_FLOATS = ("float32", "float64", "float16", "complex64", "complex128")
_INTEGERS = ("int64", "uint8", "bool", "int32", "int16", "int8", "uint16", "uint32", "uint64")
_NUMPY_DTYPES = [np.dtype(name) for name in _FLOATS + _INTEGERS]
numpy_dtypes: frozenset[np.dtype[Any]] = frozenset(_NUMPY_DTYPES)  # those that numpy and torch have in common
_COMMON = [getattr(torch, name) for name in _FLOATS + _INTEGERS]
# bfloat16, the float8s, bits8, uint4, ... : quantized ones are described by more than their bytes
_OTHERS = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype) and "torch.q" not in str(d)}, key=str)
_DTYPES = [*_COMMON, *(dtype for dtype in _OTHERS if dtype not in _COMMON)]
_CODES: dict[torch.dtype, int] = {dtype: code for code, dtype in enumerate(_DTYPES)}
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""By item size, dtypes that every operation exists for: of some of torch's own a tensor cannot even be made empty."""


def carrier(dtype: torch.dtype) -> torch.dtype:
    """Return a dtype of the same size that every operation exists for, in numpy too; the same if it is one."""
    return dtype if dtype in _COMMON else _CARRIERS[dtype.itemsize]


def held(tensor: torch.Tensor, buffer: Any) -> torch.Tensor:
    """Let the memory live as long as the storage, even if that moves to other memory.

    `share_memory_()`, and torch's pickling for another process, replace the memory of a storage in place. Arrays and
    other views made before refer to the storage alone, and go on looking at the old memory, which would be freed and
    used again under their eyes. An attribute of a storage's Python object stays as long as the storage itself.
    """
    tensor.untyped_storage()._memory = buffer  # type: ignore[attr-defined]
    return tensor


# --------------------------------------------------------------------------------------------------- in the parent
def _tensor(code: int, shape: tuple[int, ...], buffer: Any) -> torch.Tensor:
    """A dense tensor over all of `buffer`; the dtype is one that numpy knows."""
    tensor = torch.from_numpy(np.ndarray(shape, _NUMPY_DTYPES[code], buffer))
    # As in `held`, written out: this is the way of most tensors.
    tensor.untyped_storage()._memory = buffer  # type: ignore[attr-defined]
    return tensor


def _strided(
    code: int, shape: tuple[int, ...], strides: tuple[int, ...], offset: int, memory: torch.Tensor, requires_grad: bool
) -> torch.Tensor:
    """A view of `memory` (bytes), beginning `offset` bytes in. Views of one memory share its storage."""
    dtype = _DTYPES[code]
    # By way of a carrier: torch warns when a tensor of complex32 is made, which the user's code has seen already.
    tensor = torch.empty(0, dtype=carrier(dtype))
    tensor = tensor.set_(memory.untyped_storage(), offset // dtype.itemsize, shape, strides).view(dtype)
    return tensor.requires_grad_() if requires_grad else tensor


def _memory(buffer: Any) -> torch.Tensor:
    """All of `buffer` as a tensor of bytes."""
    return held(torch.from_numpy(np.ndarray((len(buffer),), np.uint8, buffer)), buffer)  # which may be empty


def _as_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _array(dtype: Any, shape: tuple[int, ...], order: Any, buffer: Any) -> Array:
    return np.ndarray(shape, dtype, buffer, order=order)


# ---------------------------------------------------------------------------------------------------- in the worker
class Span:
    """Memory that several tensors of a batch have in common; pickled once, by identity."""

    __slots__ = ("memory", "start")

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory: torch.Tensor = memory  # bytes
        self.start: int = memory.data_ptr()


class _Extent(NamedTuple):
    """Memory of tensors that overlap, in addresses."""

    start: int
    end: int
    nbytes: int  # of the elements of all of them
    num_tensors: int


_Seen: TypeAlias = "tuple[int, int, int]"
"""The memory of a tensor, from its first to its last element, in addresses; and the bytes of its elements."""


class Reducers(dict[type, Callable[[Any], Reduction]]):
    """A pickler's dispatch table for one encoder: tensors and arrays by our own reductions, the rest as ever.

    Tensors that overlap in memory are one storage to torch, and stay so where that does not bring much along that is no
    tensor's: the first dump notes the memory of every tensor, `find_shared()` looks for overlaps, and a second dump
    describes the tensors concerned as views of common spans. Batches with overlaps are rare, and looking costs 0.1 us a
    tensor.

    Args:
        place: takes the address of a large buffer (0: it has gaps) and its contents, returns what to pickle instead.
    """

    def __init__(self, place: Placer) -> None:
        super().__init__()
        self[torch.Tensor] = self._reduce_tensor
        self[np.ndarray] = self._reduce_array
        self[Span] = self._reduce_span
        self._place = place
        self.seen: MutableSequence[_Seen] = []
        self._shared: list[_Extent] = []
        self._spans: dict[_Extent, Span] = {}

    def __missing__(self, cls: type) -> Callable[[Any], Reduction]:
        """Find the reducer of any other class: a KeyError means that it is pickled as ever."""
        if cls not in copyreg.dispatch_table and _is_plain_subclass(cls):
            return _reduce_subclass
        return copyreg.dispatch_table[cls]  # type: ignore[return-value]

    def forget(self) -> None:
        """Begin another batch."""
        self.seen.clear()
        self._spans.clear()
        self._shared.clear()

    # -- shared memory inside a batch
    def find_shared(self) -> bool:
        """Whether tensors of the batch just dumped are to have memory in common, which they get in the next dump."""
        if len(self.seen) < 2 or self._shared:
            return False
        self._shared = _to_share(self.seen)
        self.seen.clear()
        return bool(self._shared)

    def _span_of(self, tensor: torch.Tensor, start: int, end: int) -> Span | None:
        extent = next((each for each in self._shared if each.start <= start and end <= each.end), None)
        if extent is None:
            return None
        span = self._spans.get(extent)
        if span is None:
            memory = _memory_of(tensor, extent)
            if memory is None:  # the overlap is between different storages, which torch does not keep together either
                return None
            span = self._spans[extent] = Span(memory)
        return span

    def _reduce_span(self, span: Span) -> Reduction:
        return _memory, (self._buffer(span.start, span.memory.numpy()),)

    # -- tensors
    def _reduce_tensor(self, tensor: torch.Tensor) -> Reduction:
        try:
            array = tensor.numpy()
        except (RuntimeError, TypeError):
            return self._reduce_special(tensor)
        if not (start := tensor.data_ptr()):  # empty, or zeros without memory: before torch 2.10 numpy() invents some
            return self._reduce_special(tensor)
        if self._shared or not tensor.is_contiguous():
            return self._reduce_strided(tensor, requires_grad=False)
        nbytes = array.nbytes
        self.seen.append((start, start + nbytes, nbytes))
        # ._buffer(), written out: this is the way of most small tensors
        is_inline = nbytes <= INLINE_MAX
        buffer = bytearray(array.tobytes()) if is_inline else self._place(start, array)
        return _tensor, (_CODES[tensor.dtype], array.shape, buffer)

    def _reduce_special(self, tensor: torch.Tensor) -> Reduction:
        """A tensor that numpy refuses: requires grad, conjugated or negated, of another dtype, layout or device."""
        requires_grad = tensor.requires_grad
        if requires_grad and not tensor.is_leaf:
            raise RuntimeError(
                "Cowardly refusing to serialize non-leaf tensor which requires_grad, since autograd does not support "
                "crossing process boundaries. If you just want to transfer the data, call detach() on the tensor in "
                "the dataset or in collate_fn."
            )
        if tensor.device.type not in ("cpu", "meta"):
            raise RuntimeError(
                f"a tensor on {tensor.device} cannot travel between a worker process and the trainer; only CPU tensors "
                "can. Keep sampler, dataset and collate_fn on the CPU and use pin_memory=True, or move the batch in "
                "the training loop."
            )
        if not _is_dense(tensor):
            if tensor.is_quantized and tensor.untyped_storage().nbytes() > 2 * tensor.nbytes:
                tensor = tensor.clone()  # torch would send the storage as a whole
            return cast(Reduction, tensor.__reduce_ex__(5))  # type: ignore[no-untyped-call]
        tensor = tensor.detach()
        if tensor.dtype in _COMMON or tensor.is_complex():
            tensor = tensor.resolve_conj().resolve_neg()
        if tensor._is_zerotensor():
            tensor = tensor.clone()
        return self._reduce_strided(tensor, requires_grad)

    def _reduce_strided(self, tensor: torch.Tensor, requires_grad: bool) -> Reduction:
        code = _CODES[tensor.dtype]
        shape, strides = tuple(tensor.shape), tensor.stride()
        if tensor.numel() == 0:
            return _strided, (code, shape, strides, 0, Span(torch.empty(0, dtype=torch.uint8)), requires_grad)
        start, length = tensor.data_ptr(), _length(tensor)
        span = self._span_of(tensor, start, start + length)
        if span is not None:
            return _strided, (code, shape, strides, start - span.start, span, requires_grad)
        flat, strides = _flat(tensor.view(carrier(tensor.dtype)), length)
        self.seen.append((start, start + length, min(flat.nbytes, tensor.nbytes)))
        return _strided, (code, shape, strides, 0, Span(flat.view(torch.uint8)), requires_grad)

    # -- arrays
    def _reduce_array(self, array: Array) -> Reduction:
        dtype = array.dtype
        if dtype.hasobject:
            return cast(Reduction, array.__reduce_ex__(5))
        named = dtype.isbuiltin != 2 and dtype.names is None and dtype.metadata is None and dtype.kind in "biufcSUmM"
        order = "F" if array.flags.fnc else "C"
        if array.nbytes <= INLINE_MAX:
            buffer: Any = bytearray(array.tobytes(order))  # type: ignore[arg-type]
        else:
            buffer = self._place(array.ctypes.data if array.flags.forc else 0, array)
        # numpy's own pickling of a dtype costs 1.5 us, its name a tenth of that
        return _array, (dtype.str if named else dtype, array.shape, order, buffer)

    def _buffer(self, start: int, array: Array) -> Any:
        # not bytearray(array): one number would be taken for a length
        is_inline = array.nbytes <= INLINE_MAX
        return bytearray(array.tobytes()) if is_inline else self._place(start, array)


def _is_plain_subclass(cls: type) -> bool:
    """Whether torch would pickle objects of `cls` as their tensor, their class and their attributes."""
    return (
        issubclass(cls, torch.Tensor)
        and cls.__reduce_ex__ is torch.Tensor.__reduce_ex__
        and cls.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    )


def _reduce_subclass(tensor: torch.Tensor) -> Reduction:
    with torch._C.DisableTorchFunctionSubclass():
        plain = tensor.as_subclass(torch.Tensor)
    state = torch._utils._get_obj_state(tensor)  # type: ignore[no-untyped-call]
    return torch._tensor._rebuild_from_type_v2, (_as_is, type(tensor), (plain,), state)


def _is_dense(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
        and tensor.device.type == "cpu"
        and tensor.dtype in _CODES
    )


def _length(tensor: torch.Tensor) -> int:
    """Bytes from the first to the last element of a tensor that has some."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def _flat(tensor: torch.Tensor, length: int) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The memory of a tensor as one row, and the strides there: its own, or without gaps if it is mostly gaps.

    Without gaps they are in the same order, which torch chooses the strides of results by, and what is repeated (a
    stride of 0) is still there once.
    """
    strides = tensor.stride()
    if length > 2 * tensor.nbytes or 0 in strides:
        once = tensor[tuple(slice(None if stride else 1) for stride in strides)]
        if length > 2 * once.nbytes:
            tensor = once.clone()
            length = tensor.nbytes
            strides = tuple(new if old else 0 for new, old in zip(tensor.stride(), strides, strict=True))
    return tensor.as_strided((length // tensor.itemsize,), (1,)), strides


def _to_share(seen: Sequence[_Seen]) -> list[_Extent]:
    """Extents of two tensors or more that overlap, of at most twice the bytes of all their elements.

    Where tensors that are mostly gaps make an extent too large, it is that of the others.
    """
    ordered = sorted(seen)
    if all(one[1] <= other[0] for one, other in pairwise(ordered)):  # most batches
        return []
    extents: list[_Extent] = []
    for start, end, nbytes in ordered:
        if extents and start < (last := extents[-1]).end:
            extents[-1] = _Extent(last.start, max(last.end, end), last.nbytes + nbytes, last.num_tensors + 1)
        else:
            extents.append(_Extent(start, end, nbytes, 1))
    shared = []
    for extent in extents:
        if extent.end - extent.start > 2 * extent.nbytes:
            there = [each for each in ordered if extent.start <= each[0] < extent.end]
            solid = [each for each in there if each[1] - each[0] <= 2 * each[2]]
            shared += _to_share(solid) if len(solid) < len(there) else []
        elif extent.num_tensors > 1:
            shared.append(extent)
    return shared


def _memory_of(tensor: torch.Tensor, extent: _Extent) -> torch.Tensor | None:
    """The bytes of `extent`, through the storage of `tensor`; None if it does not hold them all."""
    storage = tensor.untyped_storage()
    base = storage.data_ptr()
    if not base <= extent.start <= extent.end <= base + storage.nbytes():
        return None
    # Views of any dtype lie at multiples of their item size from the beginning of the storage, and so must they here.
    first = (extent.start - base) // 16 * 16
    return torch.empty(0, dtype=torch.uint8).set_(storage, first, (extent.end - base - first,), (1,))
