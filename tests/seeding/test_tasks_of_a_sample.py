"""Tasks that a sample begins draw by the order in which it begins them, whichever of them waits longer."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from asyncloader import DataLoader, sample_rng, sample_seed
from asyncloader.seeding.sample_context import SampleContext, current, tell_tasks_apart
from asyncloader.seeding.seeder import Seeder

LENGTH = 10


def in_a_block() -> list[float]:
    """Draw twice, from all three global generators, as the sample's own."""
    draws = []
    for _ in range(2):
        with sample_seed():
            draws += [random.random(), np.random.rand(), torch.rand(()).item()]
    return draws


def from_its_own() -> list[float]:
    """Draw from the generator of the sample."""
    return sample_rng().random(2).tolist()


class Parted(torch.utils.data.Dataset[Any]):
    """Samples whose parts are made by tasks, one of which waits longer than the others."""

    def __init__(self, draw: Callable[[], list[float]], slow: int, *, on_threads: bool, nested: bool) -> None:
        self.draw, self.slow, self.on_threads, self.nested = draw, slow, on_threads, nested

    def __len__(self) -> int:
        return LENGTH

    async def part(self, number: int) -> list[float]:
        """Draw, and have a task draw, in the order of those that wait less."""
        await asyncio.sleep(0.003 if number == self.slow else 0)
        drawn = await asyncio.to_thread(self.draw) if self.on_threads else self.draw()
        return drawn + await asyncio.create_task(self.part(0)) if self.nested and number else drawn

    async def parts(self) -> torch.Tensor:
        """Return what three tasks draw, and what the sample draws before and after."""
        before = self.draw()
        parts = await asyncio.gather(*map(self.part, range(3)))
        return torch.tensor([*before, *itertools.chain(*parts), *self.draw()], dtype=torch.float64)


class Coroutines(Parted):
    """An async dataset."""

    async def __getitem__(self, index: int) -> torch.Tensor:
        return await self.parts()


def read(dataset: Any, num_workers: int, seeding: Any) -> torch.Tensor:
    """Read an epoch with one seed."""
    torch.manual_seed(11)
    return torch.cat(list(DataLoader(dataset, batch_size=5, num_workers=num_workers, seeding=seeding)))


@pytest.mark.leaks("the portal's loop keeps the threads of asyncio.to_thread for the next time")
@pytest.mark.parametrize("on_threads", [False, True], ids=["on the loop", "on threads"])
@pytest.mark.parametrize(
    ("draw", "num_workers", "seeding"),
    [(in_a_block, (1, 1, 2), "sample"), (from_its_own, (0, 0, 2), "sample"), (from_its_own, (1, 1, 2), "worker")],
)
def test_it_does_not_matter_which_task_waits_longer(
    draw: Any, num_workers: tuple[int, ...], seeding: str, on_threads: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Without workers and with them; and no two draws are alike."""
    epochs = [
        read(Coroutines(draw, slow, on_threads=on_threads, nested=True), number, seeding)
        for number, slow in zip(num_workers, (0, 2, 1), strict=True)
    ]
    assert torch.equal(epochs[0], epochs[1])
    assert torch.equal(epochs[0], epochs[2])
    assert len(epochs[0].unique()) == epochs[0].numel()
    assert not caplog.records  # no thread has waited for another one


def test_a_samples_position_in_a_batch_counts_also_in_a_task_of_the_batch() -> None:
    """`__getitems__` that makes each sample in a task gives what it gives one after the other."""
    batch = SampleContext.of_sample(Seeder((3, 0, 0)), 4, first=20)
    assert batch.of_task().of(1) is batch.of_task().of_task().of(1) is batch.of(1)


def test_a_factory_of_the_users_makes_tasks_as_before() -> None:
    """On a loop of the user's, tasks are of the user's kind, with numbers of their own inside a sample."""
    places = []

    async def part() -> None:
        places.append(current.get().place())

    def make(loop: Any, coroutine: Any) -> Any:
        task = asyncio.Task(coroutine, loop=loop)
        made.append(task)
        return task

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_task_factory(make)
        tell_tasks_apart(loop)
        tell_tasks_apart(loop)  # once is enough
        await asyncio.gather(asyncio.sleep(0), asyncio.sleep(0))
        current.set(SampleContext.of_sample(Seeder((3, 0, 0)), 4, position=2))
        for _ in range(2):
            await asyncio.create_task(part())
        await part()
        assert len(made) == 4

    made: list[Any] = []
    asyncio.run(main())
    assert len(set(places)) == 3
