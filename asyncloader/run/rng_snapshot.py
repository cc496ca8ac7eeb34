"""The random generators that the order of an epoch is drawn from: saved at its beginning, to draw it anew.

generator                       state as text
torch's, global or an own one   7 kB
Python's, numpy's global ones   4 kB each, and only where samplers are not torch's, nor tell a state
"""

from __future__ import annotations

import base64
import contextlib
import json
import random
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
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
from asyncloader.seeding.turns import untouched

_DRAW_NOTHING = (SequentialSampler, DistributedSampler, BatchSampler, _InfiniteConstantSampler)
_DRAW_FROM_TORCH = (RandomSampler, WeightedRandomSampler, SubsetRandomSampler)
KNOWN_SAMPLERS = (*_DRAW_NOTHING, *_DRAW_FROM_TORCH)
"""Torch's samplers: to iterate over one moves its generator, if it has one, and nothing else."""


class _Source(Protocol):
    """One generator."""

    def capture(self) -> Any:
        """Take its state as it is."""

    def restore(self, state: Any) -> None:
        """Set it to a state that was captured."""

    def check(self) -> int:
        """Return a number that tells its state from others, in any process."""

    def encode(self, state: Any) -> Any:
        """Write a captured state as plain data."""

    def decode(self, plain: Any) -> Any:
        """Read what `encode` has written."""


class _TorchSource:
    """A generator of torch's."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def capture(self) -> Any:
        return self.generator.get_state()

    def restore(self, state: Any) -> None:
        self.generator.set_state(state)

    def check(self) -> int:
        return zlib.crc32(self.generator.get_state().numpy().data)

    def encode(self, state: Any) -> Any:
        return _packed(state.numpy())

    def decode(self, plain: Any) -> Any:
        return torch.from_numpy(_unpacked(plain, np.uint8))


class _PythonSource:
    """The generator of the module `random`."""

    def capture(self) -> Any:
        return random.getstate()

    def restore(self, state: Any) -> None:
        random.setstate(state)

    def check(self) -> int:
        return hash(random.getstate()[1]) & 0xFFFFFFFF  # a hash of numbers alone is the same in every process

    def encode(self, state: Any) -> Any:
        version, words, gauss = state
        return [version, _packed(np.array(words, np.uint32)), gauss]

    def decode(self, plain: Any) -> Any:
        version, words, gauss = plain
        return version, tuple(_unpacked(words, np.uint32).tolist()), gauss


class _NumpySource:
    """numpy's global generator."""

    def capture(self) -> Any:
        return np.random.get_state()

    def restore(self, state: Any) -> None:
        np.random.set_state(state)

    def check(self) -> int:
        state: Any = np.random.get_state()
        return zlib.crc32(state[1].data, int(state[2]))

    def encode(self, state: Any) -> Any:
        name, keys, *rest = state
        return [name, _packed(keys), *rest]

    def decode(self, plain: Any) -> Any:
        name, keys, *rest = plain
        return (name, _unpacked(keys, np.uint32), *rest)


class GlobalGenerators:
    """The global generators of this process, which are the trainer's, while the state of a dataset is brought back.

    Making batches again from that state draws what was drawn before the trainer saved them, so they are put back
    afterwards; except those that the state itself has set.
    """

    def __init__(self) -> None:
        self._sources: list[_Source] = [_TorchSource(torch.default_generator), _PythonSource(), _NumpySource()]
        with untouched():
            self._before = [source.check() for source in self._sources]

    def loaded(self) -> None:
        """The state was loaded."""
        with untouched():
            now = [source.check() for source in self._sources]
        pairs = zip(self._sources, self._before, now, strict=True)
        self._sources = [source for source, before, after in pairs if before == after]

    @contextlib.contextmanager
    def left_alone(self) -> Iterator[None]:
        """Leave the generators as they are, whatever is drawn from them meanwhile."""
        with untouched():
            states = [(source, source.capture()) for source in self._sources]
            try:
                yield
            finally:
                try:
                    for source, state in states:
                        source.restore(state)
                except BaseException:  # a Ctrl-C came between two of them
                    for source, state in states:
                        source.restore(state)
                    raise


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
            others |= type(sampler) not in _DRAW_FROM_TORCH and not is_stateful(sampler)
        self._sources: list[_Source] = [_TorchSource(own) for own in generators]
        if others:
            self._sources += [_PythonSource(), _NumpySource()]
        is_global = others or any(own is torch.default_generator for own in generators)
        self._untouched: Callable[[], AbstractContextManager[Any]] = (
            untouched if is_global else nullcontext
        )  # other generators are nobody's in between

    def __len__(self) -> int:
        return len(self._sources)

    def capture(self) -> list[Any]:
        """Take the generators' states as they are: 1 us, and 40 where Python's and numpy's count."""
        with self._untouched():
            return [source.capture() for source in self._sources]

    def restore(self, states: list[Any], where: list[bool] | None = None) -> None:
        """Set the generators, or those of them that ``where`` names, to states that were captured."""
        with self._untouched():
            for number, (source, state) in enumerate(zip(self._sources, states, strict=False)):
                if where is None or where[number]:
                    source.restore(state)

    def check(self) -> list[int]:
        """Return numbers that tell these states from others. Taken with each state of a loader, so quick: 2 us."""
        with self._untouched():
            return [source.check() for source in self._sources]

    def as_text(self, states: list[Any]) -> str:
        """Write captured states down as JSON."""
        plain = [source.encode(state) for source, state in zip(self._sources, states, strict=True)]
        return json.dumps(plain)

    def from_text(self, text: str) -> list[Any]:
        """Read what `as_text` has written."""
        return [source.decode(plain) for source, plain in zip(self._sources, json.loads(text), strict=False)]


def _packed(numbers: Any) -> str:
    return base64.b64encode(numbers.tobytes()).decode()


def _unpacked(text: str, kind: Any) -> Any:
    return np.frombuffer(base64.b64decode(text), kind).copy()
