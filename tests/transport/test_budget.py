"""The budget: half of what machine and cgroups have left, looked up now and then."""

from __future__ import annotations

import pytest

from asyncloader import machine
from asyncloader.transport import budget
from asyncloader.transport.budget import Budget

GIB = 1 << 30


def test_half_of_it_and_what_is_reserved_counts_as_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the limit stays where it is while slabs grow."""
    monkeypatch.setattr(machine, "available_bytes", lambda: 8 * GIB)
    assert Budget().limit(0) == 4 * GIB
    monkeypatch.setattr(machine, "available_bytes", lambda: 5 * GIB)
    assert Budget().limit(3 * GIB) == 4 * GIB


def test_it_is_looked_up_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer may need more as time goes by."""
    now = [0.0]
    monkeypatch.setattr(budget, "monotonic", lambda: now[0])
    monkeypatch.setattr(machine, "available_bytes", lambda: int(8 * GIB - now[0] * GIB))
    made = Budget()
    assert made.limit(0) == 4 * GIB
    now[0] = 0.5
    assert made.limit(0) == 4 * GIB
    now[0] = 2.0
    assert made.limit(0) == 3 * GIB
