"""A worker as the loop thread knows it, whatever it runs in: the base of all kinds of workers."""

from __future__ import annotations

import asyncio
import enum
import threading
from collections.abc import Callable
from typing import Any

from asyncloader.loops import GuardedLoop


class WorkerState(enum.Enum):
    """Where a worker is in its life."""

    NEW = enum.auto()  # nothing started
    RUNNING = enum.auto()  # takes tickets
    ENDING = enum.auto()  # told to end; killed, or abandoned, if it takes too long
    DEAD = enum.auto()  # it is gone, and with it every descriptor


class Worker:
    """A worker: a process, a thread, or what a provider brings. On the loop thread, but for `wait_dead`.

    Args:
        worker_id: From 0; stays when another worker takes its place.
        loop: The portal's.

    Attributes:
        pid: The process that it runs in.
        exitcode: How that ended; negative for a signal, None if it has not, or if nobody knows.
        output: Last words.
        is_ready: Whether it has opened the dataset.
        why_no_other: Why one in its place would end as this worker did; None if it may not.
        started_at: On :func:`time.monotonic`'s clock, seconds.
        is_process: Whether it has a process of this machine to itself, so that the kernel knows what it does.
        was_forked: Whether that is a copy of this process.
        is_telling: Whether it can be asked where it is.
        answers_within_s: A worker that is asked where it is has so long to answer. Seconds.
    """

    pid = -1
    exitcode: int | None = None
    why_no_other: Exception | None = None
    is_ready = is_process = was_forked = False
    is_telling: bool = True
    started_at: float = 0.0
    answers_within_s: float = 0.5

    def __init__(self, worker_id: int, loop: GuardedLoop) -> None:
        self.worker_id = worker_id
        self.state = WorkerState.NEW
        self.output: bytearray = bytearray()
        self._loop = loop
        self._dead = threading.Event()
        self._awaits: str | None = None  # what the worker itself has told of where it is
        self._stack_waiters: list[Callable[[str], None]] = []
        self._stack_timer: asyncio.TimerHandle

    @property
    def is_alive(self) -> bool:
        """Whether it is there."""
        return self.state in (WorkerState.RUNNING, WorkerState.ENDING)

    def end(self, grace_s: float) -> None:
        """Tell the worker to finish; kill or abandon it after ``grace_s`` seconds."""
        raise NotImplementedError

    def kill(self) -> None:
        """End it at once."""
        raise NotImplementedError

    def put(self, kind: int, contents: Any) -> None:
        """Send it a message."""
        raise NotImplementedError

    def wait_dead(self, timeout_s: float | None) -> bool:
        """Wait until it is gone. Not on the loop thread."""
        return self._dead.wait(timeout_s)

    def ask_stack(self, ticket: int, tell: Callable[[str], None]) -> None:
        """Find out where it is, and what the samples of the ticket wait for; "" if it does not answer in time.

        The worker is asked when a consumer has waited too long; the question disturbs nothing.
        """
        if not (self.is_alive and self.is_telling):
            tell("")
            return
        self._stack_waiters.append(tell)
        if len(self._stack_waiters) == 1:
            self._awaits = None
            self._stack_timer = self._loop.call_later(self.answers_within_s, self._tell_stack)
            self._ask(ticket)

    def _ask(self, ticket: int) -> None:
        raise NotImplementedError

    def on_awaits(self, text: str) -> None:
        """The worker has answered where the samples of the ticket are."""
        self._awaits = text
        self._tell_stack()

    def _tell_stack(self) -> None:
        """Give those who have asked what is known by now: the answer is here, or will not come."""
        waiters, self._stack_waiters = self._stack_waiters, []
        if waiters:
            self._stack_timer.cancel()
            text = self._stack(self._awaits or "")
            for tell in waiters:
                tell(text)

    def _stack(self, awaits: str) -> str:
        """Return where the worker is, beginning with its own answer."""
        raise NotImplementedError
