"""What differs from torch on purpose: a list that grows with the tests that hold it, for the table in the docs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

Test = TypeVar("Test", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class Difference:
    """A line of the table: what torch does, what ours does, and why.

    Attributes:
        topic: What it is about.
        torch: What torch's DataLoader does.
        ours: What ours does.
        why: What users gain by it.
        instead: What gives torch's behaviour, where there is such a thing.
        test: The test that shows both sides.
    """

    topic: str
    torch: str
    ours: str
    why: str
    instead: str
    test: str


DIFFERENCES: list[Difference] = []


def differs(topic: str, *, torch: str, ours: str, why: str, instead: str = "") -> Callable[[Test], Test]:
    """Put a line into the table, next to the test that shows it."""

    def decorate(test: Test) -> Test:
        DIFFERENCES.append(Difference(topic, torch, ours, why, instead, test.__name__))
        return test

    return decorate


def table(differences: list[Difference]) -> str:
    """Write the list as a Markdown table."""
    rows = [f"| {d.topic} | {d.torch} | {d.ours} | {d.instead} |" for d in differences]
    return "\n".join(["| | torch | asyncloader | torch's way |", "|---|---|---|---|", *rows])
