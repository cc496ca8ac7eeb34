"""The few calls of torch by which batches get to an accelerator. Tests have a device of their own in their place.

    copies: a stream of our own    copy 7 ── transform 7 ── mark ── copy 8 ── transform 8 ── mark
                                                              └────────┐                       └──┐
    the consumer's stream                step 6 ─────────────────── wait ── step 7 ───────────── wait ── step 8

A *mark* stands behind all that was asked of a stream so far, and has passed when the device has done that. The copies
wait for no step, except for data that are on the device before: so a copy runs while the device computes.

Host memory lives until its copy has passed. Memory on the device belongs to the stream of the copies; the consumer's
stream is noted with it (``record_stream``), so that it is used again only after the steps that read it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from functools import cached_property
from typing import Any, Protocol, cast

import torch
from torch.utils.data._utils.pin_memory import pin_memory

from asyncloader.device.moving import copied_to, tensors_in
from asyncloader.errors import ConfigurationError
from asyncloader.threads import copied

log = logging.getLogger(__name__)


class Mark(Protocol):
    """A place in a stream. An event of torch's is one."""

    def query(self) -> bool:
        """Whether it has passed."""
        ...

    def synchronize(self) -> None:
        """Block the thread until it has passed."""
        ...


class _Passed:
    """The mark of a device whose calls return when all is done."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


PASSED = _Passed()


class _Underway:
    """Copies of a batch that may not be done.

    Args:
        batch: Is copied; None where copies are done when the call returns.

    Attributes:
        memory: The memory that they read. An object of the batch that moves itself may let go of its tensors, or have
            them refer to other memory (``tensor.data = ...``).
        mark: Behind the last of them. None while there may be more, or if an interrupt has come before the mark.
        thread: Has asked for them.
    """

    __slots__ = ("mark", "memory", "thread")

    def __init__(self, batch: Any) -> None:
        tensors = [*tensors_in(batch, opens=True)]
        self.memory = batch, tensors, [each.detach() for each in tensors]
        self.mark: Mark | None = None
        self.thread = threading.get_ident()


class Device:
    """A device without streams, as MPS: a copy is there when the call returns.

    Called by consumers, and `pin` and `select` by the thread that pins. Nothing here waits but marks.

    Args:
        device: With its index, if there may be several of its kind.
    """

    overlaps = False
    """Whether a copy runs beside what the consumer does."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._underway: deque[_Underway] = deque()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.device}>"

    # ------------------------------------------------------------------------------------------- the calls of torch

    @property
    def generators(self) -> tuple[torch.Generator, ...]:
        """The default generators of the device, from which its random operations draw."""
        return ()

    def select(self) -> None:
        """Make it the current device of the calling thread."""

    def pin(self, batch: Any) -> Any:
        """Return a copy of a batch in page-locked memory, as torch's loader makes it."""
        return pin_memory(batch, self.device.type)  # type: ignore[no-untyped-call]

    def copying(self) -> contextlib.AbstractContextManager[Any]:
        """Have what is asked of the device in here be done on the stream of the copies."""
        return contextlib.nullcontext()

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Begin to copy a tensor to the device; the same tensor, if it is there."""
        return tensor.to(self.device)

    def mark(self) -> Mark:
        """Return a mark behind all that was asked of the current stream so far."""
        return PASSED

    def wait(self, mark: Mark) -> None:
        """Have what is asked of the current stream from now on be done when the mark has passed. Does not block."""

    def note_use(self, data: Any) -> None:
        """Note that the current stream uses a tensor, or what has ``record_stream``: its memory stays until then."""

    # ------------------------------------------------------------------------------------------- what is made of them

    def send(self, batch: Any, change: Callable[[Any], Any] | None = None, *, joins: bool = False) -> tuple[Any, Mark]:
        """Begin to copy a batch, and to change the copy.

        Args:
            batch: In memory of the host.
            change: Makes another batch of the copy.
            joins: The copy waits until the current stream has done all that it was asked for so far.

        Returns:
            The batch on the device, for `hand_over`, and the mark behind it.

        Raises:
            TypeError: if something in it cannot be moved; it names the type.
        """
        self.sweep()
        since = self.mark()
        with self.copying():
            self._mark_interrupted()
            if joins:
                self.wait(since)
            underway = _Underway(batch if self.overlaps else None)
            if self.overlaps:
                self._underway.append(underway)
            try:
                moved = self.move(batch, since)
                if change is not None:
                    moved = change(moved)
            finally:  # some copies may have begun
                underway.mark = self.mark()
                if self.overlaps and underway not in self._underway:  # `change` has sent a batch itself
                    self._underway.append(underway)
        return moved, underway.mark

    def move(self, batch: Any, since: Mark) -> Any:
        """Begin to copy what is in a batch; what is on a device already was made before a mark."""

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_cpu:
                self.wait(since)
            return self.copy(tensor)

        return copied_to(batch, self.device, copy, non_blocking=self.overlaps)

    def hand_over(self, batch: Any, mark: Mark) -> None:
        """Let the current stream use a batch whose copy ends at a mark."""
        if self.overlaps:
            self.wait(mark)
            for data in tensors_in(batch, self.device.type):
                self.note_use(data)

    def _mark_interrupted(self) -> None:
        """Set the marks that an interrupt kept this thread from setting; on the stream of the copies."""
        for each in copied(self._underway):
            if each.mark is None and each.thread == threading.get_ident():
                each.mark = self.mark()

    def sweep(self) -> None:
        """Let go of what copies have read that have passed. In any thread, beside others."""
        for each in copied(self._underway):
            if each.mark is not None and each.mark.query():
                with contextlib.suppress(ValueError):  # another thread was here
                    self._underway.remove(each)

    def finish(self) -> None:
        """Block until the copies have passed that are marked, and let go of what they have read."""
        with self.copying():
            self._mark_interrupted()
        for each in copied(self._underway):
            if each.mark is not None:
                each.mark.synchronize()
        self.sweep()


class Host(Device):
    """The CPU: batches are there."""

    def move(self, batch: Any, since: Mark) -> Any:
        """Return the batch as it is, whatever it consists of."""
        return batch


class StreamDevice(Device):
    """An accelerator with streams: CUDA, ROCm, XPU. The stream of the copies is one for all loaders of a process.

    Memory that copies were written to is used again for copies on the same stream only; with a stream for each loader,
    or each epoch, the device would keep some for each.
    """

    overlaps = True

    @cached_property
    def _torch(self) -> Any:
        return torch.get_device_module(self.device)

    @cached_property
    def _copies(self) -> Any:
        return self._torch.Stream(device=self.device)

    @property
    def generators(self) -> tuple[torch.Generator, ...]:
        """The default generators of the device, from which its random operations draw."""
        self._torch.init()  # until then there are none
        return (self._torch.default_generators[self.device.index],)

    def select(self) -> None:
        """Make it the current device of the calling thread."""
        self._torch.set_device(self.device.index)

    def copying(self) -> contextlib.AbstractContextManager[Any]:
        """Have what is asked of the device in here be done on the stream of the copies."""
        return self._torch.stream(self._copies)  # type: ignore[no-any-return]

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Begin to copy a tensor to the device; the same tensor, if it is there."""
        return tensor.to(self.device, non_blocking=True)

    def mark(self) -> Mark:
        """Return a mark behind all that was asked of the current stream so far."""
        # A thread that waits for it sleeps; by default it would spin.
        how = {"blocking": True} if self.device.type == "cuda" else {}
        event: Any = self._torch.Event(**how)
        event.record(self._torch.current_stream(self.device))
        return event  # type: ignore[no-any-return]

    def wait(self, mark: Mark) -> None:
        """Have what is asked of the current stream from now on be done when the mark has passed. Does not block."""
        self._torch.current_stream(self.device).wait_event(mark)

    def note_use(self, data: Any) -> None:
        """Note that the current stream uses a tensor, or what has ``record_stream``: its memory stays until then."""
        data.record_stream(self._torch.current_stream(self.device))


