"""The few calls of torch by which batches get to an accelerator. Tests have a device of their own in their place.

    copies: a stream of our own    copy 7 ── transform 7 ── mark ── copy 8 ── transform 8 ── mark
                                                              └────────┐                       └──┐
    the consumer's stream                step 6 ─────────────────── wait ── step 7 ───────────── wait ── step 8

A *mark*, an event of torch's, stands behind all that was asked of a stream so far, and has passed when the device has
done that. The copies wait for no step, except for data that are on the device before: so a copy runs while the device
computes.

Host memory lives until its copy has passed. Memory on the device belongs to the stream of the copies; the consumer's
stream is noted with it (``record_stream``), so that it is used again only after the steps that read it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch

from asyncloader.engine.finisher import accelerator
from asyncloader.errors import ConfigurationError
from asyncloader.wrap.moving import move, tensors_in


class Device:
    """A device without streams, as the CPU, or MPS: a copy is there when the call returns."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def generators(self) -> tuple[torch.Generator, ...]:
        """The default generators of the device, from which its random operations draw."""
        return ()

    def send(self, batch: Any, transform: Callable[[Any], Any] | None = None, *, joins: bool = False) -> Any:
        """Begin to copy a batch, and to transform the copy. On the CPU batches stay as they are.

        Args:
            batch: In memory of the host.
            transform: Makes another batch of the copy.
            joins: The copy waits until the current stream has done all that it was asked for so far.

        Returns:
            The batch on the device, and the mark behind its copy, for `hand_over`.

        Raises:
            TypeError: if something in it cannot be moved; it names the type.
        """
        moved = batch if self.device.type == "cpu" else move(batch, self.device)
        return moved if transform is None else transform(moved), None

    def hand_over(self, batch: Any, mark: Any) -> None:
        """Let the current stream use a batch whose copy ends at a mark."""

    def sweep(self) -> None:
        """Let go of the memory that copies have read which have passed. In any thread, beside others."""


class StreamDevice(Device):
    """An accelerator with streams: CUDA, ROCm, XPU. The stream of the copies is one for all loaders of a process.

    Memory that copies were written to is used again for copies on the same stream only; with a stream for each loader,
    or each epoch, the device would keep some for each.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._underway: dict[Any, Any] = {}  # by the mark behind its copies, the memory that they read

    # ------------------------------------------------------------------------------------------- the calls of torch

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

    def copying(self) -> contextlib.AbstractContextManager[Any]:
        """Have what is asked of the device in here be done on the stream of the copies."""
        return self._torch.stream(self._copies)  # type: ignore[no-any-return]

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Begin to copy a tensor to the device; the same tensor, if it is there."""
        return tensor.to(self.device, non_blocking=True)

    def mark(self) -> Any:
        """Return a mark behind all that was asked of the current stream so far."""
        # A thread that waits for it sleeps; by default it would spin.
        how = {"blocking": True} if self.device.type == "cuda" else {}
        event = self._torch.Event(**how)
        event.record(self._torch.current_stream(self.device))
        return event

    def wait(self, mark: Any) -> None:
        """Have what is asked of the current stream from now on be done when the mark has passed. Does not block."""
        self._torch.current_stream(self.device).wait_event(mark)

    def note_use(self, data: Any) -> None:
        """Note that the current stream uses a tensor, or what has ``record_stream``: its memory stays until then."""
        data.record_stream(self._torch.current_stream(self.device))

    # ----------------------------------------------------------------------------------------- what is made of them

    def send(self, batch: Any, transform: Callable[[Any], Any] | None = None, *, joins: bool = False) -> Any:
        """Begin to copy a batch, and to transform the copy, on the stream of the copies."""
        since = self.mark()
        tensors = [*tensors_in(batch, opens=True)]
        # An object that moves itself may let go of its tensors, or have them refer to other memory (`each.data = ...`).
        memory = batch, tensors, [each.detach() for each in tensors]
        with self.copying():
            if joins or not all(each.is_cpu for each in tensors):  # for what was on the device before
                self.wait(since)
            try:
                moved = move(batch, self.device, self.copy)
                moved = moved if transform is None else transform(moved)
            finally:  # some copies may have begun
                mark = self.mark()
                self._underway[mark] = memory
        return moved, mark

    def hand_over(self, batch: Any, mark: Any) -> None:
        """Let the current stream use a batch whose copy ends at a mark."""
        self.wait(mark)
        for data in tensors_in(batch, self.device.type):
            self.note_use(data)

    def sweep(self) -> None:
        """Let go of the memory that copies have read which have passed. In any thread, beside others."""
        for mark in tuple(self._underway):
            if mark.query():
                self._underway.pop(mark, None)


_devices: dict[tuple[int, torch.device], Device] = {}
"""By process: a fork has a copy of these that it never uses, for it cannot use the device."""


def find(device: str | torch.device | Device) -> Device:
    """Return the device of this name.

    Args:
        device: As torch names it; "auto" for the accelerator of this machine, or the CPU where there is none.

    Raises:
        ConfigurationError: if torch sees no such device here.
        RuntimeError: if it is no name of a device.
    """
    if isinstance(device, Device):
        return device
    current = accelerator()
    named = current or torch.device("cpu") if device == "auto" else torch.device(device)
    if named.type == "cpu":
        return Device(named)
    module: Any = None
    with contextlib.suppress(RuntimeError):
        module = torch.get_device_module(named)
    if module is None or not module.is_available() or (named.index or 0) >= module.device_count():
        raise ConfigurationError(
            f'torch sees no device {str(device)!r} here. device="auto" takes the accelerator that there is, and the '
            "CPU where there is none"
        )
    if named.index is None:
        named = current if current is not None and current.type == named.type else torch.device(named.type, 0)
    kind = StreamDevice if hasattr(module, "Stream") else Device
    return _devices.setdefault((os.getpid(), named), kind(named))
