"""How much memory a worker has to itself, as it tells with each batch.

/proc/self/smaps_rollup ── at most once a second, between two batches ──> PrivateBytes ──> Record

Where the worker has a bound, that is too seldom: a fast leak takes a gigabyte a second. Then the first look comes after
the first batch, and the next ones whenever the worker's anonymous memory has grown by a sixteenth of the bound. That is
read with each batch, once a millisecond at most, since it costs 10 us; but it counts pages that a forked worker shares
with the trainer, so only its growth says something.
"""

from __future__ import annotations

import os
from pathlib import Path
from time import perf_counter

_LOOK_S = 1.0
_SHARE = 100
"""At most one part in so many of the time goes into looking: the kernel goes through all pages."""
_STEPS = 16
"""A worker that has a bound looks whenever it has grown by one part in so many of that."""


class PrivateBytes:
    """The private memory of the calling process, as of a look that is not much older than a second.

    Args:
        folder: The folder of the process in /proc.
        bound: What the process may have; None if it has no bound.
    """

    def __init__(self, folder: Path = Path("/proc/self"), bound: int | None = None) -> None:
        self._folder = folder
        self._step = None if bound is None else bound // _STEPS
        self._look_at = 0  # anonymous memory at which a process with a bound looks
        self._bytes = 0
        self._due = 0.0

    def take(self, now: float) -> int:
        """Return the bytes.

        Without a bound, 0 in the first second, in which other workers are started and first batches are waited for.

        Args:
            now: On `time.perf_counter`, seconds.
        """
        if self._step is not None and (anonymous := anonymous_bytes(self._folder) or 0) >= self._look_at:
            self._look(now)
            self._look_at = anonymous + self._step
        elif not self._due:
            self._due = now + _LOOK_S
        elif now >= self._due:
            self._look(now)
        return self._bytes

    def _look(self, now: float) -> None:
        self._bytes = private_bytes(self._folder) or 0
        self._due = now + max(_LOOK_S, _SHARE * (perf_counter() - now))


def private_bytes(folder: Path = Path("/proc/self")) -> int | None:
    """Return the memory that a process has to itself, which goes back when it ends; None where nobody says so.

    Not what is resident: a forked worker shares nearly all of that with the trainer, and what it has mapped of files
    and of shared memory is nobody's alone. Where the kernel does not tell such pages apart (before Linux 4.14, and in
    some sandboxes) those that are shared with the trainer are in it.

    Args:
        folder: The folder of the process in /proc.
    """
    try:
        lines = (folder / "smaps_rollup").read_text().splitlines()[1:]
        sizes = {
            name: int(rest.split()[0]) * 1024
            for name, _, rest in (line.partition(":") for line in lines if ":" in line)
        }
    except (OSError, ValueError, IndexError):
        return anonymous_bytes(folder)
    # Shared memory that only this process has touched so far is dirty and private as well, but not anonymous; of the
    # trainer's pages that a forked worker has not written to its share is anonymous, and not private.
    private = sizes.get("Private_Dirty", 0)
    return min(private, sizes.get("Pss_Anon", private)) + sizes.get("SwapPss", 0) + sizes.get("Private_Hugetlb", 0)


def anonymous_bytes(folder: Path) -> int | None:
    """Return the memory of a process that is of no file and not shared on purpose; None where nobody says so."""
    try:
        _, resident, shared, *_ = map(int, (folder / "statm").read_text().split())
    except (OSError, ValueError):  # no Linux
        return None
    return max(0, resident - shared) * os.sysconf("SC_PAGE_SIZE")
