"""torch's modes of the thread that iterates: ``no_grad``, ``inference_mode``, ``autocast``.

torch's loader forks its workers from that thread, so they have them; ours are forked from the portal's thread. Spawned
ones have none of them with either.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch


class Modes(NamedTuple):
    """The modes of one thread.

    Attributes:
        grad: Whether gradients are recorded.
        inference: Whether ``inference_mode`` is on.
        autocast: To what ``autocast`` casts on the CPU; None if it does not.
    """

    grad: bool
    inference: bool
    autocast: torch.dtype | None

    @classmethod
    def of_this_thread(cls) -> Modes:
        """Look at the calling thread."""
        autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        return cls(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Give them to the calling thread."""
        with contextlib.ExitStack() as stack:
            if self != Modes.of_this_thread():
                if self.inference:
                    stack.enter_context(torch.inference_mode())
                if self.autocast is not None:
                    stack.enter_context(torch.autocast("cpu", self.autocast))
                stack.enter_context(torch.set_grad_enabled(self.grad))
            yield
