"""`async for` gives what torch's `for` gives, on asyncio's loop and on uvloop's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch
import torch.utils.data

from tests.conformance.comparison import TORCHS_WAY, seed_everything, snapshot
from tests.conformance.datasets import Augmented, Failing, Samples, Squares

pytestmark = pytest.mark.on_threads

FEW_WORKERS = pytest.mark.parametrize("num_workers", [0, 2])


def pair(*args: Any, **options: Any) -> tuple[Any, Any]:
    """Our loader and torch's, of the same arguments."""
    mine = pytest.importorskip("asyncloader").DataLoader(*args, **options, **TORCHS_WAY)
    return mine, torch.utils.data.DataLoader(*args, **options)


async def story(batches: AsyncIterator[Any]) -> list[Any]:
    """Batches and errors in the order in which they come, until the end."""
    seen: list[Any] = []
    while True:
        try:
            seen.append(await anext(batches))
        except StopAsyncIteration:
            return seen
        except Exception as error:
            seen.append(type(error).__name__)


@pytest.mark.covering(1)
@FEW_WORKERS
@pytest.mark.parametrize("kind", ["int", "nested", "large tensor", "namedtuple", "str"])
async def test_batches_are_torchs(kind: str, num_workers: int) -> None:
    """Types and contents of small and large batches, shuffled, two epochs."""
    mine, torchs = pair(Samples(kind), 4, shuffle=True, num_workers=num_workers)
    seed_everything(1)
    taken = [[batch async for batch in mine] for _ in range(2)]
    seed_everything(1)
    assert snapshot(taken) == snapshot([list(torchs) for _ in range(2)])


@pytest.mark.processes
async def test_streams_are_torchs() -> None:
    """Augmentations in workers, bit for bit."""
    mine, torchs = pair(Augmented(9), 2, shuffle=True, num_workers=2)
    seed_everything(1)
    taken = [batch async for batch in mine]
    seed_everything(1)
    assert snapshot(taken) == snapshot(list(torchs))


@FEW_WORKERS
async def test_errors_come_where_torch_raises_them(num_workers: int) -> None:
    """And the next batches after them."""
    mine, torchs = pair(Failing(9, "ValueError", at=[0, 4, 8]), 2, num_workers=num_workers)
    taken = await story(aiter(mine))
    expected: list[Any] = []
    it = iter(torchs)
    for _ in range(len(torchs)):
        try:
            expected.append(next(it))
        except ValueError as error:
            expected.append(type(error).__name__)
            error.__traceback__ = None
    assert snapshot(taken) == snapshot(expected)


@FEW_WORKERS
async def test_stop_iteration_of_a_dataset_is_an_error(num_workers: int) -> None:
    """In the place of its batch; a future could not even hold it."""
    mine, _ = pair(Failing(9, "StopIteration", at=[5]), num_workers=num_workers)
    seen = []
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        async for batch in mine:
            seen.append(batch.item())
    assert seen == [0, 1, 2, 3, 4]


@FEW_WORKERS
async def test_both_faces_of_one_loader(num_workers: int) -> None:
    """`for` inside a running loop, `async for` after it, and both in turns."""
    mine, _ = pair(Squares(6), 2, num_workers=num_workers)
    by_for = [batch.tolist() for batch in mine]
    by_async_for = [batch.tolist() async for batch in mine]
    by_turns = [(a.tolist(), next(iter(mine)).tolist()) async for a in mine]
    assert by_for == by_async_for == [a for a, _ in by_turns]
    assert {tuple(first) for _, first in by_turns} == {tuple(by_for[0])}


@FEW_WORKERS
async def test_several_tasks_at_once(num_workers: int) -> None:
    """Each has its own iterator over one loader, and all batches."""
    mine, _ = pair(Squares(12), 2, num_workers=num_workers)

    async def take() -> list[Any]:
        return [batch.tolist() async for batch in mine]

    first, second, third = await asyncio.gather(take(), take(), take())
    assert first == second == third == [[i * i, (i + 1) ** 2] for i in range(0, 12, 2)]


@FEW_WORKERS
async def test_leaving_the_loop_early_and_taking_an_epoch_after_it(num_workers: int) -> None:
    """Breaking off leaves nothing behind."""
    mine, _ = pair(Squares(30), 2, num_workers=num_workers)
    async for _ in mine:
        break
    assert len([batch async for batch in mine]) == len(mine)
