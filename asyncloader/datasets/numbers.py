"""Numbers of samples, as samplers and users name them."""

from __future__ import annotations

import operator
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


def counted(indices: Iterable[int], length: int, what: str) -> NDArray[np.int64]:
    """Return the numbers of some samples, those that were counted from the end from the beginning.

    Args:
        indices: The numbers.
        length: How many samples there are.
        what: The word for a sample in the error.

    Raises:
        IndexError: No sample has this number.
        TypeError: A number is not whole.
    """
    numbers = np.fromiter(map(operator.index, indices), np.int64)
    if (strays := numbers[(numbers < -length) | (numbers >= length)]).size:
        raise IndexError(f"there is no {what} {strays[0]}: there are {length:,}")
    return np.where(numbers < 0, numbers + length, numbers)
