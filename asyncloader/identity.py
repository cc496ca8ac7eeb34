"""Identities of samplers and datasets: a state belongs to one, and is compared with it here alone.

    of(sampler) ──> {"kind": "ElasticSampler", "seed": 0, "length": 100, ...} ──> in its state, and in the loader's
    check(saved, of(sampler)) ──> StateMismatchError: "seed was 0 when it was taken, and is 1 now"

An identity has everything that changes which samples come, or their order. Options that may differ at a resume, such as
the ranks of an elastic sampler, are left out, and so are options that only change how fast samples come.

Samplers and datasets of this package describe themselves in a method ``_state_identity``. Torch's are known here.
"""

from __future__ import annotations

import json
import operator
import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DistributedSampler,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from asyncloader.errors import StateMismatchError
from asyncloader.protocols import probe

_OPTIONS = ("batch_size", "drop_last", "shuffle", "seed", "replacement", "num_samples")
"""Of torch's samplers."""
_ROWS = ("indices", "weights", "cumulative_sizes")
"""Of torch's samplers and datasets: numbers of which a checksum is compared."""
_TORCHS = (
    BatchSampler,
    ConcatDataset,
    DistributedSampler,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
SCALARS = (bool, int, float, str, type(None))
"""Plain values."""
_PIECE = 1 << 18


def of(thing: Any) -> dict[str, Any]:
    """Return the identity of a sampler or a dataset, as plain data. Of a class of the user's it is the name alone.

    A subclass of torch's is one: it may change its rows, or count up its seed, when it is iterated over.
    """
    kind = {"kind": type(thing).__name__}
    if callable(own := probe(thing, "_state_identity")):
        return {**kind, **own()}
    if type(thing) not in _TORCHS:
        return kind
    found = {name: getattr(thing, name, ...) for name in _OPTIONS}
    options = {name: plain(option) for name, option in found.items() if isinstance(option, (*SCALARS, np.generic))}
    if hasattr(thing, "generator"):  # without one, torch draws a seed first
        options["generator"] = thing.generator is not None
    rows = {name: checksum(getattr(thing, name)) for name in _ROWS if hasattr(thing, name)}
    return {**kind, **options, **rows}


def plain(value: Any) -> Any:
    """Return an integer of any kind as Python's own; other values that are no plain data as text."""
    try:
        return value if isinstance(value, SCALARS) else operator.index(value)
    except TypeError:
        return str(value)


def check(
    saved: Mapping[str, Any],
    now: Mapping[str, Any],
    *,
    free: Collection[str] = (),
    advice: Mapping[str, str] | None = None,
) -> None:
    """See whether a state belongs to what it is loaded into.

    Args:
        saved: The identity in the state. What it does not have is not compared: a sampler of the user's may take its
            own part of a state out of what it hands on.
        now: The identity of the object that is to load the state.
        free: Names that may differ.
        advice: By name, the advice about a difference, in place of the general one.

    Raises:
        StateMismatchError: if it does not; it says what differs.
    """
    for name, here in now.items():
        if name not in free and (then := saved.get(name, here)) != here:
            kind = now.get("kind", "loader")
            general = f"Make the {saved.get('kind', kind)} as it was then, or begin without the state."
            raise StateMismatchError(name, then, here, (advice or {}).get(name, general))


def checksum(row: Sequence[Any] | NDArray[Any] | torch.Tensor) -> dict[str, int]:
    """Return what tells a row of numbers, or of other plain data, from others: a tenth of a second for ten million.

    Equal numbers have equal checksums, whether they are in a list, an array or a tensor, and of whatever width.
    """
    if isinstance(row, range):
        return {"count": len(row), "checksum": zlib.crc32(repr(row).encode())}
    array = _array(row)
    if array is None:
        try:
            return {"count": len(row), "checksum": zlib.crc32(json.dumps(row).encode())}
        except (TypeError, ValueError):  # more than plain data
            return {"count": len(row)}
    array, width = array.reshape(-1), "<f8" if array.dtype.kind == "f" else "<i8"
    found = 0
    for begin in range(0, len(array), _PIECE):
        found = zlib.crc32(np.ascontiguousarray(array[begin : begin + _PIECE], width).data, found)
    return {"count": len(row), "checksum": found}


def _array(row: Any) -> NDArray[Any] | None:
    """Return a row as an array of numbers; None if it is none."""
    try:
        array = row.detach().cpu().numpy() if isinstance(row, torch.Tensor) else np.asarray(row)
    except Exception:  # whatever its elements raise
        return None
    return array if array.dtype.kind in "biuf" else None
