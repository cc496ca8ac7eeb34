"""Workers that were lost: the pauses before their successors start, and the words for what happened.

A worker that dies, or is killed because it hung, is replaced at once. If one is lost after the other with no outcome of
any worker between them, starting more would only keep the machine busy: then a worker rests before it gets its next
process, longer each time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from asyncloader.engine.actions import Ticket
from asyncloader.errors import WorkerStartError, describe_death, died
from asyncloader.workers.backend import Worker

_CALM_LOSSES = 2
"""So many losses beyond one for each worker, with no outcome between them, are no reason to wait."""

_FIRST_REST_S = 0.02
_LONGEST_REST_S = 1.0
"""From then on a worker waits for its next process: at first this long, each time twice as long, at most so long."""


class Backoff:
    """Keeps the workers that wait for their next process. On the loop thread.

    Args:
        loop: Whose timers end the rests.
        num_workers: Of the session.
        end: Called with the worker whose rest is over.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, num_workers: int, end: Callable[[int], None]) -> None:
        self._loop = loop
        self._num_workers = num_workers
        self._end = end
        self._losses = 0  # since the last outcome of any worker
        self._timers: dict[int, asyncio.TimerHandle] = {}

    def reset(self) -> None:
        """A worker has come to an outcome."""
        self._losses = 0

    def begin(self, worker: int) -> bool:
        """Count a lost worker, and let it rest if it is one of many; whether it does."""
        self._losses += 1
        excess = self._losses - self._num_workers - _CALM_LOSSES
        if excess <= 0:
            return False
        delay_s = min(_FIRST_REST_S * 2.0 ** (excess - 1), _LONGEST_REST_S)
        self._timers[worker] = self._loop.call_later(delay_s, self._over, worker)
        return True

    def _over(self, worker: int) -> None:
        del self._timers[worker]
        self._end(worker)

    def stop(self) -> list[int]:
        """End all rests without a word; return who rested."""
        resting = list(self._timers)
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        return resting


def explain_death(process: Worker, tickets: list[Ticket]) -> Exception:
    """Make the error for tickets that are given up because their worker died."""
    return died(
        process.pid,
        process.exitcode,
        [ticket.keys for ticket in tickets],
        tickets[0].tries if tickets else 1,
        process.output.decode(errors="replace"),
    )


def explain_failed_starts(process: Worker, count: int) -> WorkerStartError:
    """Make the error for so many workers in a row that ended before they could take a batch."""
    output = f"\nLast words of the worker:\n{process.output.decode(errors='replace')}" if process.output else ""
    return WorkerStartError(
        f"Workers end before they can take a batch ({count} in a row); the last one: "
        f"{describe_death(process.pid, process.exitcode)}{output}"
    )


def explain_no_start(process: Worker) -> WorkerStartError:
    """Make the error for a worker that ended before any of the loader's work began, as every other would."""
    said = process.output.decode(errors="replace").strip()
    why = said or (
        "The traceback is on stderr. Where processes are not forked they import asyncloader and the main module again: "
        'does that run something outside of `if __name__ == "__main__"`?'
    )
    code = process.exitcode
    return WorkerStartError(f"DataLoader worker (pid {process.pid}) ended with exit code {code} at its start. {why}")
