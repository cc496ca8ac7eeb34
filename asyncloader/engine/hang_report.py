"""Say in the log what a batch waits for that has not come for long: see `HangWatch`.

A timer of the loop looks at the consumers, and asks the worker that has the batch for its stack.
"""

from __future__ import annotations

import logging
import sys
import weakref
from asyncio import TimerHandle
from functools import partial
from time import monotonic
from typing import Protocol

from asyncloader.backends.backend import Backend
from asyncloader.backends.worker import Worker
from asyncloader.engine import hang_watch
from asyncloader.engine.actions import Ticket
from asyncloader.engine.hang_watch import HangWatch
from asyncloader.engine.run import Run
from asyncloader.errors import describe_batch
from asyncloader.worker.guarded_loop import GuardedLoop

log = logging.getLogger("asyncloader")

_THREADED = (
    "cv2",
    "duckdb",
    "faiss",
    "grpc",
    "jax",
    "lance",
    "lightgbm",
    "obstore",
    "onnxruntime",
    "polars",
    "pyarrow",
    "tensorflow",
    "tokenizers",
    "xgboost",
)
"""Libraries with threads of their own."""


class HasRun(Protocol):
    """A session: it has a run."""

    run: Run


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
        slowest_s = run.meter.slowest_s() if is_waiting else 0.0
        waited_s = self._watch.look(now, run.taken, is_waiting=is_waiting, slowest_s=slowest_s)
        if waited_s is None or not self._watch.is_due(waited_s):
            return
        ticket = run.scheduler.awaited()
        worker = None if ticket is None else self._pool.processes.get(ticket.worker)
        if ticket is None or worker is None:
            self._tell_of_nobody(run, waited_s)
        else:
            worker.ask_stack(ticket.batch, partial(_tell, run.named(ticket), worker, waited_s))

    def _tell_of_nobody(self, run: Run, waited_s: float) -> None:
        why = "it waits for a worker, or it is being joined or pinned"
        if not run.awaits_keys or (why := run.why_no_keys()):
            log.warning("%s No worker has it: %s.", _waited(waited_s), why)


def _waited(seconds: float) -> str:
    return f"The trainer has waited {seconds:.0f} s for a batch that has not come."


def _tell(ticket: Ticket, worker: Worker, waited_s: float, stack: str) -> None:
    parts = [_waited(waited_s), describe_batch(ticket.keys, worker.worker_id, worker.pid)]
    if worker.was_forked and (loaded := threaded_libraries()):
        parts.append(
            f"It was forked from this process, which has libraries with threads of their own: {', '.join(loaded)}. A "
            "forked worker has none of these threads, and a lock that one of them held stays locked in the worker. If "
            "the stack below is in such a library, use "
            'DataLoader(..., multiprocessing_context="forkserver").'
        )
    parts.append(f"It is at:\n{stack}" if stack else "It does not tell where it is.")
    log.warning("%s", " ".join(parts))


def threaded_libraries() -> list[str]:
    """Return the libraries known to have threads of their own that this process has imported."""
    return [name for name in _THREADED if name in sys.modules]
