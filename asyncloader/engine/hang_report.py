"""Say in the log what a batch waits for that has not come for long.

`HangWatch` decides when a wait is spoken of, without a loop or a clock, and `HangReporter` speaks. A timer of the
engine has it look at the consumers. The worker that has the batch is looked at in the first half of the wait, and again
when the wait has become too long: in between it has used CPU time, or none.
"""

from __future__ import annotations

import logging
from functools import partial
from time import monotonic
from typing import Any, NamedTuple

from asyncloader.backends.backend import Backend
from asyncloader.backends.worker import Worker
from asyncloader.engine.actions import Ticket
from asyncloader.engine.arrivals import FIRST_S
from asyncloader.engine.run import Run
from asyncloader.errors import describe_batch
from asyncloader.observe.activity import Activity, threaded_libraries, threads_at

log = logging.getLogger("asyncloader")

LOOK_S = 15.0
"""How often consumers are looked at. Seconds."""

_TIMES = 20
"""Nor is one that is shorter than so many times the work of the slowest batch."""

_IDLE_SHARE = 0.01
_IDLE_S = 0.05
"""A worker that uses no more of a core than this share, and so many seconds, waits for something. The kernel counts in
hundredths of a second, and asking for the stack takes some."""

_MOST_NAMES = 5

_STATES = {
    "R": "It runs at this moment",
    "S": "It sleeps",
    "D": "It waits for a disk or a network drive",
    "T": "It was stopped by a signal (kill -CONT {pid} has it go on)",
    "t": "It was stopped by a debugger",
}


class Seen(NamedTuple):
    """A worker as it was seen at one moment: ``at`` in seconds, of `time.monotonic`."""

    worker: Worker
    at: float
    activity: Activity | None


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
        self._is_reported = False

    @property
    def bound_s(self) -> float:
        """A wait as long as this is to be spoken of. Seconds."""
        return float(max(FIRST_S, _TIMES * self._slowest_s) * 2**self._reports)

    def look(self, now: float, taken: int, *, is_waiting: bool, slowest_s: float) -> float | None:
        """Look at the consumers.

        Time in which nobody looked does not count: this process was stopped, and its workers with it perhaps.

        Args:
            now: Seconds, of any clock.
            taken: Batches that consumers have taken.
            is_waiting: Some consumer waits at this moment.
            slowest_s: The work of the slowest batch so far. Seconds.

        Returns:
            How long the present wait has been looked at, in seconds: 0.0 at the first look. None if nobody waits.
        """
        unseen_s, self._looked_at = max(0.0, now - self._looked_at - LOOK_S), now
        self._slowest_s = max(self._slowest_s, slowest_s)
        is_same = taken == self._taken
        self._taken = taken
        if not is_waiting:
            self._since = None
            return None
        if self._since is None or not is_same:
            self._since, self._is_reported = now, False
        else:
            self._since += unseen_s
        return now - self._since

    def is_due(self, waited_s: float) -> bool:
        """Return, once in a wait, that it has become too long.

        Args:
            waited_s: What `look` has returned.
        """
        if self._is_reported or waited_s < self.bound_s:
            return False
        self._is_reported = True
        self._reports += 1
        return True


class HangReporter:
    """Looks at the consumers of an engine every `LOOK_S`. On the loop thread.

    Args:
        pool: The workers.
    """

    def __init__(self, pool: Backend[Any]) -> None:
        self._watch = HangWatch()
        self._pool = pool
        self._before: Seen | None = None  # the worker that has the awaited batch, in the first half

    def look(self, run: Run) -> None:
        """Look at the consumers of a run."""
        now, is_waiting = monotonic(), run.handoff.is_awaited
        slowest_s = run.meter.stats().stages.work.longest_s if is_waiting else 0.0
        waited_s = self._watch.look(now, run.taken, is_waiting=is_waiting, slowest_s=slowest_s)
        if waited_s is None:
            self._before = None
            return
        ticket = run.scheduler.awaited()
        worker = None if ticket is None else self._pool.processes.get(ticket.worker)
        # What the worker did in the first half of the wait, such as its start, says nothing of a hang that came after.
        is_early = waited_s < self._watch.bound_s / 2
        if worker is not None and (is_early or self._before is None or self._before.worker is not worker):
            self._before = Seen(worker, now, worker.activity())
        if self._watch.is_due(waited_s):
            if ticket is None or worker is None:
                self._tell_of_nobody(run, waited_s)
            else:
                worker.ask_stack(ticket.batch, partial(self._tell, run.named(ticket), worker, waited_s))

    def _tell_of_nobody(self, run: Run, waited_s: float) -> None:
        why = "it waits for a worker, or it is being joined or pinned"
        if not run.awaits_keys or (why := run.plan.why_no_keys(in_vain=True)):
            log.warning("%s No worker has it: %s.", _waited(waited_s), why)

    def _tell(self, ticket: Ticket, worker: Worker, waited_s: float, stack: str) -> None:
        before, now = self._before, Seen(worker, monotonic(), worker.activity())
        parts = [_waited(waited_s), describe_batch(ticket.keys, worker.worker_id, worker.pid)]
        if before is not None and before.worker is worker:
            parts += filter(None, [describe(before, now), explain(before, now)])
        parts.append(f"It is at:\n{stack}" if stack else "It does not tell where it is.")
        log.warning("%s", " ".join(parts))


def _waited(seconds: float) -> str:
    return f"The trainer has waited {seconds:.0f} s for a batch that has not come."


def describe(before: Seen, now: Seen) -> str:
    """Say what a worker does, and how much CPU time it has used in between; "" where nobody tells."""
    if before.activity is None or now.activity is None:
        return ""
    state, waits_in = now.activity.state, now.activity.waits_in
    words = _STATES.get(state, f"Its state is {state}").format(pid=now.worker.pid)
    where = f" (in the kernel's {waits_in})" if waits_in else ""
    used_s, seconds = now.activity.cpu_s - before.activity.cpu_s, now.at - before.at
    return f"{words}{where}, and has used {used_s:.2f} s of CPU time in the last {seconds:.0f} s."


def explain(before: Seen, now: Seen) -> str:
    """Say what it means that a forked worker waits for something and uses no CPU time; "" if that is not the case."""
    if before.activity is None or now.activity is None or not now.worker.was_forked or now.activity.state != "S":
        return ""
    if now.activity.cpu_s - before.activity.cpu_s > _IDLE_S + _IDLE_SHARE * (now.at - before.at):
        return ""
    threads = threads_at(now.activity.started)
    if not threads:
        return ""
    names = ", ".join(f"{count} {name!r}" for name, count in threads.most_common(_MOST_NAMES))
    if loaded := threaded_libraries():
        names += f"; libraries with such threads are loaded: {', '.join(loaded)}"
    return (
        f"It was forked from this process while that had other threads ({names}). A forked worker has none "
        "of them, and whatever lock one of them held stays locked there: what waits for such a thread or lock waits "
        'for ever. If the stack below is in such a library, use DataLoader(..., multiprocessing_context="forkserver").'
    )
