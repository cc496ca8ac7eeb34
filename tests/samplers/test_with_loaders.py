"""Samplers in loaders with workers that run ahead: states are as of what was yielded, on any ranks and workers."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset

from asyncloader import ConfigurationError, DataLoader
from asyncloader.run.plan import Pace
from asyncloader.samplers import (
    BalancedBatchSampler,
    ElasticSampler,
    LengthBatchSampler,
    MixtureSampler,
    PackingBatchSampler,
    WeightedSampler,
)
from asyncloader.testing import assert_resumable

pytestmark = [pytest.mark.on_threads, pytest.mark.filterwarnings("ignore:This DataLoader will create")]

COUNT = 3000
LENGTHS = np.random.default_rng(0).integers(1, 60, COUNT)


class Documents(Dataset[Any]):
    """Each token is the number of its document."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((int(LENGTHS[index]),), index)


def firsts(samples: list[torch.Tensor]) -> list[int]:
    return [int(sample[0]) for sample in samples]


def in_batches(sampler: Any, workers: int) -> DataLoader[Any]:
    return DataLoader(Documents(), 16, sampler=sampler, num_workers=workers, collate_fn=firsts)


def as_batches(sampler: Any, workers: int) -> DataLoader[Any]:
    return DataLoader(Documents(), batch_sampler=sampler, num_workers=workers, collate_fn=firsts)


MAKERS: dict[str, Callable[[int, int, int], DataLoader[Any]]] = {
    "elastic": lambda ranks, rank, workers: in_batches(ElasticSampler(COUNT, ranks, rank), workers),
    "weighted": lambda ranks, rank, workers: in_batches(
        WeightedSampler(LENGTHS, replacement=False, num_replicas=ranks, rank=rank), workers
    ),
    "mixture": lambda ranks, rank, workers: in_batches(
        MixtureSampler([1000, 2000], [1, 2], stop="all", num_replicas=ranks, rank=rank), workers
    ),
    "lengths": lambda ranks, rank, workers: as_batches(
        LengthBatchSampler(LENGTHS, max_tokens=300, window=500, num_replicas=ranks, rank=rank), workers
    ),
    "packing": lambda ranks, rank, workers: as_batches(
        PackingBatchSampler(LENGTHS, block_size=100, batch_size=3, window=500, num_replicas=ranks, rank=rank), workers
    ),
    "balanced": lambda ranks, rank, workers: as_batches(
        BalancedBatchSampler(LENGTHS, batch_size=16, window=500, num_replicas=ranks, rank=rank), workers
    ),
}


def take(loader: DataLoader[Any], steps: int | None) -> tuple[list[list[int]], dict[str, Any]]:
    """Take so many batches; return them and the state then, which workers are ahead of."""
    iterator = iter(loader)
    batches = list(itertools.islice(iterator, steps))
    state = json.loads(json.dumps(loader.state_dict()))
    iterator.close()
    return batches, state


