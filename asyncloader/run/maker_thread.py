"""num_workers=0 and ``async for``: a thread that makes batches, so that the caller's loop goes on meanwhile.

    task ── ask: number and keys ──> this thread ── made: a batch, or what is raised in its place ──> the same task

The thread makes one batch at a time, and none that nobody asked for. It does not know the iterator, and ends when that
is dropped.
"""

from __future__ import annotations

import queue
import threading
import weakref
from asyncio import CancelledError
from collections.abc import Callable
from functools import partial
from time import perf_counter, sleep
from typing import Any

from asyncloader import threads
from asyncloader.engine.actions import NOTHING
from asyncloader.messages.modes import Modes

_TURN_S = 0.002
_PAUSE_S = 0.0001


class MakerThread:
    """Makes batches beside the loop of the task that takes them. The thread starts with the first batch.

    Args:
        make: Makes a batch of its number and keys.
        wake: Wakes the task when a batch is made.

    Attributes:
        is_asked: There is a batch to be made, or to be taken. Written by the consumer.
        made: The batch that was asked for, and what was raised in its place. Whoever takes it sets it to None.
    """

    def __init__(self, make: Callable[[int, Any], Any], wake: Callable[[], object]) -> None:
        self.is_asked: bool = False
        self.made: tuple[Any, BaseException | None] | None = None
        self._make = make
        self._wake = wake
        self._asked: queue.SimpleQueue[object] = queue.SimpleQueue()  # numbers and keys; anything else ends the thread
        self._thread: threading.Thread | None = None

    @property
    def has_begun(self) -> bool:
        """Whether a batch was asked for."""
        return self._thread is not None

    def ask(self, number: int, keys: Any) -> None:
        """Have a batch made."""
        if self._thread is None:
            self._thread = threads.start(partial(self._serve, Modes.of_this_thread()), "asyncloader fetch")
        self.is_asked = True
        self._asked.put((number, keys))

    def make_here(self, number: int, keys: Any) -> None:
        """Make a batch in the calling thread. After an interrupt, nothing was asked for."""
        made: tuple[Any, BaseException | None]
        try:
            made = self._make(number, keys), None
        except (Exception, CancelledError) as error:
            made = NOTHING, error
        self.made, self.is_asked = made, True

    def end_with(self, iterator: object) -> None:
        """End the thread when this is dropped. A method of C is called then, which no signal's handler can leave."""
        self._iterator = weakref.ref(iterator, self._asked.put)

    def stop(self) -> None:
        """End the thread after the batch that it is at. Returns at once."""
        self._asked.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _serve(self, modes: Modes) -> None:
        with modes.active():
            while type(job := self._asked.get()) is tuple:
                self._answer(*job)
                del job
        self._asked.put(None)  # for another thread, if a Ctrl-C in `ask` came when one was started and not noted yet

    def _answer(self, number: int, keys: Any) -> None:
        try:
            self.made = self._make(number, keys), None
        except BaseException as error:  # SystemExit as well: nobody else would tell the consumer
            trace = error.__traceback__
            self.made = NOTHING, error.with_traceback(trace and trace.tb_next)  # this frame refers to the error
        self._wake()


class Pause:
    """Lets other threads of Python have a turn now and then, in between two samples.

    Whoever waits for the interpreter's lock gets it when the holder lets go of it for long enough. A thread that goes
    from one operation of torch to the next lets go of it for an instant each time and takes it again, and the waiting
    thread's request, which is due after 5 ms, begins anew with each: so a loop can stand still for a whole batch.
    """

    def __init__(self) -> None:
        self._due_at = 0.0

    def __call__(self) -> None:
        """Let go of the interpreter's lock if that is due."""
        if perf_counter() > self._due_at:
            sleep(_PAUSE_S)
            self._due_at = perf_counter() + _TURN_S
