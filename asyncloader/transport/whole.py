"""A batch that was fetched as a whole: there are no samples to collate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

Gather: TypeAlias = "Callable[[torch.Tensor, NDArray[np.int64]], torch.Tensor]"
"""Returns these rows of a tensor, as a tensor that is a copy, in memory of its own choice."""


class Whole:
    """A batch in the place of its samples. Has the number of samples as its length.

    Args:
        count: How many samples there are.
        make: Makes the batch.
    """

    def __init__(self, count: int, make: Callable[[Gather], Any]) -> None:
        self._count = count
        self.batch = make

    def __len__(self) -> int:
        return self._count
