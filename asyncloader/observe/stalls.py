"""Whether a thread gets the cores that it could use."""

from __future__ import annotations

from pathlib import Path

_FILE = Path("/proc/thread-self/schedstat")


def stalled_s() -> float:
    """Return how long the calling thread was ready to run while its cores were given to others. Elsewhere than Linux 0.

    Seconds since it began. The kernel is asked, which takes 20 to 100 us.
    """
    try:
        return int(_FILE.read_text().split()[1]) * 1e-9
    except (OSError, IndexError, ValueError):
        return 0.0
