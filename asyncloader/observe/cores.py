"""How many cores this process may use, and whether it gets them."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from time import perf_counter


@functools.cache
def usable_cores(root: Path = Path("/")) -> int:
    """Return how many cores it is bound to, or how many the cgroups around it allow; a share of one counts as one.

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


class Stalls:
    """How long the calling thread was ready to run while its cores were given to others. Linux; elsewhere 0.

    The kernel's figure is read at most every 0.1 s, when nobody waits for the caller: it takes 20 to 100 us.
    """

    def __init__(self) -> None:
        self._file = Path("/proc/thread-self/schedstat")
        self._read_at = perf_counter()
        self._total_s = self._read()
        self._new_s = 0.0

    def look(self) -> None:
        """Read the kernel's figure if that was long ago."""
        now = perf_counter()
        if now - self._read_at >= 0.1:
            self._read_at = now
            before, self._total_s = self._total_s, self._read()
            self._new_s += self._total_s - before

    def take(self) -> float:
        """Return the seconds that came to light since the last call."""
        new_s, self._new_s = self._new_s, 0.0
        return new_s

    def _read(self) -> float:
        try:
            return int(self._file.read_text().split()[1]) * 1e-9
        except (OSError, IndexError, ValueError):
            return 0.0
