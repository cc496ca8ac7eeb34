"""Tell of memory that runs out, before the kernel kills somebody for it.

look ── once a second, while batches come ──> what machine and cgroups have left ── little ──> a line for the log
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from asyncloader.machine import MemoryLimit, memory_limits

LOOK_S = 1.0
_FEW = 20  # one part in so many of a limit
_LEAST_BYTES = 2 << 30  # or so much, where that is less
_CALM = 2  # it is told again when there was so many times as much meanwhile
_MOST_SHOWN = 8


class MemoryWatch:
    """Looks after what is left. Owned by the loop thread.

    Args:
        look: Returns what bounds memory.
    """

    def __init__(self, look: Callable[[], Sequence[MemoryLimit]] = memory_limits) -> None:
        self._look = look
        self._told: set[str] = set()

    def look(self, private: Mapping[int, int]) -> str:
        """Return what the user is to be told now; mostly "". Takes 0.1 ms.

        Args:
            private: By worker, the bytes that it has to itself, as far as they are known.
        """
        told = ""
        for limit in self._look():
            least, left = min(limit.limit_bytes // _FEW, _LEAST_BYTES), limit.left_bytes + limit.cache_bytes
            if left >= _CALM * least:
                self._told.discard(limit.what)
            elif left < least and limit.what not in self._told:
                self._told.add(limit.what)
                told = told or _words(limit, max(0, left), private)
        return told


def _words(limit: MemoryLimit, left: int, private: Mapping[int, int]) -> str:
    words = (
        f"Memory runs out: {limit.what} has {show_bytes(left)} left of "
        f"{show_bytes(limit.limit_bytes)}. A process that takes more may be killed."
    )
    known = sorted(((taken, worker) for worker, taken in private.items() if taken), reverse=True)
    if known:
        shown = ", ".join(f"worker {worker} {show_bytes(taken)}" for taken, worker in known[:_MOST_SHOWN])
        words += f" Of that workers have to themselves: {shown}{', ...' * (len(known) > _MOST_SHOWN)}."
    return (
        f"{words} Workers that grow are renewed by max_worker_memory= or max_tasks_per_child=; fewer workers, and a "
        "smaller prefetch_factor and max_buffered_bytes, take less."
    )


def show_bytes(count: float) -> str:
    """Write down a number of bytes with two or three digits, in a unit that suits it."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6)):
        if count >= factor:
            value = count / factor
            return f"{value:.{0 if value >= 100 else 1}f} {unit}"
    return f"{count / 1e3:.0f} kB"
