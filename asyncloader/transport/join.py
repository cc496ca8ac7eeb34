"""Join the collated slices of a batch: what torch's default collation makes of all its samples at once, or nothing.

    samples 0..7  ── collated in one worker ────> a slice ──┐
    samples 8..15 ── collated in another one ───> a slice ──┴── join ──> the batch; or CannotJoin

Leaf by leaf: tensors are concatenated, and texts, which torch leaves in lists. Tensors that lie back to back in a slab
of the batch (:mod:`asyncloader.transport.batch_slabs`) are there already, and nothing is copied.

A function of torch's map collates one element of all samples, and which one is decided by the type that it has in the
first sample. So slices whose first samples are alike in all types were collated by the functions that collate the whole
batch. These make one row of each sample; what else depends on all samples is the dtype. Whatever is not plainly so is
`CannotJoin`: then the batch is made whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from typing import Any, TypeAlias

import torch

from asyncloader.transport import collate
from asyncloader.transport.tensors import INLINE_MAX, carrier

Columns: TypeAlias = "tuple[tuple[torch.dtype, tuple[int, ...]], ...]"
"""Of the large tensors in a batch, in their order: dtype, and shape of a row."""


class CannotJoin(Exception):
    """Only collating all samples of the batch at once tells what becomes of them."""


CollatedSlice: TypeAlias = tuple[Any, Any]
"""A slice of a batch, as a worker has collated it, and the types in its first sample: None for rules of the user's."""

Find: TypeAlias = "Callable[[Sequence[torch.Tensor]], torch.Tensor | None]"
"""Returns the tensor that these are the rows of, if each is where it belongs in it: `BatchSlabs.whole`."""


def collated(samples: Any, data: Any, collate_fn: Any) -> CollatedSlice:
    """Return the slice that has been collated from these samples."""
    return data, _kinds(samples[0]) if collate.copies_samples(collate_fn) else None


def _kinds(sample: Any) -> Any:
    kind = type(sample)
    if kind is dict:
        return {key: _kinds(member) for key, member in sample.items()}
    if isinstance(sample, (tuple, list)):
        return [_kinds(member) for member in sample]
    return f"{kind.__module__}.{kind.__qualname__}"


def join(slices: Sequence[CollatedSlice], find: Find | None = None) -> Any:
    """Return the batch that these slices are, in their order.

    Args:
        slices: At least one.
        find: Finds tensors that the workers have written into slabs of the batch.

    Raises:
        CannotJoin: if that is not for certain what collating all samples at once makes.
    """
    parts, kinds = zip(*slices, strict=True)
    if kinds[0] is None or any(other != kinds[0] for other in kinds):
        raise CannotJoin
    return _joined(parts, find)


def _joined(parts: Sequence[Any], find: Find | None) -> Any:
    first = parts[0]
    kind = type(first)
    if any(type(part) is not kind for part in parts):
        raise CannotJoin
    if kind is torch.Tensor:
        return _tensor(parts, find)
    if kind is dict and all(part.keys() == first.keys() for part in parts):
        return {key: _joined([part[key] for part in parts], find) for key in first}
    if kind in (list, tuple) and first and isinstance(first[0], (str, bytes)):
        return kind(chain.from_iterable(parts))
    is_named = kind.__bases__ == (tuple,) and hasattr(kind, "_fields")  # and has no constructor of its own
    if (kind is list or is_named) and all(len(part) == len(first) for part in parts):
        members = [_joined(members, find) for members in zip(*parts, strict=True)]
        return kind(*members) if is_named else members
    raise CannotJoin


def _tensor(parts: Sequence[torch.Tensor], find: Find | None) -> torch.Tensor:
    first = parts[0]
    dtype, row = first.dtype, first.shape[1:]
    if not all(_is_plain(part) and part.dtype is dtype and part.shape[1:] == row for part in parts):
        raise CannotJoin
    if find is not None and _are_back_to_back(parts) and (found := find(parts)) is not None:
        return found
    stored = carrier(dtype)  # torch cannot concatenate all of its dtypes
    if stored is dtype:
        return torch.cat(list(parts))
    return torch.cat([part.view(stored) for part in parts]).view(dtype)


def _is_plain(part: torch.Tensor) -> bool:
    return (
        part.layout is torch.strided
        and part.device.type == "cpu"
        and part.dim() > 0
        and not (part.requires_grad or part.is_quantized or part.is_nested or part.is_conj() or part.is_neg())
        and part.is_contiguous()
    )


def _are_back_to_back(parts: Sequence[torch.Tensor]) -> bool:
    return all(one.data_ptr() + one.nbytes == other.data_ptr() for one, other in pairwise(parts))


def columns_of(batch: Any) -> Columns:
    """Return the large tensors of a batch that was joined."""
    found: list[tuple[torch.dtype, tuple[int, ...]]] = []
    _find_columns(batch, found)
    return tuple(found)


def _find_columns(thing: Any, found: list[tuple[torch.dtype, tuple[int, ...]]]) -> None:
    if isinstance(thing, torch.Tensor):
        if thing.nbytes > INLINE_MAX:
            found.append((thing.dtype, tuple(thing.shape[1:])))
    elif isinstance(thing, dict):
        for member in thing.values():
            _find_columns(member, found)
    elif isinstance(thing, (list, tuple)) and not (thing and isinstance(thing[0], (str, bytes))):
        for member in thing:
            _find_columns(member, found)