@pytest.mark.parametrize("kind", MAKERS)
def test_from_four_ranks_to_two_to_eight_and_from_one_worker_to_three(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every sample is counted: nothing is lost, and nothing comes twice but what fills the end up.

    Also where states of other samplers would not be due: what is drawn since one cannot be drawn by other ranks.
    """
    monkeypatch.setattr(Pace, "is_due", lambda self: False)
    make = MAKERS[kind]
    drawn: Counter[int] = Counter()
    state: dict[str, Any] | None = None
    legs = [(4, 1, 5), (2, 3, 8), (8, 0, 3), (3, 1, None)]
    for ranks, workers, steps in legs:
        taken = []
        for rank in range(ranks):
            # The workers of one rank are as good as those of all.
            loader = make(ranks, rank, workers if rank == ranks - 1 else 0)
            if state is not None:
                loader.load_state_dict(state)
            taken.append(take(loader, steps))
        assert len({len(batches) for batches, _ in taken}) == 1
        states = [told["samplers"] for _, told in taken]
        assert states == [states[0]] * ranks
        drawn.update(index for batches, _ in taken for batch in batches for index in batch)
        state = taken[-1][1]
    assert set(drawn) == set(range(COUNT))
    length = (
        len(list(make(1, 0, 0).batch_sampler.sampler)) if kind == "mixture" else COUNT
    )  # of shares: it has a few more
    assert drawn.total() - length <= 2


def small(kind: str, workers: int) -> DataLoader[Any]:
    if kind == "mixture":
        return in_batches(MixtureSampler([30, 60], [1, 2], stop="all"), workers)
    return MAKERS[kind](2, 1, workers)


@pytest.mark.parametrize("kind", MAKERS)
def test_going_on_from_every_batch(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this epoch and the next, with workers and without."""
    monkeypatch.setitem(globals(), "COUNT", 90)
    monkeypatch.setitem(globals(), "LENGTHS", LENGTHS[:90])
    assert_resumable(lambda: small(kind, 1), resume_with=lambda: small(kind, 0))


@pytest.mark.processes
def test_the_last_short_batch_is_in_the_state() -> None:
    """On one rank nothing is left after it, when all four ranks had theirs."""
    taken = [take(MAKERS["elastic"](4, rank, rank % 2), COUNT // 64 + 1) for rank in range(4)]
    assert all(len(batches[-1]) < 16 for batches, _ in taken)
    other = MAKERS["elastic"](1, 0, 0)
    other.load_state_dict(taken[2][1])
    assert take(other, None)[0] == []


def test_torchs_loader_goes_on_from_state_after() -> None:
    """It reads ahead; `state_after` counts what it has yielded. From four ranks to one."""
    drawn = []
    for rank in range(4):
        sampler = PackingBatchSampler(LENGTHS, block_size=100, batch_size=3, num_replicas=4, rank=rank)
        loader = TorchLoader(Documents(), batch_sampler=sampler, num_workers=rank % 2, collate_fn=firsts)
        drawn += list(itertools.islice(loader, 20))
        state = json.loads(json.dumps(sampler.state_after(20)))
    sampler = PackingBatchSampler(LENGTHS, block_size=100, batch_size=5, num_replicas=1, rank=0)
    sampler.load_state_dict(state)
    drawn += TorchLoader(Documents(), batch_sampler=sampler, collate_fn=firsts)
    assert sorted(index for batch in drawn for index in batch) == list(range(COUNT))


class Numbers(Dataset[int]):
    """Each sample is its index."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> int:
        return index


def with_feedback(
    loader: DataLoader[Any], state: dict[str, Any] | None, epochs: range, ahead: int | None, first: int = 0
) -> tuple[list[list[int]], list[tuple[int, int, dict[str, Any]]]]:
    """Train: after each third batch, say how much its samples are worth; return batches and states after each.

    Args:
        loader: With a WeightedSampler.
        state: To go on from.
        epochs: Those that are trained.
        ahead: How many batches later updates hold; None for the next epoch.
        first: The number of the first batch, in the first epoch.
    """
    batches: list[list[int]] = []
    states = []
    if state is not None:
        loader.load_state_dict(state)
    for epoch in epochs:
        if state is None or epoch != epochs[0]:
            loader.set_epoch(epoch)
        for number, batch in enumerate(loader, first):
            batches.append(batch.tolist())
            if number % 3 == 1:
                at = None if ahead is None else 4 * (number + ahead)
                loader.sampler.update(batch, batch * 2.0 % 7 + number % 2 + 0.5, at=at)  # type: ignore[attr-defined]
            states.append((epoch, number + 1, json.loads(json.dumps(loader.state_dict()))))
        first = 0
    return batches, states


@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize("ahead", [None, 9])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_resume_goes_on_with_the_updates_that_were_made(workers: int, ahead: int | None, replacement: bool) -> None:
    """From every batch of two epochs, though the sampler was read beyond, and with other workers."""

    def make(workers: int) -> DataLoader[Any]:
        sampler = WeightedSampler(np.arange(50) % 3, 33, replacement, seed=2)
        return DataLoader(Numbers(), 4, sampler=sampler, num_workers=workers, max_buffered_bytes=0)

    ahead = ahead if replacement else None
    batches, states = with_feedback(make(workers), None, range(2), ahead)
    others, _ = with_feedback(make(3 - workers), None, range(2), ahead)
    assert batches == others
    for number, (epoch, first, state) in enumerate(states, 1):
        resumed = make(3 - workers)
        assert with_feedback(resumed, state, range(epoch, 2), ahead, first)[0] == batches[number:]


@pytest.mark.parametrize("workers", [0, 2])
async def test_updates_between_batches_that_are_awaited(workers: int) -> None:
    """The sampler is read in another thread than the trainer's; the epoch is that of the samples that are named."""

    def make() -> DataLoader[Any]:
        sampler = WeightedSampler(np.ones(50), 400, seed=2)
        return DataLoader(Numbers(), 4, sampler=sampler, num_workers=workers, max_buffered_bytes=0)

    loader, drawn = make(), []
    expected = WeightedSampler(np.ones(50), 400, seed=2)
    async with aiter(loader) as batches:
        async for batch in batches:
            drawn += batch.tolist()
            for sampler in (loader.sampler, expected):
                sampler.update(batch, batch % 7 + 0.5, at=len(drawn) + 200)  # type: ignore[attr-defined]
            if len(drawn) == 160:
                state = json.loads(json.dumps(loader.state_dict()))
    resumed = make()
    resumed.load_state_dict(state)
    rest = []
    async with aiter(resumed) as batches:
        async for batch in batches:
            rest += batch.tolist()
            sampler = resumed.sampler
            sampler.update(batch, batch % 7 + 0.5, at=160 + len(rest) + 200)  # type: ignore[attr-defined]
    assert drawn == [*expected]
    assert rest == drawn[160:]


def test_when_an_update_holds_does_not_depend_on_workers() -> None:
    """Before `iter(loader)` it holds in the epoch that begins there; from then on in the next."""

    def epochs(workers: int, moment: str) -> list[list[int]]:
        sampler = WeightedSampler(np.ones(50), 24, seed=2)
        loader, found = DataLoader(Numbers(), 4, sampler=sampler, num_workers=workers), []
        for number in range(3):
            if (number, moment) == (1, "between"):
                sampler.update(range(40), [0.0] * 40)
            iterator = iter(loader)
            if (number, moment) == (1, "begun"):
                sampler.update(range(40), [0.0] * 40)
            found.append([index for batch in iterator for index in batch.tolist()])
        return found

    for moment, first in (("between", 1), ("begun", 2)):
        drawn = epochs(0, moment)
        assert drawn == epochs(2, moment)
        assert [min(indices) >= 40 for indices in drawn] == [number >= first for number in range(3)]


@pytest.mark.parametrize("workers", [0, 2])
def test_weights_of_a_mixture_that_were_set_while_batches_were_ready_are_in_the_state(workers: int) -> None:
    """The state is of a sample before those that the sampler has named already."""

    def make() -> DataLoader[Any]:
        sampler = MixtureSampler([1000, 2000], [1, 0])
        return DataLoader(range(3000), 100, sampler=sampler, num_workers=workers, max_buffered_bytes=0)  # type: ignore[arg-type]

    loader = make()
    with iter(loader) as batches:
        for _ in range(3):
            next(batches)
        loader.sampler.set_weights([0, 1], at=6000)  # type: ignore[attr-defined]
        state = json.loads(json.dumps(loader.state_dict()))
        expected = [next(batches).tolist() for _ in range(70)]
    assert max(expected[56]) < 1000 <= min(expected[57])
    resumed = make()
    resumed.load_state_dict(state)
    with iter(resumed) as batches:
        assert [next(batches).tolist() for _ in range(70)] == expected


class Noted(ElasticSampler):
    """Has more in its state than the sampler that it is made from."""

    note = "none"

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "note": f"after {self._run.read}"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.note = state["note"]
        super().load_state_dict({name: state[name] for name in state if name != "note"})


def test_states_of_a_subclass_are_its_own() -> None:
    """A loader asks it for them after each batch."""
    loader = DataLoader(Documents(), 16, sampler=Noted(COUNT, 1, 0), collate_fn=firsts)
    _, state = take(loader, 3)
    other = DataLoader(Documents(), 16, sampler=Noted(COUNT, 1, 0), collate_fn=firsts)
    other.load_state_dict(state)
    next(iter(other))
    assert other.sampler.note == "after 48"  # type: ignore[attr-defined]


@pytest.mark.parametrize("is_inside", [False, True])
def test_an_update_before_the_state_is_loaded(is_inside: bool) -> None:
    """It would be lost when the loader brings the sampler to the state, so it is refused, until then."""

    def make() -> tuple[DataLoader[Any], WeightedSampler]:
        sampler = WeightedSampler(np.ones(COUNT), num_replicas=1, rank=0)
        batches = LengthBatchSampler(np.full(COUNT, 4), max_tokens=64, sampler=sampler, num_replicas=1, rank=0)
        order: dict[str, Any] = {"batch_sampler": batches} if is_inside else {"batch_size": 16, "sampler": sampler}
        return DataLoader(range(COUNT), **order), sampler  # type: ignore[arg-type]

    loader, sampler = make()
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    rest = [batch.tolist() for batch in iterator]
    other, sampler = make()
    other.load_state_dict(state)
    with pytest.raises(ConfigurationError, match=r"Make it after iter\(loader\)"):
        sampler.update([1], [5.0])
    left = iter(other)
    first = next(left).tolist()
    sampler.update([1], [5.0])
    assert first == rest[0]


@pytest.mark.parametrize("is_inside", [False, True])
def test_an_update_for_the_next_epoch_in_a_state_before_the_first_batch(is_inside: bool) -> None:
    """It holds in the next epoch, and not in the one of the state."""

    def make() -> tuple[Any, WeightedSampler]:
        sampler = WeightedSampler(np.ones(50), 30, is_inside, num_replicas=1, rank=0)
        if not is_inside:
            return sampler, sampler
        return LengthBatchSampler(np.arange(1, 51), max_tokens=200, sampler=sampler, num_replicas=1, rank=0), sampler

    outer, sampler = make()
    iterator = iter(outer)
    first = [next(iterator)]
    sampler.update(np.arange(20), np.zeros(20))
    state = json.loads(json.dumps(outer.state_after(0)))
    first += iterator
    outer.set_epoch(1)
    second = [*outer]
    assert np.hstack(second).min() >= 20
    resumed, _ = make()
    resumed.load_state_dict(state)
    assert [*resumed] == first
    resumed.set_epoch(1)
    assert [*resumed] == second
    resumed, _ = make()
    resumed.load_state_dict(state)
    resumed.set_epoch(1)
    assert [*resumed] == second


NESTED: dict[str, Callable[[int, int, int], DataLoader[Any]]] = {
    "packing a mixture": lambda ranks, rank, workers: as_batches(
        PackingBatchSampler(
            LENGTHS,
            block_size=100,
            window=500,
            sampler=MixtureSampler([1000, 2000], [1, 2], stop="all"),
            num_replicas=ranks,
            rank=rank,
        ),
        workers,
    ),
    "weighted, by length": lambda ranks, rank, workers: as_batches(
        LengthBatchSampler(
            LENGTHS, max_tokens=300, window=500, sampler=WeightedSampler(LENGTHS), num_replicas=ranks, rank=rank
        ),
        workers,
    ),
}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [*MAKERS, *NESTED])
def test_a_look_at_a_batch_beside_the_loop_is_not_in_its_states(kind: str, workers: int) -> None:
    """The look begins another epoch, of the sampler and of the order within it; the loop is in its own."""
    make = {**MAKERS, **NESTED}[kind]
    loader = make(2, 1, workers)
    for _ in range(2):  # in the second epoch, too
        iterator = iter(loader)
        taken = [next(iterator) for _ in range(4)]
        look = iter(loader)
        assert next(look) != taken[0]
        taken.append(next(iterator))
        state = json.loads(json.dumps(iterator.state_dict()))  # type: ignore[attr-defined]
        look.close()  # type: ignore[attr-defined]
        expected = list(itertools.islice(iterator, 6))
        iterator.close()  # type: ignore[attr-defined]
        resumed = make(2, 1, 1 - workers)
        resumed.load_state_dict(state)
        assert list(itertools.islice(resumed, 6)) == expected