_devices: dict[tuple[int, torch.device], Device] = {}
"""By process: a fork has a copy of these that it never uses, for it cannot use the device."""


def find(device: str | torch.device | Device) -> Device:
    """Return the device of this name.

    Args:
        device: "auto" for the accelerator of this machine, or the CPU where there is none.

    Raises:
        ConfigurationError: if torch sees no such device here.
    """
    if isinstance(device, Device):
        return device
    if device == "auto":
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        device = found or "cpu"
    named = torch.device(device)
    if named.type == "cpu":
        return Host(named)
    module = _module(named)
    named = torch.device(named.type, _current_index(named.type, module) if named.index is None else named.index)
    kind = StreamDevice if hasattr(module, "Stream") else Device
    return _devices.setdefault((os.getpid(), named), kind(named))


def for_pinning() -> Device | None:
    """Return the accelerator that `pin_memory` alone is about; None if there is none."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if found is None else find(found)


def _current_index(kind: str, module: Any) -> int | None:
    """Return which device of a kind is the current one.

    Iterators ask before workers are forked, and the device's own module would make a context on the device for that.
    """
    if torch.accelerator.is_available() and torch.accelerator.current_accelerator() == torch.device(kind):
        name = "current_device_index" if hasattr(torch.accelerator, "current_device_index") else "current_device_idx"
        return cast(int, getattr(torch.accelerator, name)())
    return module.current_device() if hasattr(module, "current_device") else None


def _module(device: torch.device) -> Any:
    """Return torch's module for a kind of device that is there.

    Raises:
        ConfigurationError: if it is not.
    """
    module: Any = None
    with contextlib.suppress(RuntimeError):
        module = torch.get_device_module(device)
    is_there = module is not None and module.is_available()
    if not is_there or (device.index or 0) >= module.device_count():
        raise ConfigurationError(
            f'torch sees no device {str(device)!r} here. device="auto" takes the accelerator that there is, and the '
            "CPU where there is none"
        )
    return module


def check(name: str, device: object) -> None:
    """Raise a ConfigurationError if something names no kind of device; whether there is one is not looked at."""
    if device is None or device == "auto" or isinstance(device, (torch.device, Device)):
        return
    try:
        if isinstance(device, str):
            torch.device(device)
            return
    except RuntimeError:
        pass
    raise ConfigurationError(
        f'{name} should be "auto", or a device as torch names it, such as "cuda:0", but got {device!r}'
    )
