"""The loops of the portal and of workers, and a loop as one owner sees it: nothing that it has called fails unnoticed.

    engine, pool, workers, channels, timers ── call_soon, call_later, add_reader, ... ──> GuardedLoop ──> loop
    on_error <── what one of these callbacks raises ──────────────────────────────────────────┘

A loop writes down what a callback raises, and goes on. The batch that the callback would have handed over then never
comes, and its consumer waits for ever. So everything that belongs to a run gets a `GuardedLoop` in place of the loop:
there is no other way to have something called, and none of these calls can fail without an end of the run. A worker
whose samples overlap has one of its own, and ends. Code of the whole process (shared memory) uses the loop itself: an
exception there must not end a run.

Loops go on after SystemExit and KeyboardInterrupt: asyncio lets both out of `run_forever`, whatever task or callback
raised them, for it takes them for the wish to end the program. In a worker process that is what they do. In the
trainer's process others use the same loop, or thread, and a sample cannot end the loop that serves all loaders: what
was raised is the failure of the batch, like anything else that a sample raises.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import traceback
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from asyncloader import threads

T = TypeVar("T")


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Make a loop: uvloop's where there is one."""
    try:
        import uvloop
    except ImportError:  # not on every platform
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def run_forever(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop until its `stop` is called."""
    while True:
        try:
            return loop.run_forever()
        except (SystemExit, KeyboardInterrupt) as error:
            if not (threads.is_ending or _is_of_a_task(error)):
                message = f"A callback on a DataLoader's event loop raised {type(error).__name__}"
                loop.call_exception_handler({"message": message, "exception": error})


def run(runner: asyncio.Runner, coroutine: Coroutine[Any, Any, T]) -> T:
    """Run the coroutine to its end on the loop of the runner, and return what it returns."""
    loop = runner.get_loop()
    task = loop.create_task(coroutine)
    task.add_done_callback(lambda _: loop.stop())
    run_forever(loop)
    return task.result()


def _is_of_a_task(error: BaseException) -> bool:
    """Whether it was raised in a coroutine: then the task has it for whoever awaits that, or reports it itself."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code.co_flags & inspect.CO_COROUTINE for frame, _ in frames)


class GuardedLoop:
    """Has a loop call what belongs to one session. In the loop's thread, but for `call_soon_threadsafe`.

    Args:
        loop: The loop of the thread.
        on_error: Is told what a callback has raised; None, as long as nobody is there, for the loop's own handler.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, on_error: Callable[[BaseException], object] | None = None
    ) -> None:
        self.loop = loop
        self.on_error = on_error
        self._is_closed = False
        self._readers: set[int] = set()
        self._writers: set[int] = set()

    def run(self, callback: Callable[..., object], *args: Any) -> None:
        """Call it; what it raises is told, and goes no further."""
        if self._is_closed:
            return
        try:
            callback(*args)
        except BaseException as error:
            if isinstance(error, SystemExit) and threads.is_ending:  # the interpreter ends, and this thread with it
                raise
            self.fail(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))

    def fail(self, error: BaseException) -> None:
        """Tell what was raised. Its frames lose their variables, which would keep batches and workers alive."""
        traceback.clear_frames(error.__traceback__)
        if self.on_error is not None:
            self.on_error(error)
        else:
            self.loop.call_exception_handler({"message": "Something in asyncloader has failed", "exception": error})

    def close(self) -> None:
        """Call nothing any more."""
        self._is_closed = True
        for fd in self._readers:
            self.loop.remove_reader(fd)
        for fd in self._writers:
            self.loop.remove_writer(fd)

    # ----------------------------------------------------------------------------------- as of asyncio's event loops

    def call_soon(self, callback: Callable[..., object], *args: Any) -> asyncio.Handle:
        """Call it in the next turn."""
        return self.loop.call_soon(self.run, callback, *args)

    def call_soon_threadsafe(
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """Call it soon, in a context or in a copy of the caller's. In any thread.

        Raises:
            RuntimeError: if the loop is closed.
        """
        return self.loop.call_soon_threadsafe(self.run, callback, *args, context=context)

    def call_later(self, delay_s: float, callback: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        """Call it after so many seconds."""
        return self.loop.call_later(delay_s, self.run, callback, *args)

    def add_reader(self, fd: int, callback: Callable[..., object], *args: Any) -> None:
        """Call it whenever the descriptor can be read."""
        self._readers.add(fd)
        self.loop.add_reader(fd, self.run, callback, *args)

    def remove_reader(self, fd: int) -> None:
        """Do so no more."""
        self._readers.discard(fd)
        self.loop.remove_reader(fd)

    def add_writer(self, fd: int, callback: Callable[..., object], *args: Any) -> None:
        """Call it whenever the descriptor can be written."""
        self._writers.add(fd)
        self.loop.add_writer(fd, self.run, callback, *args)

    def remove_writer(self, fd: int) -> None:
        """Do so no more."""
        self._writers.discard(fd)
        self.loop.remove_writer(fd)

    def create_task(self, coroutine: Coroutine[Any, Any, None], *, name: str | None = None) -> asyncio.Task[None]:
        """Run it as a task."""
        task = asyncio.Task(coroutine, loop=self.loop, name=name)  # no factory: a sample may be the one that asks
        task.add_done_callback(self._look_at)
        return task

    def _look_at(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)
