"""Pinning by a function of the tests' own, where there is no accelerator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from asyncloader.engine.finisher import Finisher
from asyncloader.loops import GuardedLoop


def pins(loop: GuardedLoop, copy: Callable[[Any], Any]) -> Finisher:
    """Return the thread that pins the batches of a session, which copies each by this function."""
    return Finisher(loop, torch.device("cpu", 0), lambda batch, device: copy(batch))
