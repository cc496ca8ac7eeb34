"""The dimension of the device: batches stay in memory of the host, or go to a device that copies and computes late.

What a step reads is known when the device has come to it, which may be long after the batch was given. So the consumer
notes a place for each batch, and what was read is put into it.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import torch

from asyncloader import to_device
from tests.wrap.simulated import SimulatedDevice


@dataclasses.dataclass(frozen=True)
class Device:
    """Where batches go.

    Attributes:
        depth: How many are copied ahead.
        seed: Of what the device does, and when.
    """

    depth: int
    seed: str

    @classmethod
    def draw(cls, seed: int) -> Device | None:
        """Draw a device; None for most runs, which have none. The other dimensions of a run do not depend on it."""
        chance = random.Random(f"{seed} device")
        if chance.random() < 0.7:
            return None
        return cls(chance.choice([0, 1, 1, 2, 5]), f"{seed} steps")


class Place:
    """The place of a batch among those that a consumer has seen; of a batch on a device it is filled later."""

    def __init__(self) -> None:
        self.value: Any = None


class Reading:
    """Reads the batches of a run, in steps of a device if there is one.

    Args:
        device: Where batches go; None for memory of the host.
        digest: What is compared of a batch: indices, draws and samples, or the first two.
    """

    def __init__(self, device: Device | None, digest: Callable[[Any], Any]) -> None:
        self._digest = digest
        self._device, self._simulated = device, None if device is None else SimulatedDevice()
        self._chance = random.Random(device and device.seed)

    def wrap(self, loader: Any) -> Any:
        """Return a loader whose batches go to the device, if there is one."""
        if self._device is None or self._simulated is None:
            return loader
        return to_device(loader, self._simulated, self._device.depth)  # type: ignore[arg-type]

    def note(self, batch: Any) -> Any:
        """Return what is compared of a batch, or a place that it comes to later."""
        if self._simulated is None:
            return self._digest(batch)
        place = Place()
        self._simulated.step(batch, lambda tensors: setattr(place, "value", self._digest(in_order(tensors))))
        for _ in range(self._chance.choice([0, 0, 1, 4, 20])):
            self._simulated.copies.advance() if self._chance.random() < 0.5 else self._simulated.steps.advance()
        return place

    def settle(self) -> None:
        """Have the device do all that it was asked for.

        Raises:
            AssertionError: if memory was used again too early.
        """
        if self._simulated is not None:
            self._simulated.run()
            assert self._simulated.faults == []

    def read(self, seen: list[Any]) -> list[Any]:
        """Return what was noted, with all places filled."""
        self.settle()
        return [each.value if isinstance(each, Place) else each for each in seen]


def in_order(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors of a batch in the batch's order; they are found in the opposite one."""
    return tensors[::-1]
