"""Say in the log what a batch waits for that has not come for long: see `HangWatch`.

A timer of the loop looks at the consumers. The worker that has the batch is looked at in the first half of the wait,
and again when the wait has become too long: in between it has used CPU time, or none.
"""

from __future__ import annotations

import logging
import weakref
from asyncio import TimerHandle
from functools import partial
from time import monotonic
from typing import NamedTuple, Protocol

from asyncloader.backends.backend import Backend
from asyncloader.backends.worker import Worker
from asyncloader.engine import hang_watch
from asyncloader.engine.actions import Ticket
from asyncloader.engine.hang_watch import HangWatch
from asyncloader.engine.run import Run
from asyncloader.errors import describe_batch
from asyncloader.observe.activity import Activity, threaded_libraries, threads_at
from asyncloader.worker.guarded_loop import GuardedLoop

log = logging.getLogger("asyncloader")

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


class HasRun(Protocol):
    """A session: it has a run."""

    run: Run


class Seen(NamedTuple):
    """A worker as it was seen at one moment: ``at`` in seconds, of `time.monotonic`."""

    worker: Worker
    at: float
    activity: Activity | None


class HangReporter:
    """Looks at the consumers of a session for as long as it is open. On the loop thread.

    Args:
        loop: The portal's.
        pool: The workers.
        session: Has the run; not kept alive.
    """

    def __init__(self, loop: GuardedLoop, pool: Backend, session: HasRun) -> None:
        self._watch = HangWatch()
        self._loop = loop
        self._pool = pool
        self._session = weakref.ref(session)
        self._before: Seen | None = None  # the worker that has the awaited batch, in the first half
        self._timer: TimerHandle | None = None

    def start(self) -> None:
        """Look every so often from now on."""
        self._timer = self._loop.call_later(hang_watch.LOOK_S, self._look)

    def stop(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        if (session := self._session()) is None:
            return
        self.start()
        run, now = session.run, monotonic()
        is_waiting = run.handoff.waiting > 0
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
        if not run.awaits_keys or (why := run.why_no_keys()):
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
