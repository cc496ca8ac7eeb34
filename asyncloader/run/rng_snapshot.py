"""The random generators that the order of an epoch is drawn from: saved at its beginning, to draw it anew.

They are the loader's and its samplers'; Python's and numpy's global ones too where samplers are neither torch's nor
provide a state.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import repeat
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.dataloader import _InfiniteConstantSampler

from asyncloader.protocols import is_stateful, probe
from asyncloader.seeding.generators import GLOBAL, check_of, decode, encode, set_state, state_of
from asyncloader.seeding.turns import untouched

_DRAW_NOTHING = (SequentialSampler, DistributedSampler, BatchSampler, _InfiniteConstantSampler)
DRAW_FROM_TORCH = (RandomSampler, WeightedRandomSampler, SubsetRandomSampler)
KNOWN_SAMPLERS = (*_DRAW_NOTHING, *DRAW_FROM_TORCH)
"""Torch's samplers: to iterate over one moves its generator, if it has one, and nothing else."""


def draws_once(sampler: Any) -> bool:
    """Whether a sampler draws nothing from a global generator but before its first index."""
    return type(sampler) in KNOWN_SAMPLERS and probe(sampler, "generator") is not torch.default_generator


class RNGSnapshot:
    """The generators that the order of an epoch, and its base seed, are drawn from.

    Args:
        generator: The loader's own, or None for torch's global one.
        samplers: All that the order is made with. Where one is not torch's, nor provides a state, the global
            generators of Python and numpy count as well.
    """

    def __init__(self, generator: torch.Generator | None, samplers: list[Any]) -> None:
        generators = [generator or torch.default_generator]
        others = False
        for sampler in samplers:
            if type(sampler) in _DRAW_NOTHING:
                continue
            own = probe(sampler, "generator")
            own = own if isinstance(own, torch.Generator) else torch.default_generator
            if not any(own is other for other in generators):
                generators.append(own)
            others |= type(sampler) not in DRAW_FROM_TORCH and not is_stateful(sampler)
        self._generators = [*generators, *(GLOBAL[1:] if others else ())]
        is_global = any(own is each for own in self._generators for each in GLOBAL)
        self._untouched: Callable[[], AbstractContextManager[Any]] = (
            untouched if is_global else nullcontext
        )  # other generators are nobody's in between

    def __len__(self) -> int:
        return len(self._generators)

    def capture(self) -> list[Any]:
        """Take the generators' states as they are: 1 us, and 40 where Python's and numpy's count."""
        with self._untouched():
            return [state_of(each) for each in self._generators]

    def restore(self, states: list[Any], where: list[bool] | None = None) -> None:
        """Set the generators, or those of them that ``where`` names, to states that were captured."""
        with self._untouched():
            for generator, state, is_meant in zip(self._generators, states, where or repeat(True), strict=False):
                if is_meant:
                    set_state(generator, state)

    def check(self) -> list[int]:
        """Return numbers that tell these states from others. Taken with each state of a loader, so quick: 2 us."""
        with self._untouched():
            return [check_of(each) for each in self._generators]

    def as_text(self, states: list[Any]) -> str:
        """Write captured states down as JSON."""
        return json.dumps(list(map(encode, self._generators, states)))

    def from_text(self, text: str) -> list[Any]:
        """Read what `as_text` has written."""
        return list(map(decode, self._generators, json.loads(text)))
