"""A device of the tests' own: batches are pinned for it by a function, where there is no accelerator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from asyncloader.device.device import Device


class Pins(Device):
    """A device that batches are pinned for by a function."""

    def __init__(self, copy: Callable[[Any], Any]) -> None:
        super().__init__(torch.device("cuda", 0))
        self.pin = copy  # type: ignore[method-assign]
