"""The loop thread: one asyncio loop in one background thread of the process, shared by all loaders.

    consumer threads ── call / post ──> ┌──────────────────────────┐
    finalizers       ── post ─────────> │ portal thread: loop      │ ── reads channels, keeps order, replaces workers
    interpreter exit ── close ────────> └──────────────────────────┘

Why a thread of its own: work goes on while the trainer computes, whichever face it uses and whether it has a loop.

Interpreter exit. A ``ProcessPoolExecutor`` whose worker does not end hangs the exit (its manager thread is joined
before any ``atexit`` handler runs), so the portal closes what is alive in :mod:`asyncloader.engine.exits`' hook, which
runs before that. A thread that uses a loader later still gets another portal.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing.util
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator
from concurrent.futures import Future, InvalidStateError
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

from asyncloader import threads
from asyncloader.backends.backend import Launch
from asyncloader.backends.processes.launching import try_descriptors
from asyncloader.backends.processes.process import kill_all
from asyncloader.engine import exits
from asyncloader.errors import LoaderClosedError, could_not_start, exiting, on_the_loop
from asyncloader.loops import new_event_loop, run_forever
from asyncloader.seeding.sample_context import tell_tasks_apart
from asyncloader.signals import HandlersWait

T = TypeVar("T")

_CANCELLED_WITHIN_S = 0.5

_DESCRIPTORS = 12
"""More than a loop needs."""


class _Condition(threading.Condition):
    """A condition that ``with`` takes by methods of C: those of its lock."""

    __enter__ = property(attrgetter("_lock.__enter__"))
    __exit__ = property(attrgetter("_lock.__exit__"))


class Answer(Future[T]):
    """A future that a consumer's thread waits for and the loop thread answers, whatever a Ctrl-C leaves undone.

    ``with`` on a lock of C is one instruction, behind which no handler of a signal runs; on the condition of any other
    future it is a function of Python. A handler that raises where this function returns leaves the lock held for ever,
    and the loop thread, which takes it to answer, would stand still for all loaders.
    """

    def __init__(self) -> None:
        super().__init__()
        self._condition = _Condition()


class Portal:
    """Owner of the loop and its thread. `post` and `call` may be used from any thread."""

    def __init__(self) -> None:
        self.pid: int = os.getpid()
        self.loop: asyncio.AbstractEventLoop = _new_event_loop()
        tell_tasks_apart(self.loop)
        self.sessions: set[Any] = set()  # engines, which end with it; touched by the loop thread only
        self.is_closing: bool = False  # written by the loop thread
        self.is_closed: bool = False
        self._unanswered: set[Future[Any]] = set()  # that somebody may wait for
        self._thread = threads.start(self._run, "asyncloader")
        # A child of multiprocessing waits for its own children first, and only then runs threading's exit hooks. Last:
        # a Ctrl-C in here must not leave a half-made portal to be closed.
        self._finalize = multiprocessing.util.Finalize(None, self.close, exitpriority=100)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            run_forever(self.loop)
            self.loop.call_soon(self.loop.stop)
            run_forever(self.loop)  # what was posted at the last moment: whoever waits for it is answered
            self._cancel_left_tasks()
        finally:
            self.loop.close()
            self._give_up()  # on what was posted after the last turn, and before that

    def _cancel_left_tasks(self) -> None:
        """Cancel tasks that datasets have begun and not awaited, as `asyncio.run` does, and wait a moment for them."""
        left = asyncio.all_tasks(self.loop)
        for task in left:
            task.cancel()
        if left:
            end = self.loop.create_task(asyncio.wait(left, timeout=_CANCELLED_WITHIN_S))
            end.add_done_callback(lambda _: self.loop.stop())
            run_forever(self.loop)

    def _give_up(self) -> None:
        for future in threads.copied(self._unanswered):
            with contextlib.suppress(InvalidStateError):
                future.set_exception(exiting())

    def post(self, function: Callable[..., object], *args: object) -> None:
        """Run the function on the loop soon. Takes no lock, so finalizers may call it.

        Raises:
            LoaderClosedError: if the interpreter is exiting and the loop has ended.
        """
        try:
            self.loop.call_soon_threadsafe(function, *args)
        except RuntimeError as error:
            raise exiting() from error

    def call(self, function: Callable[..., T], *args: object) -> Future[T]:
        """Run the function on the loop and give its result. Not for finalizers."""
        future = Answer[T]()  # is answered whatever becomes of the loop
        self._unanswered.add(future)
        future.add_done_callback(self._unanswered.discard)
        try:
            self.post(_fulfil, future, function, args)
        except LoaderClosedError:
            self._unanswered.discard(future)
            self.stop_daemon()
            raise
        return future

    def launch(self, steps: Generator[Launch, None, None]) -> None:
        """Take the steps of a start on the loop, and launch what they launch in the calling thread."""
        step: Callable[[], Launch | None] = partial(next, steps, None)
        try:
            while (launch := self.call(step).result()) is not None:
                step = partial(next, steps, None)
                try:
                    launch()
                except Exception as error:
                    step = partial(steps.throw, error)
        except BaseException:  # Ctrl-C: one more process may be half started
            with contextlib.suppress(LoaderClosedError):
                self.post(steps.close)
            raise
        finally:
            del step

    def call_apart(self, function: Callable[[], T]) -> Future[T]:
        """Run the function in a thread of its own and give its result."""
        future = Answer[T]()
        if self.is_closing:  # Python may start no thread any more
            future.set_exception(exiting())
        else:
            threads.start(partial(_fulfil, future, function, ()), "asyncloader start")
        return future

    @property
    def is_here(self) -> bool:
        """Whether the caller is the loop thread."""
        return threading.current_thread() is self._thread

    def where(self) -> str:
        """Return the stack of the loop thread, for somebody whom it does not answer."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "".join(traceback.format_stack(frame)) if frame is not None else ""

    def close(self) -> None:
        """End everything that lives here, then the loop. Bounded; what does not end is killed. Idempotent.

        Workers are killed from this thread where the loop does not turn: the interpreter waits for the threads of
        executors, and they for their processes, without a limit.
        """
        if self.is_closed or self.pid != os.getpid():
            return
        self.is_closed = True
        exits.wait_for_users()
        deadline = time.monotonic() + exits.EXIT_GRACE_S + 1.0
        try:
            for session in self.call(self._close_sessions).result(exits.EXIT_GRACE_S):
                session.wait_closed(max(0.0, deadline - time.monotonic()))
        except TimeoutError:  # something of the user's blocks the loop
            threads.interrupt(self._thread)
            kill_all()
        self.post(self._stop)
        self._thread.join(1.0)
        if self._thread.is_alive():
            kill_all()

    def stop_daemon(self) -> None:
        """Do not return to a daemon thread, before something is raised because the interpreter is exiting."""
        if self.is_closing:
            exits.stop_daemon()

    def _close_sessions(self) -> tuple[Any, ...]:
        self.is_closing = True  # what would come to live here from now on would be forgotten
        sessions = tuple(self.sessions)
        for session in sessions:
            session.close_soon(exits.EXIT_GRACE_S)
        return sessions

    def _stop(self) -> None:
        """End the loop. Workers that are left by now, on a machine too busy for the grace, are killed."""
        for session in tuple(self.sessions):
            session.close_soon(0.0)
        self.loop.stop()


