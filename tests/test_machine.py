"""What machine and cgroups allow, in every way that they say so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from asyncloader.machine import MemoryLimit, available_bytes, memory_limits, total_bytes, usable_cores

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
    assert available_bytes(tmp_path) == total_bytes() // 2


def test_this_machine_has_some() -> None:
    """Whatever it is."""
    assert 0 < available_bytes() <= total_bytes()


def test_each_limit_is_told(root: Path) -> None:
    """The machine's, and that of each cgroup that has one; files that nobody uses are given up."""
    write(root / "proc/self/cgroup", "0::/a/b")
    limit_v2(root / "sys/fs/cgroup/a/b", "max", GIB)
    limit_v2(root / "sys/fs/cgroup/a", 3 * GIB, 2 * GIB)
    write(root / "sys/fs/cgroup/a/memory.stat", f"inactive_file {GIB // 2}\nactive_file {GIB // 4}")
    machine, group = memory_limits(root)
    assert machine == MemoryLimit("the machine", 16 * GIB, total_bytes())
    assert group == MemoryLimit(str(root / "sys/fs/cgroup/a"), 3 * GIB // 2, 3 * GIB)


@pytest.mark.parametrize(
    ("lines", "files", "cores"),
    [
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "100000 100000", "cpu.max": "max 100000"}, 1),
        ("0::/a", {"a/cpu.max": "30000 100000"}, 1),
        ("4:cpu,cpuacct:/a\n0::/", {"cpu/a/cpu.cfs_quota_us": "50000", "cpu/a/cpu.cfs_period_us": "100000"}, 1),
        ("4:cpu,cpuacct:/a\n0::/", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, None),
        ("0::/a", {"a/cpu.max": "nonsense"}, None),
        ("", {}, None),
    ],
    ids=["further up", "share of one", "version 1", "version 1 without", "unreadable", "no cgroup"],
)
def test_cores(tmp_path: Path, lines: str, files: dict[str, str], cores: int | None) -> None:
    """The least quota of any cgroup around the process, and never more than it is bound to."""
    write(tmp_path / "proc/self/cgroup", lines)
    for name, content in files.items():
        write(tmp_path / "sys/fs/cgroup" / name, content)
    assert usable_cores(tmp_path) == (cores or len(os.sched_getaffinity(0)))
