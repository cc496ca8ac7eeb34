"""The random generators of a trainer: seeded, saved, restored, drawn from."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def seed_all(seed: int) -> None:
    """Seed the three global generators, as a trainer does before anything else."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)


def save(own: torch.Generator | None) -> tuple[Any, ...]:
    """Return where the global generators are, and one of the trainer's own, as the checkpoints of frameworks do."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), own and own.get_state()


def restore(saved: tuple[Any, ...], own: torch.Generator | None) -> None:
    """Set the generators to what they were when they were saved."""
    random.setstate(saved[0])
    np.random.set_state(saved[1])
    torch.set_rng_state(saved[2])
    if own is not None:
        own.set_state(saved[3])


def draw_from_all() -> tuple[float, ...]:
    """Draw from the three global generators, as a trainer's dropout and augmentation do."""
    return random.random(), float(np.random.rand()), torch.rand(()).item()
