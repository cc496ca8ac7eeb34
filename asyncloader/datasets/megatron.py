r"""Megatron's index of a file of tokens: `NAME.idx` beside `NAME.bin`.

    "MMIDIDX\0\0" | version 1, u64 | dtype, u8 | sequences, u64 | documents + 1, u64
    lengths of the sequences, i32 each | where they begin in the .bin, in bytes, i64 each
    number of the sequence that each document begins with, i64 each, and behind the last one how many there are

Source: megatron/core/datasets/indexed_dataset.py of NVIDIA's Megatron-LM.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncloader.errors import ConfigurationError

_MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<9sQBQQ")
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floats, which no tokens are


def read_index(data: bytes, name: str, bin_bytes: int) -> tuple[np.dtype[Any], NDArray[np.int64]]:
    """Read an index, and check it against the length of its file of tokens.

    Args:
        data: The whole of the file.
        name: Named in errors.
        bin_bytes: How long the .bin is.

    Returns:
        The dtype of the tokens; and the token that each document begins with, and behind the last one how many tokens
        there are.

    Raises:
        ConfigurationError: The data are no such index, are damaged, or belong to another file.
    """
    magic, version, code, num_sequences, num_documents = _HEAD.unpack_from(data.ljust(_HEAD.size, b"\0"))
    if magic != _MAGIC or version != 1 or code not in _DTYPES:
        raise ConfigurationError(
            f"{name}: no index of Megatron's, of version 1 and a dtype of whole numbers: it begins with {magic!r}, "
            f"version {version}, dtype {code}"
        )
    needed = _HEAD.size + 12 * num_sequences + 8 * num_documents
    if len(data) < needed:
        raise ConfigurationError(f"{name}: truncated: ends at byte {len(data):,} of {needed:,}")
    dtype = np.dtype(_DTYPES[code])
    lengths = np.frombuffer(data, "<i4", num_sequences, _HEAD.size)
    pointers = np.frombuffer(data, "<i8", num_sequences, _HEAD.size + 4 * num_sequences)
    documents = np.frombuffer(data, "<i8", num_documents, _HEAD.size + 12 * num_sequences)
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    wrong = np.flatnonzero((pointers != ends[:-1] * dtype.itemsize) | (lengths < 0))
    if wrong.size:
        at = wrong[0]
        raise ConfigurationError(
            f"{name}: sequence {at} begins at byte {pointers[at]} of the .bin and has {lengths[at]} tokens, but "
            f"the one before ends at byte {ends[at] * dtype.itemsize}: damaged, or not written in one piece"
        )
    if ends[-1] * dtype.itemsize != bin_bytes:
        raise ConfigurationError(
            f"{name}: tells of {ends[-1]:,} tokens of {dtype.itemsize} bytes, but the .bin has {bin_bytes:,} bytes: "
            "one of them was truncated, or they do not belong together"
        )
    if not num_documents or [documents[0], documents[-1]] != [0, num_sequences] or (np.diff(documents) < 0).any():
        raise ConfigurationError(f"{name}: its documents do not agree with its sequences")
    return dtype, ends[documents]
