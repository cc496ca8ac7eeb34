"""The seeds of Python's, numpy's and torch's global generators in workers.

Two ways, of which the option ``seeding`` chooses one:

- a worker is seeded once, at its start, exactly as torch does (`seed_worker`), and its streams run on;
- each batch is seeded by itself (`BatchSeeder`), from numbers that do not depend on which worker does it, or when, or
  how often. About 10 us a batch.
"""

from __future__ import annotations

import random

import numpy as np
import numpy.random  # else every forked worker would import it by itself: 9 to 30 ms before its first batch
import torch
from torch.utils.data._utils.worker import _generate_state

_MASK = (1 << 64) - 1


def seed_worker(base_seed: int, worker_id: int) -> int:
    """Seed the three generators as torch's DataLoader seeds worker ``worker_id``; return the seed."""
    seed = base_seed + worker_id
    random.seed(seed)
    _seed_torch(seed)
    np.random.seed(_generate_state(base_seed, worker_id))  # type: ignore[no-untyped-call]
    return seed


def _seed_torch(seed: int) -> None:
    """Do what `torch.manual_seed` does.

    That asks modules of devices to remember the seed, also those of devices that this torch is not built for; each
    notes down the stack for that, and a fresh process reads source files for it: 2 ms.
    """
    if _has_accelerator():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def _has_accelerator() -> bool:
    try:
        return torch.accelerator.current_accelerator() is not None
    except RuntimeError:  # so torch 2.6 says that there is none
        return False


def mix(*numbers: int) -> int:
    """Mix integers into 64 bits that look random: the finalizer of splitmix64, over each number in turn.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    state = 0
    for number in numbers:
        state = (state + (number & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


class BatchSeeder:
    """Seeds the generators for one batch after another.

    Args:
        key: Base seed, epoch of the loader, rank. With the sequence number they make the seed.
    """

    def __init__(self, key: tuple[int, int, int]) -> None:
        self._key = mix(*key)
        self._torch = torch.default_generator

    def __call__(self, seq: int) -> int:
        """Seed for batch ``seq``; return torch's seed.

        torch's own generator is seeded directly: ``torch.manual_seed`` walks over all devices and takes 160 us.
        """
        seed = mix(self._key, seq)
        random.seed(seed)
        self._torch.manual_seed(seed)
        np.random.seed((seed * 0x9E3779B97F4A7C15 >> 16) & 0xFFFFFFFF)
        return seed
