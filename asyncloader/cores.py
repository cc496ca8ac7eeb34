"""How many cores this process may use: those it is bound to, and what the cgroups around it allow."""

from __future__ import annotations

import functools
import os
from pathlib import Path


@functools.cache
def usable_cores(root: Path = Path("/")) -> int:
    """Return the number of cores, a share of one counted as one.

    Args:
        root: of the file system that is read, another one in tests.
    """
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(bound, -int(-_quota(root) // 1)))


def _quota(root: Path) -> float:
    """The least CPU quota of any cgroup from ours to the root, in cores, in the files of version 2 or 1."""
    least = float("inf")
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # no Linux
        return 1e6
    for line in filter(None, lines):
        _, controllers, path = line.split(":", 2)
        parts = [part for part in path.split("/") if part]
        for depth in range(len(parts) + 1):
            group = "/".join(parts[:depth])
            if not controllers:
                least = min(least, _cores(root / "sys/fs/cgroup" / group / "cpu.max"))
            elif "cpu" in controllers.split(","):
                folder = root / "sys/fs/cgroup/cpu" / group
                least = min(least, _cores(folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us"))
    return min(least, 1e6)


def _cores(*files: Path) -> float:
    try:
        quota, period = " ".join(file.read_text() for file in files).split()
        return float(quota) / float(period) if quota != "max" and float(quota) > 0 else float("inf")
    except (OSError, ValueError):
        return float("inf")
