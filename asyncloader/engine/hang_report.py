"""Say in the log what a batch waits for that has not come for long.

`HangWatch` decides when a wait is spoken of, without a loop or a clock; `report` speaks. A timer of the engine looks at
the consumers. A worker process that has the batch is watched for another second: in it the process has used CPU time,
or none.
"""

from __future__ import annotations

import math
import os
from asyncio import TimerHandle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from asyncloader.backends.backend import Backend
from asyncloader.backends.worker import Worker
from asyncloader.engine.actions import Ticket
from asyncloader.engine.run import Run
from asyncloader.errors import describe_batch
from asyncloader.log import log
from asyncloader.threads import kernel_stat

FIRST_S = 60.0
"""A shorter wait is never spoken of. Seconds."""

LOOK_S = 15.0
"""How often consumers are looked at. Seconds."""

_TIMES = 20
"""Nor is one that is shorter than so many times the work of the slowest batch."""

_WATCHED_S = 1.0
"""For so long a worker is watched before it is spoken of. Seconds."""

_IDLE_S = 0.02
"""A worker that uses no more CPU time in that second waits for something: the kernel counts in hundredths."""

_STATES = {
    "R": "It runs",
    "S": "It sleeps",
    "D": "It waits for a disk or a network drive",
    "T": "It was stopped by a signal (kill -CONT {pid} has it go on)",
}
"""The kernel's letters of what a process does."""

_FORKED = (
    " It was forked from this process, which has other threads. A forked worker has none of them, and a lock that one "
    "of them held stays locked there for ever. If the stack below is in a library with threads of its own, use "
    'DataLoader(..., multiprocessing_context="forkserver").'
)


class Activity(NamedTuple):
    """A process at one moment.

    Attributes:
        state: The kernel's letter for what it does.
        waits_in: The function of the kernel that it sleeps in; "" if it runs, or if the kernel keeps that to itself.
        cpu_s: CPU time that it has used. Seconds.
    """

    state: str
    waits_in: str
    cpu_s: float


class HangWatch:
    """The wait of consumers for the next batch, from look to look.

    A wait that was spoken of doubles the bound for the next one: a loader whose batches take long to arrive, and always
    did, is not spoken of at each of them.
    """

    def __init__(self) -> None:
        self._taken = -1
        self._since: float | None = None
        self._looked_at = 0.0
        self._slowest_s = 0.0
        self._reports = 0

    def look(self, now: float, taken: int, *, is_waiting: bool, slowest_s: float) -> float | None:
        """Look at the consumers.

        Time in which nobody looked does not count: this process was stopped, and its workers with it perhaps.

        Args:
            now: Seconds, of any clock.
            taken: Batches that consumers have taken.
            is_waiting: Some consumer waits at this moment.
            slowest_s: The work of the slowest batch so far. Seconds.

        Returns:
            Once in a wait that has become too long: for how many seconds it has been looked at. Otherwise None.
        """
        unseen_s, self._looked_at = max(0.0, now - self._looked_at - LOOK_S), now
        self._slowest_s = max(self._slowest_s, slowest_s)
        is_same = taken == self._taken
        self._taken = taken
        if not is_waiting:
            self._since = None
        elif self._since is None or not is_same:
            self._since = now
        else:
            self._since += unseen_s
            waited_s = now - self._since
            if waited_s >= max(FIRST_S, _TIMES * self._slowest_s) * 2**self._reports:
                self._reports += 1
                self._since = math.inf  # this wait is not spoken of again
                return waited_s
        return None


def report(run: Run, pool: Backend[Any], waited_s: float, call_later: Callable[..., TimerHandle]) -> None:
    """Say what a run has waited for, and what the worker does that has it. On the loop thread."""
    waited = f"The trainer has waited {waited_s:.0f} s for a batch that has not come."
    ticket = run.scheduler.awaited()
    worker = None if ticket is None else pool.processes.get(ticket.worker)
    if ticket is None or worker is None:
        why = "it waits for a worker, or it is being joined or pinned"
        if not run.plan.are_awaited or (why := run.plan.why_no_keys(in_vain=True)):
            log.warning("%s No worker has it: %s.", waited, why)
        return
    batch = describe_batch(run.named(ticket).keys, worker.worker_id, worker.pid)
    told = f"{waited} {batch} The last events of the run: {run.meter.last_events()}."
    if worker.is_process:
        call_later(_WATCHED_S, _watched, run, worker, ticket, told, activity(worker.pid))
    else:
        worker.ask_stack(ticket.batch, partial(_tell, told))


def _watched(run: Run, worker: Worker, ticket: Ticket, told: str, before: Activity | None) -> None:
    if run.scheduler.awaited() is ticket:
        does = describe(worker.pid, before, activity(worker.pid), was_forked=worker.was_forked)
        worker.ask_stack(ticket.batch, partial(_tell, f"{told} {does}".strip()))


def describe(pid: int, before: Activity | None, now: Activity | None, *, was_forked: bool) -> str:
    """Say what a process does for the kernel, and what it means if it sleeps and was forked beside threads.

    Args:
        pid: The process.
        before: What it did a second ago.
        now: What it does now.
        was_forked: It is a fork of this process.

    Returns:
        "" where nobody tells, as on other systems than Linux.
    """
    if before is None or now is None:
        return ""
    words = _STATES.get(now.state, f"Its state is {now.state}").format(pid=pid)
    where = f" (in the kernel's {now.waits_in})" if now.waits_in else ""
    used_s = now.cpu_s - before.cpu_s
    words += f"{where}, and has used {used_s:.2f} s of CPU time in the last second."
    return words + _FORKED * (was_forked and now.state == "S" and used_s <= _IDLE_S)


def activity(pid: int) -> Activity | None:
    """Return what a process does for the kernel; None where nobody tells."""
    folder = Path(f"/proc/{pid}")
    try:
        fields = kernel_stat(folder)  # state, then, among others, utime and stime
        waits_in = (folder / "wchan").read_text()
    except OSError:
        return None
    cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return Activity(fields[0], "" if waits_in == "0" else waits_in, cpu_s)


def _tell(told: str, stack: str) -> None:
    log.warning("%s %s", told, f"It is at:\n{stack}" if stack else "It does not tell where it is.")
