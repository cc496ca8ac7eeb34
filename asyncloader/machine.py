"""The cores and the memory of the machine that this process may use, as every cgroup around it allows.

A cgroup that limits a process may be its own or any above it (a pod limits what its containers do not), in the files of
version 1 or 2. Each function reads files below ``root``, which is another folder in tests.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HAS_WORKER_PROCESSES = hasattr(os, "pidfd_open")
"""Whether the kernel says when a process ends that may be nobody's child. macOS does not."""

_KIB = 1024
_UNLIMITED_BYTES = 1 << 60
_UNLIMITED_CORES = 1e6


@functools.cache
def usable_cores(root: Path = Path("/")) -> int:
    """Return how many cores it is bound to, or how many the cgroups around it allow; a share of one counts as one."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = (
        _cores(group / "cpu.max") if version == 2 else _cores(group / "cpu.cfs_quota_us", group / "cpu.cfs_period_us")
        for version, group in _cgroups(root, "cpu")
    )
    return max(1, min([bound, *map(math.ceil, quotas)]))


def cores_of_rank() -> int:
    """Return how many of these cores are this process's share, where a launcher has started several ranks here."""
    for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE"):
        if (ranks := os.environ.get(name, "")).isdecimal() and int(ranks):
            return max(1, usable_cores() // int(ranks))
    return usable_cores()


class MemoryLimit(NamedTuple):
    """Memory that something allows.

    Attributes:
        what: "the machine", or the folder of a cgroup.
        left_bytes: Bytes that could be allocated still; may be less than 0.
        limit_bytes: In all.
    """

    what: str
    left_bytes: int
    limit_bytes: int


def memory_limits(root: Path = Path("/")) -> list[MemoryLimit]:
    """Return what bounds the memory of this process: the machine, and each cgroup around it that has a limit."""
    limited = (
        _limit_of(group, "memory.max", "memory.current", "")
        if version == 2
        else _limit_of(group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        for version, group in _cgroups(root, "memory")
    )
    return [MemoryLimit("the machine", _machine_bytes(root), total_bytes()), *filter(None, limited)]


def available_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that could be allocated here: the least of what machine and cgroups have left."""
    return max(0, min(limit.left_bytes for limit in memory_limits(root)))


def total_bytes() -> int:
    """Return the memory of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cgroups(root: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """Yield version and folder of each cgroup from ours to the root (in a container the path may be the host's)."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # no Linux
        return
    for line in filter(None, lines):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            version, mount = 2, root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            version, mount = 1, root / "sys/fs/cgroup" / controller
        else:
            continue
        parts = [part for part in path.split("/") if part]
        for depth in range(len(parts), -1, -1):
            yield version, mount.joinpath(*parts[:depth])


def _cores(*files: Path) -> float:
    """Return a CPU quota in cores."""
    try:
        quota, period = " ".join(file.read_text() for file in files).split()
        return float(quota) / float(period) if quota != "max" and float(quota) > 0 else _UNLIMITED_CORES
    except (OSError, ValueError):
        return _UNLIMITED_CORES


def _machine_bytes(root: Path) -> int:
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * _KIB
    except OSError:  # no Linux
        pass
    return total_bytes() // 2


def _limit_of(group: Path, limit_name: str, usage_name: str, prefix: str) -> MemoryLimit | None:
    """Return what a cgroup allows; None if it has no limit."""
    try:
        limit = (group / limit_name).read_text().strip()
        if limit == "max" or int(limit) >= _UNLIMITED_BYTES:
            return None
        used = int((group / usage_name).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        left = int(limit) - used + int(stat.get(f"{prefix}inactive_file", 0))  # it is given up when memory is wanted
        return MemoryLimit(str(group), left, int(limit))
    except (OSError, ValueError):
        return None
