"""The dimension of samplers: torch's, ours, and those that users write, by when and from what they draw.

A sampler that draws all of an epoch when it is asked for the first index is easy to resume. Others draw *lazily*: at
each step, from a generator that others may draw from as well. How far such a generator has been moved depends on how
far the loader has read ahead.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from asyncloader.samplers import (
    BalancedBatchSampler,
    ElasticSampler,
    LengthBatchSampler,
    MixtureSampler,
    PackingBatchSampler,
    WeightedSampler,
)


@dataclasses.dataclass(frozen=True)
class Size:
    """How much is sampled.

    Attributes:
        length: Of the dataset.
        batch_size: Of the loader; batch samplers take it as a hint.
        seed: For samplers with a seed of their own.
        rank: Whose share is read.
        ranks: How many ranks share the dataset, where a sampler divides it.
    """

    length: int
    batch_size: int
    seed: int
    rank: int = 0
    ranks: int = 1


Make = Callable[[Size, torch.Generator | None], dict[str, Any]]


@dataclasses.dataclass(frozen=True, repr=False)
class Sampling:
    """One kind of samplers.

    Attributes:
        name: Of the kind.
        make: Returns the arguments of a loader that samples so.
        lazily_from_own: The sampler draws while it is read from the generator that it is given, if it is given one.
        lazily_from_all: The sampler draws while it is read from a global generator, unless it is given another one.
        takes_generator: The sampler draws from a generator that it is given, instead of a global one.
        draws_in_iter: The sampler draws when it is iterated over, before the first index is asked for. Torch's loader
            iterates over samplers once without workers and twice with workers, so the order of later epochs differs.
        has_epochs: The sampler has ``set_epoch``.
    """

    name: str
    make: Make
    takes_generator: bool = False
    lazily_from_own: bool = False
    lazily_from_all: bool = False
    draws_in_iter: bool = False
    has_epochs: bool = False

    def __repr__(self) -> str:
        return repr(self.name)

    def disturbs_others(self, has_generator: bool) -> bool:
        """Whether the sampler draws from a global generator while it is read: others' draws come in between."""
        return self.lazily_from_all and not (self.takes_generator and has_generator)


Draw = Callable[[int], int]


def draw_from(source: str, generator: torch.Generator | None) -> Draw:
    """Return a function that draws a number below another one, from one of the three libraries' generators."""
    if source == "random":
        return random.randrange
    if source == "numpy":
        return lambda end: int(np.random.randint(end))
    return lambda end: int(torch.randint(end, (), generator=generator))


class PerStep(Sampler[int]):
    """Draws each index when it is asked for.

    Args:
        size: How much is sampled.
        source: "random", "numpy" or "torch".
        generator: Of torch's, to draw from it.
    """

    def __init__(self, size: Size, source: str, generator: torch.Generator | None = None) -> None:
        self.size = size
        self.source = source
        self.generator = generator

    def __len__(self) -> int:
        return self.size.length

    def __iter__(self) -> Iterator[int]:
        draw = draw_from(self.source, self.generator)
        for _ in range(self.size.length):
            yield draw(self.size.length)


class InIter(PerStep):
    """Draws a whole epoch as soon as it is iterated over."""

    def __iter__(self) -> Iterator[int]:
        return iter(list(super().__iter__()))


