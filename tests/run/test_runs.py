"""What a loader knows of its runs: how much of one is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.utils.data import IterableDataset

from asyncloader import DataLoader
from asyncloader.samplers import ElasticSampler, LengthBatchSampler, MixtureSampler, PackingBatchSampler
from tests import inside


@pytest.mark.parametrize("options", [{"num_workers": 0}, {"num_workers": 2}, {"num_workers": 2, "in_order": False}])
def test_what_remains(options: dict[str, Any]) -> None:
    """It goes down with each batch, and belongs to the run that a state goes on with."""
    loader = DataLoader(range(10), batch_size=2, **options)  # type: ignore[arg-type]
    assert loader.remaining() == 5
    iterator = iter(loader)
    for left in (4, 3, 2):
        next(iterator)
        assert loader.remaining() == left
    state = loader.state_dict()
    assert len(list(iterator)) == 2
    assert loader.remaining() == 5
    loader.load_state_dict(state)
    assert (loader.remaining(), len(loader)) == (2, 5)
    assert len(list(loader)) == 2
    assert loader.remaining() == 5
    loader.load_state_dict(loader.state_dict())
    assert loader.remaining() == 5


LENGTHS = [5 + 7 * index % 11 for index in range(300)]

# By name, the options of a loader on a rank, with batches of so many samples.
ELASTIC: dict[str, Callable[[int, int, int], dict[str, Any]]] = {
    "samples": lambda rank, ranks, size: {"batch_size": size, "sampler": ElasticSampler(300, ranks, rank)},
    "short batches dropped": lambda rank, ranks, size: {
        "batch_size": size,
        "drop_last": True,
        "sampler": ElasticSampler(300, ranks, rank, drop_last=True),
    },
    "a mixture": lambda rank, ranks, size: {
        "batch_size": size,
        "sampler": MixtureSampler([180, 120], stop="all", num_replicas=ranks, rank=rank),
    },
    "by length": lambda rank, ranks, size: {
        "batch_sampler": LengthBatchSampler(LENGTHS, max_tokens=60, window=40, num_replicas=ranks, rank=rank)
    },
    "packed": lambda rank, ranks, size: {
        "batch_sampler": PackingBatchSampler(
            LENGTHS,
            block_size=16,
            batch_size=size,
            window=50,
            sampler=MixtureSampler([180, 120], stop="first", num_replicas=1, rank=0),
            num_replicas=ranks,
            rank=rank,
        )
    },
}


@pytest.mark.parametrize("kind", ELASTIC)
def test_what_remains_of_an_order_that_is_divided_anew(kind: str) -> None:
    """By other ranks, and in batches of other sizes, again and again; in the middle of any epoch."""

    def loader_of(rank: int, ranks: int, size: int) -> DataLoader[Any]:
        return DataLoader(range(300), collate_fn=list, **ELASTIC[kind](rank, ranks, size))  # type: ignore[arg-type]

    loader = loader_of(1, 4, 4)
    loader.set_epoch(2)
    state: dict[str, Any] = {}
    for rank, ranks, size in [(1, 4, 4), (0, 2, 4), (2, 3, 2), (0, 3, 2)]:
        loader = loader_of(rank, ranks, size)
        loader.set_epoch(2)
        if state:
            loader.load_state_dict(state)
        said = [loader.remaining()]
        iterator = iter(loader)
        for number, _ in enumerate(iterator):
            if number < 2:
                state = loader.state_dict()
            said.append(loader.remaining())
        said[-1] = said[-1] if inside.runs(loader).done else 0  # all of the next epoch, when this one is over
        assert said == [*range(len(said) - 1, -1, -1)]
        assert len(said) > 3
        assert loader.remaining() == len(loader)


@pytest.mark.parametrize("has_past", [False, True])
def test_what_remains_of_an_epoch_of_which_no_batch_was_given(has_past: bool) -> None:
    """A state belongs to its epoch from the moment on at which that begins; its length is not that of another one."""
    options = ELASTIC["by length"]
    lengths = [len(loader_at(options(1, 4, 4), epoch)) for epoch in range(6)]
    assert len(set(lengths)) > 1
    for epoch, length in enumerate(lengths):
        loader = loader_at(options(1, 4, 4), epoch)
        if has_past:
            loader.set_epoch(0)
            assert len(list(loader)) == lengths[0]
            loader.set_epoch(epoch)
        iterator = iter(loader)
        resumed = loader_at(options(1, 4, 4), 0)
        resumed.load_state_dict(loader.state_dict())
        assert resumed.remaining() == length
        assert len(list(resumed)) == length
        assert len(list(iterator)) == length
        resumed.set_epoch((epoch + 1) % 6)
        assert resumed.remaining() == lengths[(epoch + 1) % 6]


def loader_at(options: dict[str, Any], epoch: int) -> DataLoader[Any]:
    """Make a loader, and set its epoch."""
    loader: DataLoader[Any] = DataLoader(range(300), collate_fn=list, **options)  # type: ignore[arg-type]
    loader.set_epoch(epoch)
    return loader


@pytest.mark.parametrize("num_workers", [0, 2])
def test_states_of_a_run_are_made_without_freezing_the_settings_anew(
    num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That takes as long as all the rest of a state, which some take after every batch."""
    loader = DataLoader(range(8), batch_size=2, num_workers=num_workers)  # type: ignore[arg-type]
    iterator = iter(loader)
    next(iterator)
    monkeypatch.setattr(DataLoader, "_loader_options", lambda self: pytest.fail("the settings were made anew"))
    assert loader.state_dict()["position"] == 1
    assert len(list(iterator)) == 3
    assert loader.state_dict()["finished"]


class Endless(IterableDataset[int]):
    """Says nothing of its length."""


def test_what_has_no_length() -> None:
    """As `len` says it."""
    with pytest.raises(TypeError):
        DataLoader(Endless()).remaining()
