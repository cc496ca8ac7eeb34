"""Whether this run is one before a commit, which leaves slow tests out, and what such a run does less of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

is_quick = False  # set before tests are imported


def examples(count: int) -> int:
    """Return how many examples Hypothesis plays in this run, where each takes long: all of so many, or a third."""
    return count // 3 if is_quick else count


def share(places: Sequence[T], turn: int, of: int = 2) -> Sequence[T]:
    """Return all, or before a commit one in so many: from the first on, at the next turn from the second on."""
    return places[turn % of :: of] if is_quick else places
