"""Random generators that a dataset has beside the global ones, in its transforms: albumentations and MONAI have them.

    dataset ── held ──> numpy Generator, RandomState, random.Random, torch.Generator
                          │  seeded for a batch, or a sample, with the global ones
                          └─ and given back afterwards, as they were

So code outside of samples (which shuffles an order alike in each worker) draws as if nothing was seeded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch

from asyncloader.seeding.generators import GLOBAL, KINDS, state_of
from asyncloader.seeding.hashing import mix
from asyncloader.seeding.holdings import held

log = logging.getLogger("asyncloader")

_WORD = (1 << 32) - 1
_SHOWN = 3


def _is_generator(thing: Any) -> bool:
    kind = type(thing)  # a mock of a generator, or a proxy, only says it were one
    return issubclass(kind, KINDS) and not any(thing is each for each in GLOBAL) and _has_state(thing)


def _has_state(generator: Any) -> bool:
    """Whether a generator could be given back. The system's generator has no state."""
    try:
        state_of(generator)
    except Exception:
        return False
    return True


def generators_of(dataset: Any, collate_fn: Any = None) -> dict[str, Any]:
    """Return the random generators that these hold, by their paths: not the global ones, nor those without a state.

    Datasets inside torch's wrappers may hold several at one path.
    """
    found: dict[str, Any] = {}
    of_collate_fn = ((f"collate_fn.{path}", generator) for path, generator in held(collate_fn, _is_generator))
    for path, generator in chain(held(dataset, _is_generator), of_collate_fn):
        names = (path, *(f"{path} ({number})" for number in range(2, len(found) + 2)))
        found[next(name for name in names if name not in found)] = generator
    return found


class OwnGenerators:
    """The generators that the dataset of one worker holds. They are looked for once, when the worker opens it.

    Args:
        dataset: As the worker has it.
        collate_fn: The worker's.
    """

    def __init__(self, dataset: Any, collate_fn: Any = None) -> None:
        self._of = dataset, collate_fn
        self._by_path = generators_of(dataset, collate_fn)
        self._are_looked_for = True  # once more, after the first batch
        self._seeders = [_seeder(generator) for generator in self._by_path.values()]

    def __len__(self) -> int:
        return len(self._by_path)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._by_path.values())

    def seed(self, seed: int) -> None:
        """Seed all of them with this number: each draws numbers of its own."""
        for number, put in enumerate(self._seeders, 1):
            put(mix(seed, number))

    def look_for_late_ones(self) -> None:
        """Say so, once, if the first batch has brought generators that nobody could seed for it."""
        if not self._are_looked_for:
            return
        self._are_looked_for = False
        known = set(map(id, self._by_path.values()))
        late = [path for path, generator in generators_of(*self._of).items() if id(generator) not in known]
        if late:
            log.warning(
                "The dataset made random generators of its own while it made its first batch (%s), too late to be "
                "seeded: what they draw depends on the number of workers, and differs from run to run unless they were "
                "seeded. Make them in __init__, and they are seeded with the global ones; or draw from these, or from "
                "asyncloader.sample_rng().",
                ", ".join(late[:_SHOWN]) + ", ..." * (len(late) > _SHOWN),
            )


def _seeder(generator: Any) -> Callable[[int], Any]:
    """Return what seeds a generator, in place, with 64 bits or as many as it takes."""
    if isinstance(generator, np.random.Generator):
        bits: Any = generator.bit_generator
        if type(bits) is np.random.PCG64:  # what `default_rng` makes
            return partial(_seed_pcg64, bits)
        return lambda seed: setattr(bits, "state", type(bits)(seed).state)
    if isinstance(generator, np.random.RandomState):
        return lambda seed: generator.seed(seed & _WORD)
    if isinstance(generator, torch.Generator):
        return lambda seed: generator.manual_seed(seed >> 1)
    return generator.seed  # type: ignore[no-any-return]


def _seed_pcg64(bits: Any, seed: int) -> None:
    """Begin anew with a state and a stream made of the seed. To make a `PCG64` of it, as numpy does, takes 22 us."""
    state, stream = mix(seed, 1) << 64 | mix(seed, 2), mix(seed, 3) << 64 | mix(seed, 4) | 1
    words = {"state": state, "inc": stream}
    bits.state = {"bit_generator": "PCG64", "state": words, "has_uint32": 0, "uinteger": 0}
