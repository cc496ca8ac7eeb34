"""Whether batches are the same, for tests that do not ask where they differ."""

from typing import Any

from asyncloader.testing.comparison import difference


def same(one: Any, other: Any) -> bool:
    """Compare two batches, through all containers."""
    return difference(one, other) is None
