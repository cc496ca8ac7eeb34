"""Datasets with two faces: ours awaits them, also inside torch's wrappers; everybody else reads them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, random_split

from asyncloader import ConfigurationError, DataLoader
from asyncloader.async_face import batch_method, sample_method
from asyncloader.protocols import is_async

pytestmark = pytest.mark.on_threads


class Squares(Dataset[int]):
    """Squares, which note by which face they were asked for."""

    is_remote = True

    def __init__(self, length: int = 20) -> None:
        self.length = length
        self.faces: list[str] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.length:
            raise IndexError(index)
        self.faces.append("plain")
        return index * index

    async def getitem(self, index: int) -> int:
        """Await a sample."""
        self.faces.append("awaited")
        await asyncio.sleep(0)
        return index * index


class Batches(Squares):
    """The same, in batches only."""

    getitem = None  # type: ignore[assignment]

    async def getitems(self, indices: list[int]) -> list[int]:
        """Await a batch."""
        self.faces.append(f"batch of {len(indices)}")
        return [index * index for index in indices]


class Local(Squares):
    """One that gains nothing by being awaited."""

    is_remote = False


class Doubled(Subset[int]):
    """A wrapper of the user's with a method of its own."""

    def __getitem__(self, index: Any) -> Any:
        return 2 * super().__getitem__(index)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def wrapped(dataset: Any) -> dict[str, Any]:
    """Return the dataset in each of torch's wrappers."""
    return {
        "alone": dataset,
        "Subset": Subset(dataset, [5, 3, 1, 0]),
        "Subset of a Subset": Subset(Subset(dataset, range(10)), [7, 2]),
        "random_split": random_split(dataset, [6, 14], torch.Generator().manual_seed(1))[0],
        "ConcatDataset": ConcatDataset([dataset, Subset(dataset, [3, 4])]),
        "ConcatDataset of a Subset": Subset(ConcatDataset([range(3), dataset]), [4, 1, 22]),
        "a wrapper of the user's": Doubled(dataset, [5, 3]),
    }


@pytest.mark.covering(2)
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", [Squares, Batches, Local])
@pytest.mark.parametrize("name", wrapped(range(20)))
def test_both_faces_give_the_same(kind: Any, name: str, num_workers: int) -> None:
    """Through every wrapper, in torch's loader and in ours, with workers and without."""
    torchs = list(torch.utils.data.DataLoader(wrapped(kind())[name], batch_size=3))
    ours = list(DataLoader(wrapped(kind())[name], batch_size=3, num_workers=num_workers))
    assert repr(ours) == repr(torchs)


@pytest.mark.parametrize(
    ("kind", "name", "faces"),
    [
        (Squares, "alone", {"awaited"}),
        (Squares, "Subset of a Subset", {"awaited"}),
        (Squares, "ConcatDataset", {"awaited"}),
        (Squares, "a wrapper of the user's", {"plain"}),
        (Batches, "alone", {"batch of 3", "batch of 2"}),
        (Batches, "Subset", {"batch of 3", "batch of 1"}),
        (Batches, "ConcatDataset", {"batch of 1"}),
        (Local, "ConcatDataset", {"plain"}),
    ],
)
def test_which_face_is_used(kind: Any, name: str, faces: set[str]) -> None:
    """The awaited one where there is one, and it is of use."""
    dataset = kind()
    list(DataLoader(wrapped(dataset)[name], batch_size=3))
    assert set(dataset.faces) == faces
    assert is_async(wrapped(dataset)[name]) == (kind is not Local)


def test_numbers_that_are_none_are_errors_of_the_wrapper() -> None:
    """As torch says it."""
    concatenated = ConcatDataset([Squares(3), Squares(4)])
    assert batch_method(concatenated) is None
    with pytest.raises(ValueError, match="absolute value of index should not exceed dataset length"):
        sample_method(concatenated)(-8)
    assert asyncio.run(sample_method(concatenated)(-7)) == 0
    with pytest.raises(IndexError):
        sample_method(concatenated)(7)


@pytest.mark.parametrize("kind", [Squares, Batches])
def test_stacks_of_what_is_awaited_are_refused(kind: Any) -> None:
    """torch's StackDataset would put coroutines together, or block the loop. One that gains nothing is plain."""
    for stack in (StackDataset(range(20), kind()), StackDataset(a=kind()), Subset(StackDataset(kind()), [1])):
        with pytest.raises(ConfigurationError, match="StackDataset awaits none of the samples"):
            DataLoader(stack)
    assert len(list(DataLoader(StackDataset(Local(), range(20)), batch_size=10))) == 2  # type: ignore[arg-type]
