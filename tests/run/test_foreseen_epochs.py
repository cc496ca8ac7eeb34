"""What copies of the dataset hear of epochs, and how they go on, where runs are begun ahead: as where they are not."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from asyncloader import DataLoader
from tests import inside
from tests.patience import wait_until

LENGTH = 8


class Reseeded:
    """Draws from generators that each epoch seeds anew, and counts what it has heard."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.seed = -1

    def set_epoch(self, epoch: int) -> None:
        self.seed = epoch
        self.calls = [*self.calls, epoch]

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        drawn = random.Random(f"{self.seed} {index}").randrange(1 << 30)
        return index, drawn, len(self.calls), self.calls[-1] if self.calls else -1


class KeepsOne(Reseeded):
    """Keeps a generator, which the loader seeds by what the trainer's has become: that cannot be foreseen."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = random.Random(-1)

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.rng = random.Random(epoch)

    def __getitem__(self, index: int) -> Any:
        return index, self.rng.randrange(1 << 30), len(self.calls), self.calls[-1] if self.calls else -1


class ByEpoch(Reseeded):
    """Gives what depends on index and epoch alone."""

    def __getitem__(self, index: int) -> Any:
        return index, 0, len(self.calls), self.calls[-1] if self.calls else -1


class ShowsIt(Reseeded):
    """Tells its epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.epoch = epoch


def wait_until_foreseen(loader: Any) -> bool:
    """Wait until all is made that is made ahead; return whether there is something."""
    foreseen = inside.foreseen(inside.newest_iterator(loader))
    if foreseen is not None:
        wait_until(lambda: len(foreseen.run.handoff.ready) == foreseen.batches)
    return foreseen is not None


def epochs_of(
    dataset: Any, set_to: Sequence[int | None], prefetch_epochs: int, *, draws: bool = False, **options: Any
) -> tuple[list[Any], int]:
    """Return the batches of some epochs, before each of which one is set or not, and how many were foreseen."""
    torch.manual_seed(3)
    loader = DataLoader(
        dataset,
        num_workers=1,
        persistent_workers=True,
        prefetch_epochs=prefetch_epochs,
        max_buffered_bytes=0,
        **options,
    )
    seen, foreseen = [], 0
    for epoch in set_to:
        if epoch is not None:
            loader.set_epoch(epoch)
        seen.append([tuple(map(int, batch)) for batch in loader])
        if prefetch_epochs:
            foreseen += wait_until_foreseen(loader)
        if draws:
            torch.rand(3)
    loader.close()
    return seen, foreseen


def data(epochs: list[Any]) -> list[Any]:
    """Return what a trainer sees, without what copies have heard."""
    return [[sample[:2] for sample in epoch] for epoch in epochs]


def heard(epochs: list[Any]) -> list[int]:
    """Return how often the copy had been told of an epoch, by epoch."""
    return [epoch[0][2] for epoch in epochs]


EVERY = [(0, 1, 2, 3, 4), (7, 7, 7, 7), (3, 2, 1, 0), (0, 1, 5, 6, 7, 3), (0, 0, 1, 1, 2, 2), (0, 10, 20, 30)]
ONCE = [(3, None, None, None), (None, None, None), (None, 3, None, None)]


@pytest.mark.covering(1)
@pytest.mark.parametrize("draws", [False, True], ids=["", "draws"])
@pytest.mark.parametrize("kind", [Reseeded, KeepsOne, ByEpoch, ShowsIt])
@pytest.mark.parametrize("backend", ["process", "thread"])
@pytest.mark.parametrize("set_to", EVERY, ids=str)
def test_what_is_set_before_each_run_is_set_whatever_was_foreseen(
    set_to: Any, backend: Any, kind: Any, draws: bool
) -> None:
    """Also the same again, and where the trainer draws between, so that nothing that was foreseen comes."""
    options: Any = {"shuffle": True, "worker_backend": backend, "draws": draws}
    without, _ = epochs_of(kind(), set_to, 0, **options)
    seen, foreseen = epochs_of(kind(), set_to, 1, **options)
    assert data(seen) == data(without)
    assert foreseen


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", [Reseeded, ByEpoch, ShowsIt])
@pytest.mark.parametrize("backend", ["process", "thread"])
@pytest.mark.parametrize("set_to", [*ONCE, (0, 1, 2, 3, 4), (7, 7, 7, 7), (9, 7, 5, 3)], ids=str)
def test_copies_hear_what_they_hear_without(set_to: Any, backend: Any, kind: Any) -> None:
    """As often, where epochs go on as they did; what is set once is not guessed to go on."""
    without, _ = epochs_of(kind(), set_to, 0, worker_backend=backend)
    seen, _ = epochs_of(kind(), set_to, 1, worker_backend=backend)
    assert seen == without


@pytest.mark.covering(1)
@pytest.mark.parametrize("draws", [False, True], ids=["", "draws"])
@pytest.mark.parametrize("set_to", [(0, 1, 2, 7, 3, 4, 9), (0, 1, 2, None, 3, None, 4), (0, 1, None, None)], ids=str)
def test_one_epoch_at_most_is_told_in_vain(set_to: Any, draws: bool) -> None:
    """Afterwards no copy is told anything before the trainer says it. What depends on the epoch alone is right."""
    without, _ = epochs_of(ByEpoch(), set_to, 0, draws=draws, shuffle=True)
    seen, _ = epochs_of(ByEpoch(), set_to, 1, draws=draws, shuffle=True)
    assert [[(sample[0], sample[3]) for sample in epoch] for epoch in seen] == [
        [(sample[0], sample[3]) for sample in epoch] for epoch in without
    ]
    extra = [more - less for more, less in zip(heard(seen), heard(without), strict=True)]
    assert extra == sorted(extra)
    assert extra[-1] <= 2  # in vain, and what holds again


def test_each_epoch_is_foreseen_where_they_go_on() -> None:
    """None of them is read twice after the first two."""
    set_to = range(5)
    seen, foreseen = epochs_of(Reseeded(), set_to, 1)
    assert foreseen == len(set_to)
    assert heard(seen) == [1, 2, 3, 4, 5]


def test_where_the_trainer_draws_it_stops_to_tell_ahead() -> None:
    """Each would be in vain: copies would hear all twice."""
    seen, _ = epochs_of(Reseeded(), range(6), 1, draws=True, shuffle=True)
    assert heard(seen) == [1, 2, 4, 5, 6, 7]


def test_a_run_that_was_broken_off_teaches_nothing() -> None:
    """What is set before the next but one is not a step."""
    loader: Any = DataLoader(ByEpoch(), num_workers=1, persistent_workers=True, prefetch_epochs=1)
    for epoch in range(6):
        loader.set_epoch(epoch)
        batches = []
        for batch in loader:
            batches.append([int(column) for column in batch])
            if epoch == 3 and len(batches) == 2:
                break
        assert {batch[3] for batch in batches} == {epoch}
        assert {batch[2] for batch in batches} == {epoch + 1}
        if epoch != 3:
            wait_until_foreseen(loader)
    loader.close()
