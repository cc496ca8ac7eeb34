"""How much memory slabs may take: half of what the machine, and every cgroup around the process, could still give.

A cgroup at its limit does not fail an allocation, it kills, and perhaps the trainer. So slabs stay well below it, and
what does not fit goes through the channel.
"""

from __future__ import annotations

import os
from pathlib import Path
from time import monotonic

_KIB = 1024
_FRESH_S = 1.0  # the files are read again after so many seconds: 0.1 ms
_UNLIMITED = 1 << 60


class Budget:
    """The bytes that may be reserved in all, looked up again now and then while memory is asked for."""

    def __init__(self) -> None:
        self._available = 0
        self._read_at = -_FRESH_S

    def limit(self, reserved: int) -> int:
        """Return the bytes that slabs may take, those `reserved` included."""
        now = monotonic()
        if now - self._read_at >= _FRESH_S:
            self._available, self._read_at = available_bytes() + reserved, now
        return self._available // 2


class FixedBudget:
    """So many bytes, whatever the machine has."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def limit(self, reserved: int) -> int:
        """Return the bytes that slabs may take, those `reserved` included."""
        return self._nbytes


def available_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that could be allocated here: the least of what machine and cgroups have left.

    Args:
        root: of the file system that is read, another one in tests.
    """
    return max(0, min(_machine_bytes(root), _cgroup_bytes(root)))


def total_bytes() -> int:
    """Return the memory of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _machine_bytes(root: Path) -> int:
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * _KIB
    except OSError:  # no Linux
        pass
    return total_bytes() // 2


def _cgroup_bytes(root: Path) -> int:
    """The least that any cgroup from ours to the root has left, in the files of version 1 and of version 2."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return _UNLIMITED
    least = _UNLIMITED
    for line in filter(None, lines):
        number, controllers, path = line.split(":", 2)
        if number == "0":
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount, names = (
                root / "sys/fs/cgroup/memory",
                ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
            )
        else:
            continue
        least = min(least, *(_left(mount / group, *names) for group in _upwards(path)))
    return least


def _upwards(path: str) -> list[str]:
    """A cgroup and those above it, the root last (in a container the path may be one of the host)."""
    parts = path.strip("/").split("/")
    return ["/".join(parts[:n]) for n in range(len(parts), -1, -1)]


def _left(group: Path, limit_name: str, usage_name: str, cache_name: str) -> int:
    try:
        limit = (group / limit_name).read_text().strip()
        if limit == "max":
            return _UNLIMITED
        used = int((group / usage_name).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return int(limit) - used + int(stat.get(cache_name, 0))  # file cache is given up when memory is wanted
    except (OSError, ValueError):
        return _UNLIMITED
