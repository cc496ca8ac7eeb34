"""How many bytes a batch has that was handed over without being encoded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

_OVERHEAD = 64


def batch_bytes(batch: Any) -> int:
    """Return the bytes of the tensors, arrays and strings in a nested batch; a guess for everything else."""
    if isinstance(batch, (torch.Tensor, np.ndarray)):
        return _OVERHEAD + int(batch.nbytes)
    if isinstance(batch, (bytes, bytearray, str)):
        return _OVERHEAD + len(batch)
    if isinstance(batch, Mapping):
        return _OVERHEAD + sum(map(batch_bytes, batch.values()))
    if isinstance(batch, (list, tuple)):
        return _OVERHEAD + sum(map(batch_bytes, batch))
    return _OVERHEAD
