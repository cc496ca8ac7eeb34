"""Random generators that a dataset has beside the global ones, in its transforms: albumentations and MONAI have them.

    dataset ── held ──> numpy Generator, RandomState, random.Random, torch.Generator
                          │  seeded for a batch, or a sample, with the global ones
                          └─ and given back afterwards, as they were

What is made outside of samples (an order that each worker shuffles alike) thus draws the same as if nothing was seeded.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from asyncloader.seeding.hashing import mix
from asyncloader.seeding.holdings import held

log = logging.getLogger("asyncloader")

_WORD = (1 << 32) - 1
_KINDS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
_SHOWN = 3


def _is_generator(thing: Any) -> bool:
    kind = type(thing)  # a mock of a generator, or a proxy, only says it were one
    return issubclass(kind, _KINDS) and not _is_global(thing) and _has_state(thing)


def _has_state(generator: Any) -> bool:
    """Whether a generator could be given back. That of the system has no state, nor has one of a device without it."""
    try:
        state_of(generator)
    except Exception:
        return False
    return True


def _is_global(thing: Any) -> bool:
    own: Any = np.random.mtrand
    return thing is random._inst or thing is own._rand or thing is torch.default_generator


def generators_of(dataset: Any, collate_fn: Any = None) -> dict[str, Any]:
    """Return the random generators that these hold, by their paths: not the global ones, nor those without a state."""
    of_collate_fn = {f"collate_fn.{path}": generator for path, generator in held(collate_fn, _is_generator)}
    return {**dict(held(dataset, _is_generator)), **of_collate_fn}


class OwnGenerators:
    """The generators that the dataset of one worker holds. They are looked for once, when the worker opens it.

    Args:
        dataset: As the worker has it.
        collate_fn: Of the worker.
    """

    def __init__(self, dataset: Any, collate_fn: Any = None) -> None:
        self._of = dataset, collate_fn
        self._by_path = generators_of(dataset, collate_fn)
        self._are_looked_for = True  # once more, after the first batch
        self._seeders = [_seeder(generator) for generator in self._by_path.values()]

    def __len__(self) -> int:
        return len(self._by_path)

    def seed(self, seed: int) -> None:
        """Seed all of them with this number: each draws numbers of its own."""
        for number, put in enumerate(self._seeders, 1):
            put(mix(seed, number))

    def states(self) -> list[Any]:
        """Return their states, for `give_back`."""
        return [state_of(generator) for generator in self._by_path.values()]

    def give_back(self, states: list[Any]) -> None:
        """Set them to what they were."""
        for generator, state in zip(self._by_path.values(), states, strict=True):
            _set_state(generator, state)

    @contextlib.contextmanager
    def left_alone(self) -> Iterator[None]:
        """Leave them as they are, whatever is drawn from them, or seeded, meanwhile."""
        states = self.states()
        try:
            yield
        finally:
            try:
                self.give_back(states)
            except BaseException:  # a Ctrl-C came between two of them
                self.give_back(states)
                raise

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


def state_of(generator: Any) -> Any:
    """Return the state of a generator, which it can be set to."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)
