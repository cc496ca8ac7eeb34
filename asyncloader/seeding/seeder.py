"""The seeds of Python's, numpy's and torch's global generators.

Three ways, of which the option ``seeding`` chooses one:

- a worker is seeded once, at its start, exactly as torch does (`seed_worker`), and its streams run on;
- each batch is seeded by itself, from numbers that do not depend on which worker does it, or when, or how often;
- each sample is, by its place in the epoch's order. A sample has the seed that a batch of this one sample would have.

A `Seeder` does both of the latter, in 6 us: 3 for Python's generator, 1 for each of the others, 1 for the seed.
"""

from __future__ import annotations

import random
from _random import Random
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils.worker import _generate_state

from asyncloader.seeding.hashing import mix
from asyncloader.seeding.own_generators import NONE, OwnGenerators

WHOLE = 1
"""The part of a batch that is fetched by one call."""
COLLATE = 2
"""The part of a batch that is its collation."""
BLOCK = 3
"""Of the first `sample_seed` block of a sample; the next ones have every third number from there, and those between are
of blocks in ``__getitems__`` and ``collate_fn``."""

ON_DEVICE = -1
"""What is made of a batch on a device."""

_WORD = (1 << 32) - 1
_FOR_NUMPY = 0x6E756D70


def seed_worker(base_seed: int, worker_id: int) -> int:
    """Seed the three generators as torch's DataLoader seeds worker ``worker_id``; return the seed."""
    seed = base_seed + worker_id
    random.seed(seed)
    _seed_torch(seed)
    np.random.seed(_generate_state(base_seed, worker_id))  # type: ignore[no-untyped-call]
    return seed


def _seed_torch(seed: int) -> None:
    """Do what `torch.manual_seed` does.

    `torch.manual_seed` asks modules of devices to remember the seed, also those of devices that this torch is not built
    for; each notes down the stack for that, and a fresh process reads source files for it: 2 ms.
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


def _seed(key: int, high: int, number: int) -> int:
    """Return the seed of a batch, or of a sample: 63 bits, so that it fits a signed tensor, as torch's do.

    torch's generator for the CPU looks at the lower 32 bits only (as of 2.13: the Mersenne Twister is begun with one
    word). These are therefore a permutation of the number: no two batches of an epoch have them in common, where of
    100,000 with 32 random bits one pair is alike. They go through the finalizer of MurmurHash3 (Austin Appleby, public
    domain), which maps 32 bits to 32 bits, one to one; a word of the key goes in before, so that batches next to each
    other are apart in other ways in each epoch, and the other is added, so that epochs have other seeds.

    Args:
        key: The key of the epoch, mixed from base seed, runs that had it before, and rank.
        high: The upper bits, the same for all numbers below 2^32: Python's generator is begun with them, too.
        number: The number of the batch, or of the sample in the epoch.
    """
    low = (number ^ key) & _WORD
    low = (low ^ low >> 16) * 0x85EBCA6B & _WORD
    low = (low ^ low >> 13) * 0xC2B2AE35 & _WORD
    return high ^ (number >> 32 & 0x7FFFFFFF) << 32 | (low ^ low >> 16) + (key >> 32) & _WORD


class Seeder:
    """Seeds the generators for one batch after another, or one sample. Each worker has its own, for each epoch.

    Args:
        key: Base seed, runs that had it before, rank. With the number they make the seed.
        own: Generators that the worker's copy of the dataset holds, which are seeded as well.
        may_seed: The global generators may be seeded for one sample, in a `sample_seed` block.
    """

    def __init__(self, key: tuple[int, int, int], own: OwnGenerators = NONE, *, may_seed: bool = True) -> None:
        self.key = key
        self.own = own
        self.may_seed = may_seed
        self._keys: dict[int, tuple[int, int]] = {}  # by part
        self._python: Any = random._inst
        self._seed_python = partial(Random.seed, self._python)
        self._seed_torch = torch.default_generator.manual_seed

    def __call__(self, number: int, part: int = 0) -> int:
        """Seed for this batch, or sample; return torch's seed.

        Args:
            number: The number of the batch, or of the sample in the epoch.
            part: The part of the batch or sample; each has numbers of its own.
        """
        # torch's own generator is seeded directly: ``torch.manual_seed`` walks over all devices and takes 160 us;
        # Python's by the method that ``random.seed`` calls in the end. numpy gets one word too: an array of words takes
        # it 14 us more. Not torch's word, for it is the same generator, begun in the same way.
        key, high = self._keys.get(part) or self._make_keys(part)
        seed = _seed(key, high, number)
        self._seed_python(seed)
        self._python.gauss_next = None
        self._seed_torch(seed)
        np.random.seed((seed ^ _FOR_NUMPY) & _WORD)
        if self.own:
            self.own.seed(number, part)
        return seed

    def _make_keys(self, part: int) -> tuple[int, int]:
        key = mix(*self.key, part) if part else mix(*self.key)
        keys = self._keys[part] = key, mix(key) >> 33 << 32
        return keys
