"""Finish batches on a thread beside the loop: copy them into page-locked memory for the GPU.

    loop thread ── finish(held, tell) ──> queue ──> this thread ── tell(finished, error, seconds) ──> loop thread

The slab that the batch came in is free again when the copy is made.
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

from asyncloader import threads
from asyncloader.messages.outcome import Outcome
from asyncloader.worker.guarded_loop import GuardedLoop

Tell: TypeAlias = Callable[[Outcome | None, BaseException | None, float], None]


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
        self._queue: queue.SimpleQueue[tuple[list[Outcome], Tell] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def finish(self, held: list[Outcome], tell: Tell) -> None:
        """Have a batch pinned.

        Args:
            held: The batch alone. The thread takes it out, so that nothing else refers to the data when it drops them.
            tell: Called on the loop with the batch or the error, and how many seconds pinning took.
        """
        if self._thread is None:
            self._thread = threads.start(self._run, "asyncloader finish")
        self._queue.put((held, tell))

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
            held, tell = job
            batch: Any = held.pop()
            job = error = None
            began = perf_counter()
            try:
                batch = batch._replace(data=self._pinned(batch.data))
            except BaseException as raised:
                batch, error = None, raised
            self._loop.call_soon_threadsafe(tell, batch, error, perf_counter() - began)
            del held, tell, batch, error

    def _pinned(self, data: Any) -> Any:
        try:
            return self._pin(data, self._device)
        except BaseException as raised:  # of a type of the user's, with a pin_memory method
            raised.add_note(f"Caught {type(raised).__name__} in pin memory thread for device {self._device.index}.")
            raised.__traceback__ = None  # its frames refer to the data
            raise


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