class DrawingBatches(PerStep):
    """A batch sampler that draws how large each batch is, and what is in it."""

    def __len__(self) -> int:
        return -(-self.size.length // self.size.batch_size)

    def __iter__(self) -> Iterator[Any]:
        draw = draw_from(self.source, self.generator)
        for _ in range(len(self)):
            yield [draw(self.size.length) for _ in range(1 + draw(2 * self.size.batch_size))]


class OwnState(Sampler[int]):
    """Draws each index from a generator of its own, which lasts for all epochs, and provides a state."""

    def __init__(self, size: Size) -> None:
        self.size = size
        self.rng = random.Random(size.seed)
        self.at = 0
        self.resumes = False

    def __len__(self) -> int:
        return self.size.length

    def __iter__(self) -> Iterator[int]:
        if not self.resumes:
            self.at = 0
        self.resumes = False
        while self.at < self.size.length:
            self.at += 1
            yield self.rng.randrange(self.size.length)

    def state_dict(self) -> dict[str, Any]:
        return {"rng": self.rng.getstate(), "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        version, words, gauss = state["rng"]
        self.rng.setstate((version, tuple(words), gauss))
        self.at, self.resumes = state["at"], True


def lengths(size: Size) -> Any:
    """Return how many tokens each sample has, for samplers that make batches by length."""
    return np.random.default_rng(size.seed).integers(1, 30, size.length)


def _sampler(make: Callable[[Size, torch.Generator | None], Any]) -> Make:
    return lambda size, generator: {"batch_size": size.batch_size, "sampler": make(size, generator)}


def unpacked(samples: list[Any]) -> Any:
    """Collate samples as they are: what a packing sampler has planned is not what is tested."""
    return default_collate(samples)


def _batches(make: Callable[[Size, torch.Generator | None], Any]) -> Make:
    return lambda size, generator: {"batch_sampler": make(size, generator)}


def _sources(length: int) -> list[int]:
    return [length // 2, length - length // 2]


_LAZILY = {"takes_generator": True, "lazily_from_own": True, "lazily_from_all": True}

SAMPLINGS = (
    Sampling("in order", lambda s, g: {"batch_size": s.batch_size}),
    Sampling("shuffle=True", lambda s, g: {"batch_size": s.batch_size, "shuffle": True}),
    Sampling("shuffle=True, drop_last", lambda s, g: {"batch_size": s.batch_size, "shuffle": True, "drop_last": True}),
    Sampling("RandomSampler", _sampler(lambda s, g: RandomSampler(range(s.length), generator=g)), takes_generator=True),
    Sampling(
        "RandomSampler, replacement",
        _sampler(lambda s, g: RandomSampler(range(s.length), replacement=True, generator=g)),
        takes_generator=True,
        lazily_from_own=True,
    ),
    Sampling(
        "RandomSampler, two permutations and a half",
        _sampler(lambda s, g: RandomSampler(range(s.length), num_samples=s.length * 5 // 2, generator=g)),
        takes_generator=True,
        lazily_from_own=True,
    ),
    Sampling(
        "WeightedRandomSampler",
        _sampler(lambda s, g: WeightedRandomSampler([1.0 + k % 3 for k in range(s.length)], s.length, generator=g)),
        takes_generator=True,
    ),
    Sampling(
        "SubsetRandomSampler",
        _sampler(lambda s, g: SubsetRandomSampler(range(0, s.length, 2), generator=g)),
        takes_generator=True,
    ),
    Sampling(
        "DistributedSampler",
        _sampler(lambda s, g: DistributedSampler(range(s.length), s.ranks, s.rank, seed=s.seed % 1000)),
        has_epochs=True,
    ),
    Sampling("per step, random", _sampler(lambda s, g: PerStep(s, "random")), lazily_from_all=True),
    Sampling("per step, numpy", _sampler(lambda s, g: PerStep(s, "numpy")), lazily_from_all=True),
    Sampling("per step, torch", _sampler(lambda s, g: PerStep(s, "torch", g)), **_LAZILY),
    Sampling("in __iter__, random", _sampler(lambda s, g: InIter(s, "random")), draws_in_iter=True),
    Sampling("in __iter__, numpy", _sampler(lambda s, g: InIter(s, "numpy")), draws_in_iter=True),
    Sampling(
        "in __iter__, torch", _sampler(lambda s, g: InIter(s, "torch", g)), takes_generator=True, draws_in_iter=True
    ),
    Sampling("batches, random", _batches(lambda s, g: DrawingBatches(s, "random")), lazily_from_all=True),
    Sampling("batches, numpy", _batches(lambda s, g: DrawingBatches(s, "numpy")), lazily_from_all=True),
    Sampling("batches, torch", _batches(lambda s, g: DrawingBatches(s, "torch", g)), **_LAZILY),
    Sampling(
        "BatchSampler over one that draws",
        _batches(lambda s, g: BatchSampler(PerStep(s, "torch", g), s.batch_size, drop_last=False)),
        **_LAZILY,
    ),
    Sampling("own state", _sampler(lambda s, g: OwnState(s))),
    Sampling(
        "ElasticSampler", _sampler(lambda s, g: ElasticSampler(s.length, s.ranks, s.rank, seed=s.seed)), has_epochs=True
    ),
    Sampling(
        "WeightedSampler",
        _sampler(lambda s, g: WeightedSampler([1.0 + k % 3 for k in range(s.length)], seed=s.seed)),
        has_epochs=True,
    ),
    Sampling(
        "MixtureSampler",
        _sampler(lambda s, g: MixtureSampler(_sources(s.length), [2, 1], stop="first", seed=s.seed)),
        has_epochs=True,
    ),
    Sampling(
        "LengthBatchSampler",
        _batches(lambda s, g: LengthBatchSampler(lengths(s), max_tokens=90, window=40, seed=s.seed)),
        has_epochs=True,
    ),
    Sampling(
        "BalancedBatchSampler",
        _batches(lambda s, g: BalancedBatchSampler(lengths(s), batch_size=s.batch_size, window=40, seed=s.seed)),
        has_epochs=True,
    ),
    Sampling(
        "PackingBatchSampler",
        lambda s, g: {
            "batch_sampler": PackingBatchSampler(lengths(s), block_size=40, batch_size=2, window=40, seed=s.seed),
            "collate_fn": unpacked,
        },
        has_epochs=True,
    ),
)
"""All kinds, each as likely as another."""

BY_NAME = {sampling.name: sampling for sampling in SAMPLINGS}
