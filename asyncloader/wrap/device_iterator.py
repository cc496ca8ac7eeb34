"""Batches to a device, some of them ahead, for whoever iterates over them there.

    loader ── pull ──> held: a copy is under way, on a stream of its own ──> given: the consumer's stream waits for the
                         └ 1 + prefetch of them, if there are so many          copy, and no thread does

A program may ask the device for steps faster than the device does them. So a consumer that comes for a batch waits
until all but the last ``1 + prefetch`` steps are done: there are at most ``2 + 2 * prefetch`` batches on the device.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import AsyncIterable, Callable, Iterable
from functools import partial
from typing import Any, TypeVar

import torch

from asyncloader.checks import at_least
from asyncloader.seeding.generators import GLOBAL, left_alone
from asyncloader.seeding.seeder import ON_DEVICE, Seeder
from asyncloader.wrap.device import Device, StreamDevice, find
from asyncloader.wrap.wrapper import IteratorWrapper, LoaderWrapper

T_co = TypeVar("T_co", covariant=True)
Transform = Callable[[Any], Any]

_turn = threading.RLock()
"""Held by the thread that draws from the global generators in a transform: of all iterators of this process."""


def _renew_turn() -> None:
    global _turn
    _turn = threading.RLock()


os.register_at_fork(after_in_child=_renew_turn)


class DeviceIterator(IteratorWrapper):
    """Iterates as another iterator does, over batches on a device.

    Args:
        inner: The iterator over batches in memory of the host.
        device: Where batches go.
        prefetch: How many are copied ahead.
        transform: Makes another batch of each, on the stream of the copies.
    """

    def __init__(self, inner: Any, device: Device, prefetch: int, transform: Transform | None) -> None:
        self._device, self._transform = device, transform
        prefetch = prefetch if isinstance(device, StreamDevice) else 0
        super().__init__(inner, prefetch, takes_states=prefetch > 0 or transform is not None)

    def begin(self) -> None:
        """Begin a run."""
        super().begin()
        self._steps: deque[Any] = deque()  # marks behind what was asked of the device before each call
        self._joins = True  # a transform may use what the trainer has on the device before the run

    async def prepare(self) -> None:
        """Wait until all but the consumer's last steps are done; see that a batch is held, and those to be ahead."""
        if isinstance(self._device, StreamDevice):
            self._steps.append(self._device.mark())
            while len(self._steps) > 1 + self._prefetch:
                step = self._steps.popleft()
                if not self._in_async_for:
                    step.synchronize()
                elif not step.query():
                    await asyncio.to_thread(step.synchronize)
        self._device.sweep()
        await super().prepare()

    def receive(self, batch: Any) -> Any:
        """Begin to copy a batch, and to change the copy; return it with the mark behind that."""
        sent = self._device.send(batch, self._transform and self._seeded, joins=self._joins)
        self._joins = False
        return sent

    def give(self, received: Any) -> Any:
        """Have the consumer's stream wait for a copy."""
        self._device.hand_over(*received)
        return received[0]

    def _seeded(self, batch: Any) -> Any:
        """Return what the transform makes of a batch.

        Draws in there from the global generators, that of the device too, depend on the seeds of the run and the number
        of the batch alone: so it does not matter when it is transformed. The generators stay as the trainer has them.
        """
        assert self._transform is not None
        if (seeds := getattr(self._inner, "seeds", None)) is None:  # another loader than ours
            return self._transform(batch)
        state, on_device = self.states[-1], self._device.generators
        with _turn, left_alone((*GLOBAL, *on_device)):
            seed = Seeder(seeds)(state["position"] + len(state["ahead"]), ON_DEVICE)
            for generator in on_device:
                generator.manual_seed(seed)
            return self._transform(batch)


def to_device(
    loader: Iterable[T_co] | AsyncIterable[T_co],
    device: str | torch.device,
    prefetch: int = 2,
    transform: Transform | None = None,
) -> LoaderWrapper[T_co]:
    """Return a loader whose batches are on a device: the next ones are copied there while training computes with one.

    The loader that is returned has all that ``loader`` has: its length, methods and attributes. Its states are those of
    the batches that it has given.

    Copies run on a stream of their own, and beside the computation if the batches are in page-locked memory:
    ``pin_memory=True`` of the loader.

    Args:
        loader: Any loader or iterable, asynchronous ones too. Of batches: tensors in any containers, and objects that
            have a method ``to``.
        device: As torch names it; "auto" for the accelerator of this machine, and the CPU where there is none. On the
            CPU batches stay as they are.
        prefetch: How many batches are copied ahead; at most ``2 + 2 * prefetch`` are on the device. Of a loader of ours
            only those that are ready: no batch is waited for ahead. 0 where the loader's states are large: otherwise
            one is taken for each batch. With 0, a state that a signal's handler takes in the middle of `next` counts
            the batch that is on its way.
        transform: A function that gets each batch on the device and returns another one: bytes into floats, crops,
            noise. It runs on the stream of the copies. Around a loader of ours, draws from global generators in it,
            that of the device included, depend on seed, epoch, rank and number of the batch alone.

    Raises:
        ConfigurationError: if torch sees no such device here, or the number is less than 0.
        TypeError: while iterating, for a batch with something in it that cannot be moved; it names the type.

    Example:
        >>> for images, labels in to_device(loader, "cuda"):
        ...     step(images, labels)
    """
    at_least("prefetch", prefetch, least=0)
    return LoaderWrapper(loader, partial(DeviceIterator, device=find(device), prefetch=prefetch, transform=transform))
