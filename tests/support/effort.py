"""Whether this run is one before a commit, which leaves slow tests out, and what such a run does less of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

is_quick = False  # set before tests are imported


def examples(count: int) -> int:
    """Return how many examples Hypothesis plays in this run, where each takes long: all of so many, or a third."""
    return count // 3 if is_quick else count


def half(places: Sequence[T], turn: int) -> Sequence[T]:
    """Return all, or before a commit every second one: from the first on at even turns, from the second on at odd."""
    return places[turn % 2 :: 2] if is_quick else places
