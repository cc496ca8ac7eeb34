"""Which sample of a batch keeps it from being collated. For errors only.

torch's default collation itself is asked. It takes samples in order, so it fails for all beginnings of the batch that
have the odd sample in them.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

from torch.utils.data import default_collate


def find_odd_sample(samples: list[Any]) -> int | None:
    """Return the position of the sample that torch's default collation has failed for; None if it fails for none."""
    position = bisect_left(range(1, len(samples) + 1), 1, key=lambda number: not _can_be_collated(samples[:number]))
    if position == 1 and len(samples) > 2 and _can_be_collated(samples[1:3]):
        return 0  # the first sample differs from the others
    return position if position < len(samples) else None


def _can_be_collated(samples: list[Any]) -> bool:
    try:
        default_collate(samples)
    except Exception:
        return False
    return True
