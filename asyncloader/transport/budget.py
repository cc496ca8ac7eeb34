"""How much memory slabs may take: half of what the machine, and every cgroup around the process, could still give.

A cgroup at its limit does not fail an allocation, it kills, and perhaps the trainer. So slabs stay well below it, and
what does not fit goes through the channel.
"""

from __future__ import annotations

from time import monotonic

from asyncloader import machine

_FRESH_S = 1.0  # the files are read again after so many seconds: 0.1 ms


class Budget:
    """The bytes that may be reserved in all, looked up again now and then while memory is asked for."""

    def __init__(self) -> None:
        self._available = 0
        self._read_at = -_FRESH_S

    def limit(self, reserved: int) -> int:
        """Return the bytes that slabs may take, those `reserved` included."""
        now = monotonic()
        if now - self._read_at >= _FRESH_S:
            self._available, self._read_at = machine.available_bytes() + reserved, now
        return self._available // 2
