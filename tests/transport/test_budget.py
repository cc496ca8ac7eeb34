"""The budget: half of what machine and cgroups have left, in every way that they say so."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncloader.transport import budget
from asyncloader.transport.budget import Budget, available_bytes

GIB = 1 << 30


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with 16 GiB available and no limits."""
    write(tmp_path / "proc/meminfo", f"MemTotal: 99 kB\nMemAvailable:   {16 * GIB // 1024} kB")
    write(tmp_path / "proc/self/cgroup", "0::/")
    return tmp_path


def write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{content}\n")


def limit_v2(folder: Path, limit: object, used: int, cache: int = 0) -> None:
    write(folder / "memory.max", limit)
    write(folder / "memory.current", used)
    write(folder / "memory.stat", f"anon 1\ninactive_file {cache}")


def limit_v1(folder: Path, limit: int, used: int, cache: int = 0) -> None:
    write(folder / "memory.limit_in_bytes", limit)
    write(folder / "memory.usage_in_bytes", used)
    write(folder / "memory.stat", f"total_inactive_file {cache}")


def test_without_limits_it_is_what_the_machine_has(root: Path) -> None:
    """MemAvailable."""
    assert available_bytes(root) == 16 * GIB


def test_a_cgroup_of_version_2(root: Path) -> None:
    """What is used counts, the file cache does not; `max` is no limit."""
    write(root / "proc/self/cgroup", "0::/a/b")
    limit_v2(root / "sys/fs/cgroup/a/b", "max", GIB)
    assert available_bytes(root) == 16 * GIB
    limit_v2(root / "sys/fs/cgroup/a/b", 4 * GIB, 3 * GIB, cache=GIB)
    assert available_bytes(root) == 2 * GIB


def test_a_limit_further_up_counts(root: Path) -> None:
    """A pod may limit what its containers do not."""
    write(root / "proc/self/cgroup", "0::/a/b")
    limit_v2(root / "sys/fs/cgroup/a/b", 4 * GIB, 0)
    limit_v2(root / "sys/fs/cgroup/a", 3 * GIB, 2 * GIB)
    assert available_bytes(root) == GIB


def test_a_cgroup_of_version_1(root: Path) -> None:
    """The line that names the memory controller counts."""
    write(root / "proc/self/cgroup", "5:cpu:/x\n4:memory:/a\n0::/")
    limit_v1(root / "sys/fs/cgroup/memory/a", 2 * GIB, GIB)
    assert available_bytes(root) == GIB


def test_inside_a_container(root: Path) -> None:
    """The path is the host's, and what limits us is at the root of what is mounted."""
    write(root / "proc/self/cgroup", "4:memory:/docker/0123")
    limit_v1(root / "sys/fs/cgroup/memory", 2 * GIB, GIB)
    assert available_bytes(root) == GIB


def test_over_the_limit_there_is_nothing(root: Path) -> None:
    """And not less than nothing."""
    limit_v2(root / "sys/fs/cgroup", GIB, 2 * GIB)
    assert available_bytes(root) == 0


def test_where_there_is_no_proc(tmp_path: Path) -> None:
    """Half of the machine's memory."""
    assert available_bytes(tmp_path) == budget.total_bytes() // 2


def test_half_of_it_and_what_is_reserved_counts_as_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the limit stays where it is while slabs grow."""
    monkeypatch.setattr(budget, "available_bytes", lambda: 8 * GIB)
    assert Budget().limit(0) == 4 * GIB
    monkeypatch.setattr(budget, "available_bytes", lambda: 5 * GIB)
    assert Budget().limit(3 * GIB) == 4 * GIB


def test_it_is_looked_up_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer may need more as time goes by."""
    now = [0.0]
    monkeypatch.setattr(budget, "monotonic", lambda: now[0])
    monkeypatch.setattr(budget, "available_bytes", lambda: int(8 * GIB - now[0] * GIB))
    made = Budget()
    assert made.limit(0) == 4 * GIB
    now[0] = 0.5
    assert made.limit(0) == 4 * GIB
    now[0] = 2.0
    assert made.limit(0) == 3 * GIB


def test_this_machine_has_some() -> None:
    """Whatever it is."""
    assert 0 < available_bytes() <= budget.total_bytes()