def _fulfil(future: Future[T], function: Callable[..., T], args: tuple[object, ...]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function(*args))
    except BaseException as error:
        future.set_exception(error)
    finally:
        del future  # it would be in a cycle with the error, whose traceback refers to this frame


def _new_event_loop() -> asyncio.AbstractEventLoop:
    """Make a loop.

    Raises:
        WorkerStartError: if there are not enough descriptors; libuv would abort the process.
    """
    try:
        try_descriptors(_DESCRIPTORS)
    except OSError as error:
        raise could_not_start(error) from error
    return new_event_loop()


_portal: Portal | None = None
_making = threading.Lock()


def get_portal() -> Portal:
    """Return the portal of this process, started at first use. The calling thread will take batches."""
    global _portal
    exits.note_user()
    if _portal is None and exits.is_exiting:
        exits.stop_daemon()
    with _making:
        if _portal is None or (_portal.is_closed and not exits.is_exiting):
            with HandlersWait():  # Ctrl-C must not meet a portal that is half made
                _portal = Portal()
        return _portal


def refuse_to_block_the_loop() -> None:
    """Refuse a caller on the loop thread, who would wait for what only the loop can do.

    Raises:
        ConfigurationError: if the caller is there.
    """
    if _portal is not None and _portal.is_here:
        raise on_the_loop()


def _forget() -> None:
    """In a forked child: the thread is not there, the loop's descriptors are shared with the parent. Touch nothing."""
    global _portal, _making
    _making = threading.Lock()
    if _portal is not None:
        _inherited.append(_portal)  # kept, or its finalizers would close what the parent uses
        _portal = None


_inherited: list[Any] = []


def _close_at_exit() -> None:
    if _portal is not None:
        _portal.close()
    threads.end_all(exits.grace_left_s())


os.register_at_fork(after_in_child=_forget)
exits.at_exit(_close_at_exit)
