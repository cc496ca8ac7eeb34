"""The samplers of torchdata's StatefulDataLoader, whose orders are not those of torch's.

A shuffled loader of torchdata has a generator of its own, seeded when the loader is made, and draws an epoch's order in
``iter``, not at the first index. With workers torch iterates over a sampler twice, and the second order is the epoch's.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Sized
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
import torch.utils.data

from asyncloader.protocols import answers_of, is_stateful

_DRAWN_AT_ONCE = 32
"""Indices with replacement, as torchdata draws them."""
_PIECE = 8192
"""Indices of an order that are turned into numbers of Python at once."""


class RandomSampler(torch.utils.data.RandomSampler):
    """Samples in random order, the order of torchdata 0.11.

    Args:
        data_source: As torch's, and so on.
        replacement: An index may come more than once.
        num_samples: How many indices an epoch has; by default as many as there are.
        generator: Draws all epochs, one after the other. By default one of the sampler's own, which is seeded here from
            torch's global one.
    """

    draws_once = True

    def __init__(
        self,
        data_source: Sized,
        replacement: bool = False,
        num_samples: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        if generator is None:
            generator = torch.Generator()
            generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
        super().__init__(data_source, replacement, num_samples, generator)

    def __iter__(self) -> Iterator[int]:
        draw = partial(self._draw, len(self.data_source))
        first = draw()  # now, and not at the first index
        return islice(chain(first, chain.from_iterable(iter(draw, None))), self.num_samples)

    def _draw(self, count: int) -> Iterator[int]:
        if self.replacement:
            drawn = torch.randint(count, (_DRAWN_AT_ONCE,), dtype=torch.int64, generator=self.generator)
        else:
            drawn = torch.randperm(count, generator=self.generator)
        return chain.from_iterable(map(torch.Tensor.tolist, torch.split(drawn, _PIECE)))

    def generator_after(self, state: torch.Tensor, *, is_over: bool) -> torch.Generator:
        """Return a generator as it is after an epoch that was drawn from a state has begun, or is over."""
        other = copy.copy(self)
        other.generator = generator = torch.Generator()
        generator.set_state(state)
        indices = iter(other)
        if is_over:
            deque(indices, maxlen=0)
        return generator


class BatchSampler(torch.utils.data.BatchSampler):
    """Batches of indices of another sampler, which is iterated over when this one is, not at the first batch.

    The iterator provides a state, and that of the sampler, if the sampler or its iterator provides one.
    """

    draws_once = True

    def __iter__(self) -> Iterator[list[int]]:
        indices = iter(self.sampler)
        has_state = is_stateful(self.sampler) or is_stateful(indices)
        return (_StatefulBatches if has_state else _Batches)(self, indices)


class _Batches(Iterator[list[int]]):
    """Reads batches of indices."""

    def __init__(self, batches: BatchSampler, indices: Iterator[int]) -> None:
        self._batches, self._indices = batches, indices
        self._begun: list[int] = []  # of a batch in whose middle an interrupt has come
        self._samples = 0

    def __next__(self) -> list[int]:
        begun, size = self._begun, self._batches.batch_size
        begun.extend(islice(answers_of(self._indices), size - len(begun)))
        if not begun or (len(begun) < size and self._batches.drop_last):
            raise StopIteration
        self._samples += len(begun)
        self._begun = []
        return begun


class _StatefulBatches(_Batches):
    """Its states are those of torchdata."""

    def state_dict(self) -> dict[str, Any]:
        """Return how many samples were read, and where the sampler and its iterator are."""
        state: dict[str, Any] = {"samples_yielded": self._samples}
        things: dict[str, Any] = {"sampler_state": self._batches.sampler, "sampler_iter_state": self._indices}
        state |= {name: thing.state_dict() for name, thing in things.items() if is_stateful(thing)}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state: the sampler's is loaded before it is iterated over, its iterator's afterwards."""
        sampler: Any = self._batches.sampler
        if "sampler_state" in state:
            sampler.load_state_dict(state["sampler_state"])
        indices: Any = iter(sampler)
        if "sampler_iter_state" in state:
            indices.load_state_dict(state["sampler_iter_state"])
        self._samples, self._indices = state["samples_yielded"], indices
