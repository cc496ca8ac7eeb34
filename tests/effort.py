"""Whether this run is one before a commit, which leaves slow tests out, and what such a run does less of."""

from __future__ import annotations

is_quick = False  # set before tests are imported


def examples(count: int) -> int:
    """Return how many examples Hypothesis plays in this run, where each takes long: all of so many, or a third."""
    return count // 3 if is_quick else count
