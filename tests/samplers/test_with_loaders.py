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

from asyncloader import DataLoader
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
