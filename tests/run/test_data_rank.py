"""The rank in seeds: that of what divides the data, whichever process reads it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, ChainDataset, DistributedSampler, IterableDataset, Sampler

from asyncloader import ConfigurationError, DataLoader, StateMismatchError, sample_rng
from asyncloader.run.data_rank import data_rank
from asyncloader.samplers import ElasticSampler, LengthBatchSampler, MixtureSampler
from tests.support import inside

DATA: Any = range(24)
THIRD: Any = {"num_replicas": 4, "rank": 2}


class Says(Sampler[int]):
    """Says something about ranks."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def __iter__(self) -> Iterator[int]:
        return iter(range(8))

    def __len__(self) -> int:
        return 8


class Wraps:
    """A batch sampler around another one, as libraries make them to count or to skip batches."""

    def __init__(self, batch_sampler: Any) -> None:
        self.batch_sampler = batch_sampler

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batch_sampler)


class Stream(IterableDataset[int]):
    """Says something about ranks, or does not."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


class Noisy:
    """Numbers, each with two that are drawn."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, torch.rand(()).item(), sample_rng().random()])


def noisy(**options: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    return DataLoader(Noisy(), 4, num_workers=1, generator=generator, **options)  # type: ignore[arg-type]


def rank_of(dataset: Any = DATA, **options: Any) -> int:
    loader: DataLoader[Any] = DataLoader(dataset, **options)
    return data_rank(inside.options(loader))


def by_torch() -> DistributedSampler[Any]:
    return DistributedSampler(DATA, **THIRD)


@pytest.mark.parametrize(
    "options",
    [
        {"sampler": by_torch()},
        {"sampler": by_torch(), "batch_size": None},
        {"batch_sampler": BatchSampler(by_torch(), 4, False)},
        {"batch_sampler": Wraps(Wraps(BatchSampler(by_torch(), 4, False)))},
        {"sampler": ElasticSampler(24, **THIRD)},
        {"batch_sampler": LengthBatchSampler([1] * 24, max_tokens=8, **THIRD)},
    ],
    ids=["torch", "torch, samples", "torch, batches", "wrapped", "ours", "ours, batches"],
)
def test_rank_of_the_sampler(options: dict[str, Any]) -> None:
    """Whatever is around the sampler that divides, its rank is in the seeds."""
    assert rank_of(**options) == 2


@pytest.mark.parametrize("name", ["rank", "process_index", "data_parallel_rank", "dp_rank", "_rank"])
def test_names_that_libraries_give_to_it(name: str) -> None:
    """Accelerate, Megatron, detectron2 and others have names of their own for it."""
    assert rank_of(sampler=Says(**{name: 3})) == 3


def test_the_outermost_sampler_counts() -> None:
    """Ours read the order of a sampler within whole: what that says of ranks divides nothing."""
    within = MixtureSampler([24], weights=[1], num_replicas=4, rank=1)
    around = LengthBatchSampler([1] * 24, max_tokens=8, sampler=within, **THIRD)
    assert rank_of(batch_sampler=around) == 2


@pytest.mark.parametrize("attributes", [{}, {"rank": None}, {"rank": True}, {"rank": -1}, {"rank": "2"}, {"rank": len}])
def test_nothing_that_divides(attributes: dict[str, Any]) -> None:
    """Without a sampler that has a rank all processes are the first."""
    assert rank_of(sampler=Says(**attributes)) == 0
    assert rank_of(shuffle=True) == 0


def test_numbers_of_other_kinds() -> None:
    """A rank that came out of a tensor is a number too."""
    assert rank_of(sampler=Says(rank=torch.tensor(2))) == 2


def test_streams() -> None:
    """One that says part and number of parts is divided, through torch's wrappers; a rank alone says nothing."""
    assert rank_of(Stream(rank=2, world_size=4)) == 2
    assert rank_of(Stream(dp_rank=2, dp_world_size=4)) == 2
    assert rank_of(Stream(_distributed=Stream(rank=2, world_size=4))) == 2
    assert rank_of(ChainDataset([Stream(rank=2, world_size=4)])) == 2
    assert rank_of(Stream(rank=2)) == 0
    assert rank_of(Stream()) == 0


def test_as_the_user_says() -> None:
    """`seeding_rank` counts, whatever divides the data."""
    assert rank_of(sampler=by_torch(), seeding_rank=1) == 1
    assert rank_of(Stream(), seeding_rank=3) == 3


@pytest.mark.parametrize("wrong", [-1, 1.0, "0", True])
def test_what_is_no_rank(wrong: Any) -> None:
    """The error names the option."""
    with pytest.raises(ConfigurationError, match="seeding_rank should be an integer of at least 0"):
        DataLoader(DATA, seeding_rank=wrong)


def test_seeds_contain_it() -> None:
    """Of the global generators and of `sample_rng`: another rank, other numbers for the same samples."""
    ours, theirs = (torch.cat(list(noisy(seeding_rank=rank))) for rank in (0, 1))
    assert torch.equal(ours, torch.cat(list(noisy())))
    assert torch.equal(ours[:, 0], theirs[:, 0])
    assert not (ours[:, 1:] == theirs[:, 1:]).any()


def interrupted(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the state of a loader after two batches."""
    with iter(loader) as batches:
        next(batches)
        next(batches)
        return loader.state_dict()


def test_a_state_serves_all_ranks() -> None:
    """Each rank goes on with its own seeds, whichever rank the state is of: in the middle of an epoch and after one."""
    whole = noisy(shuffle=True, seeding_rank=1)
    batches = [batch for _ in range(2) for batch in whole]
    for rank in (0, 1):
        saved, resumed = (noisy(shuffle=True, seeding_rank=number) for number in (rank, 1))
        resumed.load_state_dict(interrupted(saved))
        assert torch.equal(torch.cat(list(resumed)), torch.cat(batches[2:6]))
        list(after := noisy(shuffle=True, seeding_rank=rank))
        resumed.load_state_dict(after.state_dict())
        assert torch.equal(torch.cat(list(resumed)), torch.cat(batches[6:]))


def test_a_rank_that_was_given_has_to_be_given_again() -> None:
    """A run whose seeds had a rank of the user's does not go on with one that was found, nor the other way round."""
    given, found = {"seeding_rank": 1}, {"seeding_rank": None}
    for saved, now in ((given, found), (found, given)):
        with pytest.raises(StateMismatchError, match=r"seeding_rank was .* Give it, or leave it out") as caught:
            noisy(**now).load_state_dict(interrupted(noisy(**saved)))
        assert caught.value.field == "seeding_rank"


def test_the_state_of_any_rank_serves_an_elastic_sampler() -> None:
    """Each rank goes on under its own rank, with the numbers that it would have drawn without the interruption."""

    def of_rank(rank: int) -> DataLoader[Any]:
        return noisy(sampler=ElasticSampler(24, num_replicas=2, rank=rank))

    whole = list(of_rank(1))
    first = of_rank(0)
    with iter(first) as batches:
        next(batches)
        state = first.state_dict()
    second = of_rank(1)
    second.load_state_dict(state)
    assert torch.equal(torch.cat(list(second)), torch.cat(whole[1:]))
