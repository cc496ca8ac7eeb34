"""States of states: a run that is interrupted again and again is of one epoch, whoever shows it or keeps it to himself.

set_epoch(5) ── 3 batches ── state ──> 3 batches ── state ──> 3 batches ── ... ──> the end ──> the next run
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, ConcatDataset, IterableDataset, Sampler, Subset

from asyncloader import DataLoader
from asyncloader.samplers import ElasticSampler, MixtureSampler, WeightedSampler
from tests.support import effort, inside

pytestmark = pytest.mark.on_threads

LENGTH = 16
PART = 3
WAYS = [(0, False), (1, False), (1, True)]


class Shown:
    """Augments by the epoch, and shows it."""

    def __init__(self, length: int = LENGTH, first: int = 0) -> None:
        self.epoch = 0
        self.length = length
        self.first = first

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return int(100 * self.epoch + self.first + index)


class Hidden(Shown):
    """Keeps the epoch to itself."""

    def __init__(self, length: int = LENGTH, first: int = 0) -> None:
        self._epoch = 0
        self.length = length
        self.first = first

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __getitem__(self, index: int) -> int:
        return 100 * self._epoch + self.first + index


class Numpys(Shown):
    """Shows it as a number of numpy's."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = cast(int, np.int64(epoch))


class HiddenStream(IterableDataset[int]):
    """Keeps it to itself, and has no state."""

    def __init__(self) -> None:
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([100 * self._epoch + index for index in range(LENGTH)])


class HiddenOrder(Sampler[int]):
    """A sampler that does."""

    def __init__(self) -> None:
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        return iter([100 * self._epoch + index for index in range(LENGTH)])


class Keys:
    """Gives the keys themselves."""

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, key: int) -> int:
        return key


def nested() -> Any:
    """Of two of which one shows it, inside of torch's wrappers."""
    half = LENGTH // 2
    hidden: Any = Hidden(half, half)
    return ConcatDataset([cast(Any, Shown(half)), Subset(hidden, range(half))])


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "shown": lambda: {"dataset": Shown()},
    "hidden": lambda: {"dataset": Hidden()},
    "numpys": lambda: {"dataset": Numpys()},
    "nested": lambda: {"dataset": nested()},
    "stream": lambda: {"dataset": HiddenStream()},
    "sampler": lambda: {"dataset": Keys(), "sampler": HiddenOrder()},
    "batch sampler": lambda: {"dataset": Keys(), "batch_sampler": BatchSampler(HiddenOrder(), 1, drop_last=False)},
}


def make(kind: str, num_workers: int, persistent: bool, **options: Any) -> DataLoader[Any]:
    """Return a loader whose samples tell their epoch."""
    workers = {
        "num_workers": min(num_workers, 1) if kind == "stream" else num_workers,
        "persistent_workers": persistent,
    }
    return DataLoader(**{**KINDS[kind](), **workers, **options})


def in_epoch(epoch: int) -> list[int]:
    """What it should give."""
    return [100 * epoch + index for index in range(LENGTH)]


def part_of_run(loader: DataLoader[Any], count: int) -> tuple[list[int], dict[str, Any]]:
    """Take so many batches, and then a state; what is left is dropped."""
    with iter(loader) as iterator:
        samples = [int(next(iterator)[0]) for _ in range(count)]
        return samples, json.loads(json.dumps(loader.state_dict()))


def part_of_async_run(loader: DataLoader[Any], count: int) -> tuple[list[int], dict[str, Any]]:
    """Do it in a loop."""

    async def take() -> tuple[list[int], dict[str, Any]]:
        async with aiter(loader) as iterator:
            samples = [int((await anext(iterator))[0]) for _ in range(count)]
            return samples, json.loads(json.dumps(loader.state_dict()))

    return asyncio.run(take())


def rest_of_run(loader: DataLoader[Any]) -> list[int]:
    """Take all that is left."""
    return [int(batch[0]) for batch in loader]


def told(state: dict[str, Any]) -> set[int | None]:
    """Return which epochs are in a state."""
    return {epoch for epoch in (*state["dataset_epochs"], *state["set_epochs"]) if epoch is not None}


