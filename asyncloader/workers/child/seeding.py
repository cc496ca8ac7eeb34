"""The seeds of Python's, numpy's and torch's global generators in workers.

Two ways, of which the option ``seeding`` chooses one:

- a worker is seeded once, at its start, exactly as torch does (`seed_worker`), and its streams run on;
- each batch is seeded by itself (`BatchSeeder`), from numbers that do not depend on which worker does it, or when, or
  how often. About 10 us a batch.
"""

from __future__ import annotations

import random

import numpy as np
import numpy.random  # otherwise every forked worker would import it by itself: 9 to 30 ms before its first batch
import torch
from torch.utils.data._utils.worker import _generate_state

from asyncloader.hashing import mix

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


def batch_seed(key: int, seq: int) -> int:
    """Return the seed of a batch: 63 bits, so that it fits a signed tensor, as the seeds of torch's workers do.

    torch's generator for the CPU looks at the lower 32 bits only (as of 2.13: the Mersenne Twister is begun with one
    word). These are therefore a permutation of the batch's number: no two batches of an epoch have them in common,
    where of 100,000 with 32 random bits one pair is alike.

    Args:
        key: Of the epoch: what base seed, epoch and rank were mixed into.
        seq: Number of the batch.
    """
    return mix(key, seq) >> 33 << 32 | _permute32(_permute32(seq ^ key) ^ key >> 32)


def _permute32(number: int) -> int:
    """Map 32 bits to 32 bits, one to one: the finalizer of MurmurHash3 (Austin Appleby, public domain)."""
    number &= _WORD
    number = (number ^ number >> 16) * 0x85EBCA6B & _WORD
    number = (number ^ number >> 13) * 0xC2B2AE35 & _WORD
    return number ^ number >> 16


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

        torch's own generator is seeded directly: ``torch.manual_seed`` walks over all devices and takes 160 us. numpy
        gets one word too: an array of words takes it 14 us more. Not torch's, for it is the same generator, begun in
        the same way.
        """
        seed = batch_seed(self._key, seq)
        random.seed(seed)
        self._torch.manual_seed(seed)
        np.random.seed(_permute32(seed ^ _FOR_NUMPY))
        return seed
