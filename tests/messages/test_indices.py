"""Indices of a batch as an array: nobody sees anything but a list of Python's own ints."""

from __future__ import annotations

import gc
import pickle
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from asyncloader import DataLoader
from asyncloader.messages.indices import Indices, listed
from asyncloader.messages.tickets import pack_tickets, pickle_tickets, unpack_tickets
from asyncloader.seeding.sample_context import Placed


def test_on_the_way_there_is_the_array_alone() -> None:
    """A worker makes the same of it: a list of Python's own ints, with the array beside it."""
    keys = Indices([3, 1, 2], np.array([3, 1, 2]))
    tickets = [(0, keys), (1, [7, 8]), (2, "name"), (3, Placed(keys, 8)), (4, Placed([7, 8], 11))]
    pickled, refused = pickle_tickets([*tickets, (5, lambda: 0)])
    assert [ticket for ticket, _ in refused] == [5]
    returned, arrived = unpack_tickets(b"".join(pack_tickets(pickled)))
    numbers, plain, name, placed, plain_placed = (pickle.loads(keys) for _, keys in arrived)
    assert ([ticket for ticket, _ in arrived], returned) == ([0, 1, 2, 3, 4], ())
    assert (plain, name) == ([7, 8], "name")
    assert type(numbers) is type(placed.keys) is Indices
    assert len(pickle.dumps(keys.array.tobytes())) < len(arrived[0][1]) < 300
    assert (placed.keys, placed.first, plain_placed) == ([3, 1, 2], 8, Placed([7, 8], 11))
    assert (numbers, numbers.array.tolist()) == ([3, 1, 2], [3, 1, 2])
    assert {type(number) for number in [*numbers, *listed(numbers)]} == {int}


def test_elsewhere_it_is_a_list() -> None:
    """For errors and states that are pickled, and whoever looks at it."""
    keys = Indices([3, 1, 2], np.array([3, 1, 2]))
    assert keys == [3, 1, 2]
    assert repr(keys) == "[3, 1, 2]"
    assert [type(other) for other in (pickle.loads(pickle.dumps(keys)), listed(keys), keys[1:])] == [list] * 3
    assert listed("name") == "name"


class Noting(list[int]):
    """Indices of a Subset, which say of what kinds they were asked."""

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index) if type(index) is int else 1 / 0


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_what_users_see(num_workers: int, shuffle: bool) -> None:
    """Their own sequences are asked for Python's ints; a row that cannot be gathered is fetched as ever."""
    data = TensorDataset(torch.arange(100.0))
    torch.manual_seed(0)
    loader: DataLoader[Any] = DataLoader(Subset(data, Noting(range(50, 100))), 8, shuffle, num_workers=num_workers)
    got = torch.cat([batch for (batch,) in loader])
    torch.manual_seed(0)
    expected = torch.utils.data.DataLoader(Subset(data, list(range(50, 100))), 8, shuffle)
    assert got.tolist() == torch.cat([batch for (batch,) in expected]).tolist()
    wrong: DataLoader[Any] = DataLoader(Subset(data, [3, 100]), 2, num_workers=num_workers)
    with pytest.raises(IndexError):
        list(wrong)


def test_why_keys_cannot_be_pickled_is_in_no_cycle() -> None:
    """The consumer that it is raised in, and so the workers, would stay until a collection."""

    class Refusal(Exception):
        """Can be referred to weakly, and lets nobody set anything, as a frozen dataclass."""

        def __setattr__(self, name: str, value: object) -> None:
            raise AttributeError(name)

    class Key:
        def __reduce__(self) -> Any:
            raise Refusal

    gc.disable()
    try:
        _, refused = pickle_tickets([(0, Key())])
        ((_, error),) = refused
        kept = weakref.ref(error)
        assert "in __reduce__" in error.__notes__[0]
        del refused, error, _
        assert kept() is None
    finally:
        gc.enable()
