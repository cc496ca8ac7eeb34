"""Which combinations of a test's parameters run before every commit; the others are slow.

    @pytest.mark.covering(2)             # every pair of values comes in some combination ("pairwise")
    @pytest.mark.covering(1)             # every value comes in some combination

Most defects need one value, nearly all need two: the full product finds few more, and takes several times as long. It
runs each night. The choice is the same in every run, and in every process of a run.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import pytest


def cover(combinations: Sequence[Mapping[str, Hashable]], strength: int) -> list[int]:
    """Choose combinations that have among them all that any has: each value (strength 1), or each pair of values (2).

    Args:
        combinations: Values by the name of the parameter; all have the same names.
        strength: How many values have to come together.

    Returns:
        The places of those that are chosen. Of equal ones it is the one whose values have been chosen least often.
    """
    assert all(strength <= len(values) for values in combinations), "there are no such combinations"
    parts = [frozenset(itertools.combinations(sorted(values.items()), strength)) for values in combinations]
    missing = set().union(*parts)
    used: Counter[Any] = Counter()
    chosen = []
    while missing:
        best = max(
            range(len(parts)),
            key=lambda place: (
                len(parts[place] & missing),
                -sum(used[value] for value in combinations[place].items()),
            ),
        )
        chosen.append(best)
        missing -= parts[best]
        used.update(combinations[best].items())
    return sorted(chosen)


def mark_the_rest_slow(items: Iterable[pytest.Item]) -> None:
    """Mark those tests slow that are left over where a function is marked `covering`."""
    functions: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("covering") and not item.get_closest_marker("slow"):
            functions[item.nodeid.partition("[")[0]].append(item)
    for tests in functions.values():
        (strength,) = tests[0].get_closest_marker("covering").args  # type: ignore[union-attr]
        values = [test.callspec.params for test in tests]  # type: ignore[attr-defined]
        chosen = set(cover([{name: id(value) for name, value in each.items()} for each in values], strength))
        for place, test in enumerate(tests):
            if place not in chosen:
                test.add_marker(pytest.mark.slow)
