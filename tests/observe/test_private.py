"""How much memory workers have to themselves."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from asyncloader.observe import private
from asyncloader.observe.private import PrivateBytes, private_bytes


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


ROLLUP = """55d0c0000000-7ffd00000000 ---p 00000000 00:00 0    [rollup]
Rss:              500000 kB
Pss_Anon:          {anonymous} kB
Pss_Shmem:         90000 kB
Private_Clean:     30000 kB
Private_Dirty:     {dirty} kB
SwapPss:             500 kB
"""


@pytest.mark.parametrize(
    ("anonymous", "dirty", "kib"),
    [(40_000, 30_000, 30_500), (40_000, 90_000, 40_500)],
    ids=["pages of the trainer's are shared", "shared memory that nobody else has touched"],
)
def test_memory_that_a_process_has_to_itself(tmp_path: Path, anonymous: int, dirty: int, kib: int) -> None:
    """Neither what a fork shares with the trainer, nor shared memory, nor files that are mapped."""
    (tmp_path / "smaps_rollup").write_text(ROLLUP.format(anonymous=anonymous, dirty=dirty))
    assert private_bytes(tmp_path) == kib * 1024


def test_memory_where_the_kernel_says_less(tmp_path: Path) -> None:
    """What is resident and of no file; nothing where there is no /proc."""
    assert private_bytes(tmp_path) is None
    (tmp_path / "statm").write_text("5000 3000 1000 1 0 2000 0")
    assert private_bytes(tmp_path) == 2000 * os.sysconf("SC_PAGE_SIZE")


def test_memory_of_this_process() -> None:
    """It is told here, and grows with what is written."""
    before = private_bytes()
    assert before is not None
    kept = bytearray(os.urandom(1 << 10)) * (32 << 10)
    after = private_bytes()
    assert after is not None
    assert after - before > len(kept) // 2
