"""Finish batches on a thread beside the loop: copy them into page-locked memory for the GPU.

    loop thread ── finish(item, tell) ──> queue ──> this thread ── tell(item) ──> loop thread

The slab that the batch came in is free again when the copy is made.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch.utils.data._utils.pin_memory import pin_memory

from asyncloader import threads
from asyncloader.engine.item import Item
from asyncloader.loops import GuardedLoop
from asyncloader.messages.messages import Kind


class Finisher:
    """Owner of the thread of one session. Used from the loop thread; the thread starts with the first batch.

    Args:
        loop: On which the outcome is told.
        device: The accelerator that batches are pinned for.
        pin: Pins a batch for it.
    """

    def __init__(
        self, loop: GuardedLoop, device: torch.device, pin: Callable[[Any, torch.device], Any] | None = None
    ) -> None:
        self._loop = loop
        self._device = device
        self._pin = pin or pinned
        self._queue: queue.SimpleQueue[tuple[Item, Callable[[Item], None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def finish(self, item: Item, tell: Callable[[Item], None]) -> None:
        """Have a batch pinned; ``tell`` is called on the loop with it, or with the error in its place."""
        if self._thread is None:
            self._thread = threads.start(self._run, "asyncloader finish")
        self._queue.put((item, tell))

    def stop(self) -> None:
        """End the thread after the batch in work."""
        self._queue.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of the thread; whether it has ended."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            return not self._thread.is_alive()
        return True

    def _run(self) -> None:
        try:
            self._finish_all()
        except BaseException as error:  # nobody would finish what is still to come
            with contextlib.suppress(RuntimeError):  # at interpreter exit the loop is closed
                self._loop.call_soon_threadsafe(self._loop.fail, error)

    def _finish_all(self) -> None:
        torch.set_num_threads(1)
        torch.get_device_module(self._device).set_device(self._device)
        while (job := self._queue.get()) is not None:
            self._finish(*job)
            del job  # or the batch would keep its slab until the next one comes

    def _finish(self, item: Item, tell: Callable[[Item], None]) -> None:
        outcome, row, began = item.outcome, item.row, perf_counter()
        try:
            outcome = outcome._replace(data=self._pin(outcome.data, self._device))
        except BaseException as error:  # of a type of the user's, with a pin_memory method
            error.add_note(f"Caught {type(error).__name__} in pin memory thread for device {self._device.index}.")
            error.__traceback__ = None  # its frames refer to the data
            outcome, row = outcome._replace(kind=Kind.FAILURE, data=None, error=error), None
        if row is not None:
            row[-2:] = perf_counter() - began, perf_counter()  # how long it took, and when nothing was left to be done
        self._loop.call_soon_threadsafe(tell, item._replace(outcome=outcome, row=row))


def pinned(data: Any, device: torch.device) -> Any:
    """Return a copy of a batch in page-locked memory, as torch's loader makes it."""
    return pin_memory(data, device.type)  # type: ignore[no-untyped-call]


def accelerator() -> torch.device | None:
    """Return the current device among the accelerators of this machine, with its index; None if there is none.

    Iterators ask before workers are forked, and the device's own module would make a context on the device for that.
    """
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is None:
        return None
    name = "current_device_index" if hasattr(torch.accelerator, "current_device_index") else "current_device_idx"
    return torch.device(kind.type, getattr(torch.accelerator, name)())
