"""Random generators that a dataset has beside the global ones, in its transforms: albumentations and MONAI have them.

    trainer: dataset ── held ──> generators ── their states as an epoch begins ──> keys, by path
    worker:  dataset ── held ──> generators ── key, rank, number of the batch (sample) ──> seeds

A key is a checksum of a state, and the epoch of the loader that was the first to begin with the generator in that
state. The seeds of an epoch are made of the checksum and of how many epochs there were since that one: whatever has
begun an epoch counts, a look at a batch too, and a state of the loader says how many have begun.

So generators that are alike draw alike, in any worker, and other seeds give other numbers. Outside of samples they are
as if nothing was seeded: a dataset that shuffles an order when it hears of an epoch does so alike in all workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import numpy as np
import torch

from asyncloader.protocols import is_stateful
from asyncloader.seeding.generators import GLOBAL, KINDS, check_of, is_old
from asyncloader.seeding.hashing import mix, mix_on
from asyncloader.seeding.holdings import held

_WORD = (1 << 32) - 1

Key = tuple[int, int]
"""The check of a generator's state, and the number of the first epoch that has begun in that state."""


def _is_generator(thing: Any) -> bool:
    kind = type(thing)  # a mock of a generator, or a proxy, only says it were one
    return issubclass(kind, KINDS) and not any(thing is each for each in GLOBAL) and _has_state(thing)


def _has_state(generator: Any) -> bool:
    """Whether a generator could be given back. The system's generator has no state."""
    try:
        check_of(generator)
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


def seeded_generators_of(dataset: Any, collate_fn: Any = None) -> dict[str, Any]:
    """Return those that are seeded: a dataset that provides its state keeps its generators itself."""
    found = generators_of(dataset, collate_fn)
    if found and is_stateful(dataset):
        kept = set(map(id, generators_of(dataset).values()))
        return {path: generator for path, generator in found.items() if id(generator) not in kept}
    return found


class GeneratorKeys:
    """The keys of the generators that the trainer's dataset holds, in the newest epoch of a loader.

    Args:
        generators: By their paths, as they are now: the next epoch sees by that which of them were seeded meanwhile.
        keys: Their keys.
    """

    def __init__(self, generators: dict[str, Any], keys: dict[str, Key]) -> None:
        self._generators = list(generators.values())
        self._by_check = {check_of(each): keys[path] for path, each in generators.items() if path in keys}

    def following(self, generators: dict[str, Any], epoch: int) -> dict[str, Key]:
        """Return the keys of an epoch that begins.

        A generator that was replaced or has moved since was seeded by the trainer: its epochs are counted anew, even if
        it is in the same state as before. So are those of generators in the same state, which have to stay alike.
        """
        checks = {path: check_of(each) for path, each in generators.items()}
        new = {checks[path] for path, each in generators.items() if not any(each is old for old in self._generators)}
        known = {check: key for check, key in self._by_check.items() if check not in new}
        return {path: known.get(check, (check, epoch)) for path, check in checks.items()}


class OwnGenerators:
    """The generators that a worker seeds, of its copy of the dataset, in one epoch.

    Args:
        by_path: The generators.
        keys: What the trainer's process knows of their states, by their paths: the check, and how many epochs had begun
            in that state before.
        epoch_key: Base seed, runs that had it before, and rank.
    """

    def __init__(
        self, by_path: dict[str, Any], keys: dict[str, tuple[int, int]], epoch_key: tuple[int, int, int]
    ) -> None:
        self._generators = list(by_path.values())
        self._seeders: list[tuple[Callable[[int], object], int]] = []
        strangers: dict[int, int] = {}
        for path, generator in by_path.items():
            if (key := keys.get(path)) is None:
                # It came to be in this worker, or was seeded for it. Its state may be that of no other worker; but
                # which of them are alike is the same in all.
                key = mix(epoch_key[0], strangers.setdefault(check_of(generator), len(strangers))), epoch_key[1]
            self._seeders.append((_seeder(generator), mix(*key, epoch_key[2])))

    def __len__(self) -> int:
        return len(self._generators)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._generators)

    def seed(self, number: int, part: int = 0) -> None:
        """Seed all of them for this batch, or sample."""
        for put, key in self._seeders:
            put(mix_on(key, part, number))


NONE = OwnGenerators({}, {}, (0, 0, 0))


def _seeder(generator: Any) -> Callable[[int], object]:
    """Return what seeds a generator, in place, with 64 bits or as many as it takes."""
    if isinstance(generator, np.random.Generator):
        bits: Any = generator.bit_generator
        return lambda seed: setattr(bits, "state", type(bits)(seed).state)
    if isinstance(generator, np.random.RandomState):
        if is_old(generator):
            return lambda seed: generator.seed(seed & _WORD)
        bits = generator._bit_generator
        return lambda seed: generator.set_state({**type(bits)(seed).state, "has_gauss": 0, "gauss": 0.0})
    if isinstance(generator, torch.Generator):
        return lambda seed: generator.manual_seed(seed >> 1)
    return lambda seed: generator.seed(seed)