@pytest.mark.covering(2)
@pytest.mark.parametrize("part", [part_of_run, part_of_async_run])
@pytest.mark.parametrize(("num_workers", "persistent"), WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_is_resumed_again_and_again(kind: str, num_workers: int, persistent: bool, part: Any) -> None:
    """Each time by another program, that says nothing of epochs, or what is so already."""
    loader = make(kind, num_workers, persistent)
    loader.set_epoch(5)
    samples, state = part(loader, PART)
    for says in (None, 5, None, 5):
        assert told(state) == {5}
        loader = make(kind, num_workers, persistent)
        loader.load_state_dict(state)
        assert loader.state_dict() == state
        if says is not None:
            loader.set_epoch(says)
        more, state = part(loader, PART)
        samples += more
    loader = make(kind, num_workers, persistent)
    loader.load_state_dict(state)
    assert samples + rest_of_run(loader) == in_epoch(5)
    loader.close()


@pytest.mark.covering(2)
@pytest.mark.parametrize("done", [PART, None])
@pytest.mark.parametrize(("num_workers", "persistent"), WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_another_epoch_that_is_set_after_a_load_begins(
    kind: str, num_workers: int, persistent: bool, done: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """At its beginning, whatever the state is of: the middle of an epoch, or its last step. So do those after it."""
    whole = len(in_epoch(5))
    loader = make(kind, num_workers, persistent)
    loader.set_epoch(5)
    _, state = part_of_run(loader, done or whole)
    assert state["position"]
    loader = make(kind, num_workers, persistent)
    loader.load_state_dict(state)
    loader.set_epoch(6)
    assert part_of_run(loader, PART)[0] == in_epoch(6)[:PART]
    assert "Epoch 6 was set after a state was loaded that is of another epoch" in caplog.text
    loader.set_epoch(7)
    samples, state = part_of_run(loader, PART)
    assert told(state) == {7}
    other = make(kind, num_workers, persistent)
    other.load_state_dict(state)
    assert samples + rest_of_run(other) == in_epoch(7)
    for each in (loader, other):
        each.close()


def test_what_is_seeded_before_another_epoch_begins_is_for_that_epoch() -> None:
    """As if no state had been loaded."""
    _, state = part_of_run(make("shown", 0, False, shuffle=True), PART)
    drawn = []
    for is_resumed in (True, False):
        loader = make("shown", 0, False, shuffle=True)
        if is_resumed:
            loader.load_state_dict(state)
        torch.manual_seed(7)
        loader.set_epoch(6)
        drawn.append((rest_of_run(loader), torch.rand(()).item()))
    assert drawn[0] == drawn[1]


@pytest.mark.covering(2)
@pytest.mark.parametrize("after", [None, 5, 6, 7])
@pytest.mark.parametrize("before", [(6,), (6, None), (6, 5), (6, 5, 5), (6, 5, None), (6, 7, 6)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_that_was_taken_when_another_epoch_had_been_set_is_in_none(
    kind: str, before: tuple[int | None, ...], after: int | None
) -> None:
    """So the epoch that it was in begins at its beginning, too, where that is set once this is loaded."""
    loader = make(kind, 0, False)
    loader.set_epoch(5)
    _, state = part_of_run(loader, PART)
    for epoch in before:
        loader = make(kind, 0, False)
        loader.load_state_dict(state)
        if epoch is not None:
            loader.set_epoch(epoch)
        state = json.loads(json.dumps(loader.state_dict()))
    loader = make(kind, 0, False)
    loader.load_state_dict(state)
    if after is not None:
        loader.set_epoch(after)
    assert rest_of_run(loader) == in_epoch([each for each in (*before, after) if each is not None][-1])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_resumed_epoch_that_gives_nothing(num_workers: int, caplog: pytest.LogCaptureFixture) -> None:
    """One line says so, where the state is of the last step and nobody has set another epoch."""

    def make() -> DataLoader[Any]:
        return DataLoader(range(8), batch_size=4, num_workers=num_workers)  # type: ignore[arg-type]

    for number, _ in enumerate(loader := make()):
        if number == 1:
            state = loader.state_dict()
    assert not caplog.records
    other = make()
    other.load_state_dict(state)
    assert [len(list(other)), len(list(other))] == [0, 2]
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "The loaded state was taken after the last batch of its epoch"
    ]


@pytest.mark.covering(1)
@pytest.mark.parametrize(("num_workers", "persistent"), WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_loader_that_goes_back(kind: str, num_workers: int, persistent: bool) -> None:
    """The same one was told of other epochs meanwhile; whoever loads its states knows nothing of that."""
    loader = make(kind, num_workers, persistent)
    loader.set_epoch(5)
    samples, state = part_of_run(loader, PART)
    for link in range(4):
        loader.set_epoch(7 + link)
        assert rest_of_run(loader) == in_epoch(7 + link)
        loader.load_state_dict(state)
        more, state = part_of_run(loader, PART)
        samples += more
        assert told(state) == {5}
    other = make(kind, num_workers, persistent)
    other.load_state_dict(state)
    assert samples + rest_of_run(other) == in_epoch(5)
    for each in (loader, other):
        each.close()


@pytest.mark.covering(1)
@pytest.mark.parametrize(("num_workers", "persistent"), WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_runs_after_one_that_was_resumed(kind: str, num_workers: int, persistent: bool) -> None:
    """They are of that epoch too until somebody tells them another, and so are their states."""
    loader = make(kind, num_workers, persistent)
    loader.set_epoch(5)
    _, state = part_of_run(loader, PART)
    loader = make(kind, num_workers, persistent)
    loader.load_state_dict(state)
    assert rest_of_run(loader) == in_epoch(5)[PART:]
    for says, epoch in ((None, 5), (6, 6), (None, 6)):
        if says is not None:
            loader.set_epoch(says)
        assert rest_of_run(loader) == in_epoch(epoch)
    samples, state = part_of_run(loader, PART)
    assert told(state) == {6}
    other = make(kind, num_workers, persistent)
    other.load_state_dict(state)
    assert samples + rest_of_run(other) == in_epoch(6)
    for each in (loader, other):
        each.close()


class HiddenPlace(HiddenOrder):
    """Has a state, of its epoch too, and goes on to the next one by itself."""

    def __init__(self) -> None:
        super().__init__()
        self._place = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch, self._place = epoch, 0

    def __iter__(self) -> Iterator[int]:
        while self._place < LENGTH:
            self._place += 1
            yield 100 * self._epoch + self._place - 1
        self._epoch, self._place = self._epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self._epoch, "place": self._place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._epoch, self._place = state["epoch"], state["place"]


@pytest.mark.covering(1)
@pytest.mark.processes
@pytest.mark.parametrize(("num_workers", "persistent"), WAYS)
@pytest.mark.parametrize("says", [None, 9])
def test_an_epoch_that_is_set_goes_before_the_state_of_a_sampler(
    num_workers: int, persistent: bool, says: int | None
) -> None:
    """Where the state is that of the end of a run, also of a sampler that does not show its epoch."""

    def made() -> DataLoader[Any]:
        return DataLoader(
            cast(Any, Keys()), sampler=HiddenPlace(), num_workers=num_workers, persistent_workers=persistent
        )

    loader = made()
    loader.set_epoch(5)
    assert rest_of_run(loader) == in_epoch(5)
    state = loader.state_dict()
    loader.close()
    other = made()
    other.load_state_dict(state)
    if says is not None:
        other.set_epoch(says)
    assert rest_of_run(other) == in_epoch(says or 6)
    other.close()


@pytest.mark.covering(2)
@pytest.mark.parametrize("told_by", ["loader", "sampler"])
@pytest.mark.parametrize("told_before", [None, 5])
@pytest.mark.parametrize("done", [0, 3])
def test_an_epoch_that_is_set_after_a_state_between_two_epochs(
    done: int, told_before: int | None, told_by: str
) -> None:
    """It is the one that begins, also if it is the number that the sampler had before the state: after a rollback."""

    def make() -> DataLoader[Any]:
        return DataLoader(range(32), batch_size=4, sampler=ElasticSampler(range(32), seed=3))

    def set_epoch(loader: DataLoader[Any], epoch: int) -> None:
        (loader if told_by == "loader" else loader.sampler).set_epoch(epoch)

    def order(loader: DataLoader[Any]) -> list[int]:
        return [value for batch in loader for value in batch.tolist()]

    trained, orders = make(), []
    for epoch in range(6):
        if epoch == done:
            state = trained.state_dict()
        set_epoch(trained, epoch)
        orders.append(order(trained))
    for loader in (make(), trained):
        if told_before is not None:
            set_epoch(loader, told_before)
        for epoch in (None, *range(6)):
            loader.load_state_dict(state)
            if epoch is not None:
                set_epoch(loader, epoch)
            assert order(loader) == orders[done if epoch is None else epoch]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_state_before_the_first_batch_of_an_epoch_that_is_begun_again(num_workers: int) -> None:
    """A loop over it was left, and the same epoch set once more: the state is of its beginning."""

    def make() -> Any:
        sampler = ElasticSampler(24, 1, 0, seed=3)
        return DataLoader(range(24), batch_size=2, sampler=sampler, num_workers=num_workers)

    loader = make()
    loader.set_epoch(1)
    left = iter(loader)
    next(left), next(left)
    del left
    loader.set_epoch(1)
    iterator = iter(loader)
    state = loader.state_dict()
    whole = [batch.tolist() for batch in iterator]
    resumed = make()
    resumed.load_state_dict(state)
    assert [batch.tolist() for batch in resumed] == whole
    assert len(whole) == 12


class Remembering(IterableDataset[int]):
    """Shuffles by the epoch that it was told, which is in its state, as its place is."""

    def __init__(self) -> None:
        self.epoch_told = -1
        self.at = 0
        self.resumes = False

    def set_epoch(self, epoch: int) -> None:
        self.epoch_told, self.at = epoch, 0

    def __iter__(self) -> Iterator[int]:
        self.at = self.at if self.resumes else 0
        self.resumes = False
        while self.at < 12:
            self.at += 1
            yield 100 * self.epoch_told + self.at
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch_told": self.epoch_told, "at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch_told, self.at, self.resumes = state["epoch_told"], state["at"], bool(state["at"])


@pytest.mark.parametrize("every", [1, 5])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_state_before_persistent_workers_have_given_one_is_of_the_epoch_that_was_told(
    every: int, num_workers: int
) -> None:
    """The newest state of the stream is of the end of the epoch before, and it was told another epoch since."""

    def make() -> DataLoader[Any]:
        options = {"num_workers": num_workers, "persistent_workers": True, "snapshot_every_n_steps": every}
        loader: DataLoader[Any] = DataLoader(Remembering(), 2, **options)
        return loader

    for done in (0, 1, 3):
        loader = make()
        loader.set_epoch(1)
        list(loader)
        loader.set_epoch(3)
        iterator = iter(loader)
        for _ in range(done):
            next(iterator)
        state = json.loads(json.dumps(loader.state_dict()))
        rest = [batch.tolist() for batch in iterator]
        assert all(number > 300 for batch in rest for number in batch)
        loader.close()
        resumed = make()
        resumed.load_state_dict(state)
        assert [batch.tolist() for batch in resumed] == rest, f"after {done} batches"
        resumed.close()


class Moving:
    """Noise of a generator that is in its state, and that `set_epoch` seeds."""

    def __init__(self, *, shows: bool) -> None:
        self.rng = random.Random(0)
        if shows:
            self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.rng.seed(epoch)
        if hasattr(self, "epoch"):
            self.epoch = epoch

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, self.rng.random()

    def state_dict(self) -> dict[str, Any]:
        version, words, gauss = self.rng.getstate()
        return {"rng": [version, list(words), gauss]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        version, words, gauss = state["rng"]
        self.rng.setstate((version, tuple(words), gauss))


class MovingStream(Moving, IterableDataset[Any]):
    """The same, read by each worker."""

    def __init__(self, *, shows: bool) -> None:
        super().__init__(shows=shows)
        self.at = 0
        self.resumes = False

    def __iter__(self) -> Iterator[Any]:
        self.at = self.at if self.resumes else 0
        self.resumes = False
        while self.at < 6:
            self.at += 1
            yield self[self.at]

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.at, self.resumes = state["at"], state["at"] < 6


def moved(kind: Any, shows: bool, numbers: Sequence[int], options: Any, *, cut: Any = None, kills: bool = False) -> Any:
    """Return what epochs of these numbers give, interrupted once after so many batches of one: 99 for after all.

    Args:
        kind: Of the dataset.
        shows: It shows its epoch.
        numbers: Are set before each epoch.
        options: The loader's.
        cut: The place of the epoch, and after how many batches.
        kills: A worker is killed as the last epoch begins.
    """

    def make() -> DataLoader[Any]:
        return DataLoader(kind(shows=shows), 1, collate_fn=list, **options)

    def gone_on() -> DataLoader[Any]:
        state = json.loads(json.dumps(loader.state_dict()))
        loader.close()
        resumed = make()
        resumed.load_state_dict(state)
        return resumed

    loader, given = make(), []
    for place, number in enumerate(numbers):
        loader.set_epoch(number)
        iterator = iter(loader)
        if kills and place == len(numbers) - 1:
            os.kill(inside.pids(iterator)[0], signal.SIGKILL)
        given.append([])
        for done in count():
            if cut == (place, done):
                del iterator
                loader = gone_on()
                iterator = iter(loader)
            if (batch := next(iterator, None)) is None:
                break
            given[-1] += batch
        if cut == (place, 99):
            del iterator
            loader = gone_on()
    loader.close()
    return given


@pytest.mark.processes
@pytest.mark.covering(2)
@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("numbers", [(3, 3), (3, 4)])
@pytest.mark.parametrize(("num_workers", "persistent"), [(0, False), (1, True), (2, True), (2, False)])
@pytest.mark.parametrize("shows", [False, True])
@pytest.mark.parametrize("kind", [Moving, MovingStream])
def test_what_set_epoch_seeds_is_seeded_for_each_epoch_that_is_set(
    kind: Any, shows: bool, num_workers: int, persistent: bool, numbers: Any, every: int
) -> None:
    """With any workers, also by the same number again, and after a state of any moment."""
    options = {"num_workers": num_workers, "persistent_workers": persistent, "snapshot_every_n_steps": every}
    whole = moved(kind, shows, numbers, options)
    assert (whole[0] == whole[1]) == (numbers[0] == numbers[1])
    cuts = [(place, done) for place in (0, 1) for done in (0, 1, 3, 99)]
    for cut in effort.share(cuts, num_workers + every // 4 + 2 * shows, 4 if num_workers else 2):
        assert moved(kind, shows, numbers, options, cut=cut) == whole, cut


@pytest.mark.processes
@pytest.mark.covering(2)
@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("numbers", [(3, 3), (3, 4)])
@pytest.mark.parametrize("kind", [Moving, MovingStream])
def test_a_worker_that_dies_as_a_later_epoch_begins_is_told_it_again(kind: Any, numbers: Any, every: int) -> None:
    """Its replacement loads the state of the epoch before, makes again what was made since, and is told the epoch."""
    options = {"num_workers": 2, "persistent_workers": True, "snapshot_every_n_steps": every}
    whole = moved(kind, False, numbers, options)
    assert moved(kind, False, numbers, options, kills=True) == whole


@pytest.mark.parametrize("is_begun", [False, True])
@pytest.mark.parametrize("kind", [ElasticSampler, WeightedSampler, MixtureSampler])
def test_a_state_of_an_epoch_that_was_set_after_a_load(kind: Any, is_begun: bool) -> None:
    """Of its first batch or a later one: the sampler is where that epoch is, and not where it was at the load."""
    sources = {ElasticSampler: 12, WeightedSampler: [1.0, 2.0] * 6, MixtureSampler: [8, 4]}

    def make() -> DataLoader[Any]:
        sampler = kind(
            sources[kind], **({"weights": [2, 1], "stop": "first"} if kind is MixtureSampler else {}), seed=1
        )
        return DataLoader(range(12), 3, sampler=sampler)  # type: ignore[arg-type]

    loader = make()
    if is_begun:
        list(loader)
    state = loader.state_dict()
    for done in range(3):
        loader = make()
        loader.load_state_dict(state)
        loader.set_epoch(5)
        iterator = iter(loader)
        for _ in range(done):
            next(iterator)
        inside = json.loads(json.dumps(loader.state_dict()))
        rest = [batch.tolist() for batch in iterator]
        resumed = make()
        resumed.load_state_dict(inside)
        assert [batch.tolist() for batch in resumed] == rest, f"after {done} batches"
