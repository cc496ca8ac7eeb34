"""Samples that are made in this process under seeds of their own, while the loader draws from the same generators.

A block stays where it is while the loader draws, if the loader does not wait for its end: so each order below is
another one if it does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, Sampler

from asyncloader import DataLoader, sample_seed
from asyncloader.run.rng_snapshot import RNGSnapshot

pytestmark = pytest.mark.on_threads

LENGTH = 12

inside = threading.Event()
"""A block is going on."""
drawn = threading.Event()
"""The loader has drawn: set by the tests. A block stays until then, and not for ever."""


class Blocks(Dataset[Any]):
    """Each sample has a block."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        with sample_seed():
            inside.set()
            drawn.wait(0.05)
            inside.clear()
            return index, random.random()


class AwaitedBlocks(Blocks):
    async def __getitem__(self, index: int) -> Any:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().__getitem__(index)


class Lazily(Sampler[int]):
    """Draws each index from torch's global generator."""

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        for _ in range(LENGTH):
            yield int(torch.randint(LENGTH, ()))
            drawn.set()
            drawn.clear()


KINDS: dict[str, tuple[type[Dataset[Any]], dict[str, Any]]] = {
    "threads": (Blocks, {"num_workers": 2, "worker_backend": "thread"}),
    "on the loop": (AwaitedBlocks, {"num_workers": 0}),
}
APART: dict[str, Any] = {"num_workers": 2, "worker_backend": "process"}
"""No block is in this process: without a backend, the quick tests of this module have threads."""


@contextlib.contextmanager
def beside_a_block(loader: DataLoader[Any]) -> Iterator[None]:
    """Do what is inside while a block of this loader's runs, as far as it is not waited for."""
    drawn.clear()
    if loader.num_workers == 0 or loader.worker_backend == "thread":
        inside.wait(0.5)
    yield
    drawn.set()


def broken_off(loader: DataLoader[Any]) -> Iterator[Any]:
    """Epochs are left after a batch, whose workers go on; the next one is drawn."""
    iterator = iter(loader)
    for _ in range(3):
        yield next(iterator)[0].tolist()
        with beside_a_block(loader):
            iterator = iter(loader)


def with_another(loader: DataLoader[Any]) -> Iterator[Any]:
    """Another loader is begun in the middle, and the first one after it."""
    other = DataLoader(range(LENGTH), LENGTH, shuffle=True)  # type: ignore[arg-type]
    for _ in range(2):
        for number, batch in enumerate(loader):
            yield batch[0].tolist()
            if number == 1:
                with beside_a_block(loader):
                    yield [part.tolist() for part in other]


def resumed(loader: DataLoader[Any]) -> Iterator[Any]:
    """The state is taken and loaded at once."""
    for _ in range(3):
        iterator = iter(loader)
        yield next(iterator)[0].tolist()
        with beside_a_block(loader):
            loader.load_state_dict(loader.state_dict())
    yield from (batch[0].tolist() for batch in loader)


def read(loader: DataLoader[Any]) -> Iterator[Any]:
    """The sampler is read while batches are made."""
    for _ in range(2):
        yield from (batch[0].tolist() for batch in loader)


def orders(way: Callable[[DataLoader[Any]], Iterator[Any]], dataset: type[Dataset[Any]], **options: Any) -> list[Any]:
    torch.default_generator.manual_seed(3)
    loader = DataLoader(dataset(), 2, seeding="sample", **options)
    found = list(way(loader))
    loader.close()
    return found


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", [broken_off, with_another, resumed])
def test_an_order_is_drawn_from_the_trainers_generators(way: Any, kind: str) -> None:
    """It is the same as with workers in processes of their own, where nothing is beside it."""
    dataset, options = KINDS[kind]
    expected = orders(way, Blocks, shuffle=True, **APART)
    assert orders(way, dataset, shuffle=True, **options) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_sampler_that_draws_as_it_is_read_draws_from_the_trainers_generators(kind: str) -> None:
    """At each index."""
    dataset, options = KINDS[kind]
    expected = orders(read, Blocks, sampler=Lazily(), **APART)
    assert orders(read, dataset, sampler=Lazily(), **options) == expected


class Placed(Dataset[Any]):
    """Its samples are seeded one after the other, without blocks."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        inside.set()
        drawn.wait(0.05)
        return index, random.random(), float(torch.rand(()))


async def test_a_state_that_is_taken_while_a_batch_is_made_is_of_the_trainers_generators() -> None:
    """Without workers, `async for` makes it on a thread; what seeds its samples is not what the state is to note."""
    torch.default_generator.manual_seed(3)
    loader = DataLoader(Placed(), 2, shuffle=True, seeding="sample")
    iterator = aiter(loader)
    await anext(iterator)
    expected = RNGSnapshot(None, []).check()
    inside.clear()
    drawn.clear()
    waiting = asyncio.ensure_future(anext(iterator))
    assert await asyncio.to_thread(inside.wait, 30)
    state = loader.state_dict()
    drawn.set()
    await waiting
    assert state["check"] == expected
    loader.close()
