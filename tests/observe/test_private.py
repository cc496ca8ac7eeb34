"""How much memory workers have to themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncloader.observe import private
from asyncloader.observe.private import PrivateBytes


def test_a_worker_looks_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its first batch, then once a second; or less often where a look takes long."""
    looks: list[Any] = []
    clock = [0.0]

    def look(folder: Path) -> int | None:
        looks.append(folder)
        clock[0] += 0.05
        return 100 * len(looks)

    monkeypatch.setattr(private, "private_bytes", look)
    monkeypatch.setattr(private, "perf_counter", lambda: clock[0])
    memory = PrivateBytes(tmp_path)
    told = []
    for _ in range(6):
        told.append(memory.take(clock[0]))
        clock[0] += 2.0
    assert told == [0, 100, 100, 100, 200, 200]
    assert looks == [tmp_path] * 2


def test_a_worker_with_a_bound_looks_whenever_it_has_grown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its first batch, then after each sixteenth of the bound, and once a second; not for what comes and goes."""
    anonymous = [500]  # of which 450 are shared with the trainer
    looks: list[int] = []

    def look(folder: Path) -> int:
        looks.append(anonymous[0] - 450)
        return looks[-1]

    monkeypatch.setattr(private, "private_bytes", look)
    monkeypatch.setattr(private, "anonymous_bytes", lambda folder: anonymous[0])
    monkeypatch.setattr(private, "perf_counter", lambda: 0.0)
    memory = PrivateBytes(tmp_path, bound=160)
    told = []
    for now, size in ((0.1, 500), (0.2, 509), (0.3, 510), (0.4, 525), (0.5, 510), (0.6, 534), (0.7, 535), (1.8, 520)):
        anonymous[0] = size
        told.append(memory.take(now))
    assert told == [50, 50, 60, 75, 75, 75, 85, 70]
    assert looks == [50, 60, 75, 85, 70]
