r"""Megatron's index of a file of tokens: `NAME.idx` beside `NAME.bin`.

    "MMIDIDX\0\0" | version 1, u64 | dtype, u8 | sequences, u64 | documents + 1, u64
    lengths of the sequences, i32 each | where they begin in the .bin, in bytes, i64 each | ...

Source: megatron/core/datasets/indexed_dataset.py of NVIDIA's Megatron-LM.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from asyncloader.datasets.source import Part, read_local, version_of
from asyncloader.errors import ConfigurationError

_MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<9sQBQQ")
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floats, which no tokens are


def read_index(name: str, bin_bytes: int) -> np.dtype[Any]:
    """Return the dtype that an index names, and check it against the length of its file of tokens.

    Args:
        name: The path of the index.
        bin_bytes: How long the .bin is.

    Raises:
        ConfigurationError: The file is not there, no such index, damaged, or belongs to another file.
    """
    try:
        size = version_of(name).size
    except FileNotFoundError as error:
        raise ConfigurationError(f"{name}: is not there; for flat files, without it, say dtype") from error
    head = read_local(Part(name, 0, min(size, _HEAD.size)))
    magic, version, code, num_sequences, num_documents = _HEAD.unpack(head.ljust(_HEAD.size, b"\0"))
    if magic != _MAGIC or version != 1 or code not in _DTYPES:
        raise ConfigurationError(
            f"{name}: no index of Megatron's, of version 1 and a dtype of whole numbers: it begins with {magic!r}, "
            f"version {version}, dtype {code}"
        )
    if size < (needed := _HEAD.size + 12 * num_sequences + 8 * num_documents):
        raise ConfigurationError(f"{name}: truncated: ends at byte {size:,} of {needed:,}")
    dtype = np.dtype(_DTYPES[code])
    lengths = np.frombuffer(read_local(Part(name, _HEAD.size, _HEAD.size + 4 * num_sequences)), "<i4")
    tokens = int(lengths.sum(dtype=np.int64))
    if tokens * dtype.itemsize != bin_bytes:
        raise ConfigurationError(
            f"{name}: tells of {tokens:,} tokens of {dtype.itemsize} bytes, but the .bin has {bin_bytes:,} bytes: "
            "one of them was truncated, or they do not belong together"
        )
    return dtype
