"""Copy batches into page-locked memory, on a thread beside the loop, so that the GPU can fetch them by itself.

    loop thread ── pin(batch, tell) ──> queue ──> pin thread ── tell(pinned, error, seconds) ──> loop thread ──> reorder

The copy is torch's own (`torch.utils.data._utils.pin_memory`), which knows nested batches and types with a
``pin_memory`` method. The slab that the batch came in is free again when the copy is made.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from time import perf_counter
from typing import Any, TypeAlias

import torch
from torch.utils.data._utils.pin_memory import pin_memory

from asyncloader.workers.child import threads
from asyncloader.workers.child.guarded_loop import GuardedLoop

Tell: TypeAlias = Callable[[Any, BaseException | None, float], None]


class Pinner:
    """Owner of the pin thread of one session. Used from the loop thread; the thread starts with the first batch.

    Args:
        loop: On which the outcome is told.
        device: Type of the accelerator, "cuda" for example.
        copy: Makes the pinned copy of a batch; torch's by default.
    """

    def __init__(self, loop: GuardedLoop, device: str, copy: Callable[[Any], Any] | None = None) -> None:
        self._loop = loop
        self._device = device
        self._copy = copy or (lambda batch: pin_memory(batch, device))  # type: ignore[no-untyped-call]
        self._index = torch.accelerator.current_device_index() if torch.accelerator.is_available() else -1
        self._queue: queue.SimpleQueue[tuple[Any, Tell] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def pin(self, batch: Any, tell: Tell) -> None:
        """Copy the batch; ``tell`` is called on the loop with the copy or the error, and how long it took."""
        if self._thread is None:
            self._thread = threads.start(self._run, "asyncloader pin")
        self._queue.put((batch, tell))

    def stop(self) -> None:
        """End the thread after the copy in work."""
        self._queue.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of the thread; whether it has ended."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            return not self._thread.is_alive()
        return True

    def _run(self) -> None:
        try:
            self._pin_all()
        except BaseException as error:  # nobody would pin what is still to come
            with contextlib.suppress(RuntimeError):  # at interpreter exit the loop is closed
                self._loop.call_soon_threadsafe(self._loop.fail, error)

    def _pin_all(self) -> None:
        torch.set_num_threads(1)
        if self._index >= 0:
            torch.accelerator.set_device_index(self._index)
        while (job := self._queue.get()) is not None:
            batch, tell = job
            del job
            began = perf_counter()
            try:
                pinned, error = self._copy(batch), None
            except BaseException as raised:  # of a type of the user's, with a pin_memory method
                raised.add_note(f"Caught {type(raised).__name__} in pin memory thread for device {self._index}.")
                pinned, error = None, raised
            del batch
            self._loop.call_soon_threadsafe(tell, pinned, error, perf_counter() - began)
            del pinned, error, tell
