"""What this process may use of the machine: cores and memory, as every cgroup around it allows.

A cgroup that limits a process may be its own or any above it (a pod limits what its containers do not), in the files of
version 1 or 2. Each function reads files below ``root``, which is another folder in tests.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterator
from pathlib import Path

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


def available_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that could be allocated here: the least of what machine and cgroups have left."""
    left = (
        _left(group, "memory.max", "memory.current", "inactive_file")
        if version == 2
        else _left(group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        for version, group in _cgroups(root, "memory")
    )
    return max(0, min([_machine_bytes(root), *left]))


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


def _left(group: Path, limit_name: str, usage_name: str, cache_name: str) -> int:
    try:
        limit = (group / limit_name).read_text().strip()
        if limit == "max":
            return _UNLIMITED_BYTES
        used = int((group / usage_name).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return int(limit) - used + int(stat.get(cache_name, 0))  # file cache is given up when memory is wanted
    except (OSError, ValueError):
        return _UNLIMITED_BYTES
