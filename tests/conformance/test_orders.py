"""Orders, samplers, and what is drawn from which generator."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

from tests.conformance.comparison import Subject, failure, same_as_torch, seed_everything
from tests.conformance.datasets import (
    Counted,
    EagerShuffle,
    Echo,
    KeyTypes,
    Many,
    Squares,
    StepwiseRandom,
    Unsized,
    as_list,
)

WORKERS = pytest.mark.parametrize("num_workers", [0, 1, 3])
FEW_WORKERS = pytest.mark.parametrize("num_workers", [0, 2])
NONE_OR_ONE = pytest.mark.parametrize("num_workers", [0, 1])  # for long lists of what does not depend on more


def generator(seed: int = 11) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@WORKERS
@same_as_torch("order")
def test_sequential_order(make: Subject, num_workers: int) -> object:
    """Two epochs in the dataset's own order."""
    loader = make(Squares(11), batch_size=3, num_workers=num_workers)
    return make.batches(loader), make.batches(loader)


@pytest.mark.processes("ours")
@pytest.mark.covering(2)
@WORKERS
@pytest.mark.parametrize("seeded", [False, True], ids=["global generator", "own generator"])
@same_as_torch("order from the seed")
def test_shuffled_order_over_three_epochs(make: Subject, num_workers: int, seeded: bool) -> object:
    """The same seed gives the same order, and leaves the generators in the same state."""
    own = generator() if seeded else None
    loader = make(Squares(11), batch_size=2, shuffle=True, generator=own, num_workers=num_workers)
    epochs = [make.batches(loader) for _ in range(3)]
    return epochs, torch.get_rng_state(), own and own.get_state()


@pytest.mark.covering(1)
@FEW_WORKERS
@pytest.mark.parametrize("batch_size", [1, 4, 10, 11, None])
@same_as_torch("batch sizes")
def test_batch_sizes(make: Subject, num_workers: int, batch_size: int | None) -> object:
    """From one sample to more than the dataset has, with and without the last short batch."""
    seen = []
    for drop_last in (False,) if batch_size is None else (False, True):
        loader = make(Squares(10), batch_size=batch_size, drop_last=drop_last, num_workers=num_workers)
        seen += [make.batches(loader), len(loader)]
        if batch_size is not None and num_workers == 0:  # workers are ahead
            given = iter(loader)
            for size in (3, 2):
                loader.batch_sampler.batch_size = size
                seen.append(as_list(next(given, [])))
            seen += map(as_list, given)
    return seen


SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "SequentialSampler": lambda: {"sampler": SequentialSampler(Squares(7)), "batch_size": 2},
    "RandomSampler": lambda: {"sampler": RandomSampler(Squares(7)), "batch_size": 2},
    "RandomSampler with generator": lambda: {"sampler": RandomSampler(Squares(7), generator=generator())},
    "RandomSampler with replacement": lambda: {"sampler": RandomSampler(Squares(7), replacement=True, num_samples=40)},
    "RandomSampler of more than all": lambda: {"sampler": RandomSampler(Squares(7), num_samples=17), "batch_size": 4},
    "SubsetRandomSampler": lambda: {"sampler": SubsetRandomSampler([9, 4, 6], generator()), "batch_size": 2},
    "SubsetRandomSampler global": lambda: {"sampler": SubsetRandomSampler([9, 4, 6]), "batch_size": 2},
    "WeightedRandomSampler": lambda: {"sampler": WeightedRandomSampler([0.1, 0.0, 0.7, 0.2], 9), "batch_size": 4},
    "WeightedRandomSampler without replacement": lambda: {
        "sampler": WeightedRandomSampler([0.1, 0.3, 0.6], 3, replacement=False, generator=generator())
    },
    "BatchSampler as sampler": lambda: {
        "sampler": BatchSampler(RandomSampler(Squares(7)), 3, False), "batch_size": None, "dataset": Echo(7)
    },
    "BatchSampler for bulk loading": lambda: {
        "sampler": BatchSampler(SequentialSampler(range(7)), 3, True), "batch_size": None, "dataset": np.arange(7) * 3
    },
    "list": lambda: {"sampler": [3, 1, 1, 2], "batch_size": 3},
    "range": lambda: {"sampler": range(8, 0, -3)},
    "tuple of tensors": lambda: {"sampler": tuple(torch.tensor([3, 1])), "dataset": Echo(), "batch_size": None},
    "numpy permutation": lambda: {"sampler": np.arange(5)[::-1], "dataset": Echo(), "batch_size": 2},
    "generator": lambda: {"sampler": (n * 2 for n in range(4)), "batch_size": 3},
    "set of one": lambda: {"sampler": {5}},
    "without length": lambda: {"sampler": Unsized([4, 2, 0]), "batch_size": 2},
    "empty": lambda: {"sampler": [], "batch_size": 2},
    "drawing eagerly": lambda: {"sampler": EagerShuffle(9), "batch_size": 2},
    "drawing at every step": lambda: {"sampler": StepwiseRandom(9), "batch_size": 2},
    "string keys": lambda: {"sampler": ["a", "b"], "dataset": {"a": 1, "b": 2}, "batch_size": 2},
    "tuple keys": lambda: {"sampler": [(1, 2), (3, 4)], "dataset": {(1, 2): 1, (3, 4): 2}},
    "tuple keys unbatched": lambda: {"sampler": [(1, "x"), (2, "y")], "dataset": Echo(), "batch_size": None},
    "None as key": lambda: {"sampler": [None, None], "dataset": Echo(), "batch_size": 2, "collate_fn": as_list},
    "slices": lambda: {"sampler": [slice(0, 2), slice(2, 5)], "dataset": torch.arange(5), "batch_size": None},
    "batch_sampler of torch": lambda: {"batch_sampler": BatchSampler(RandomSampler(Squares(7)), 3, True)},
    "batch_sampler list": lambda: {"batch_sampler": [[1, 2, 3], [4], [5, 6]]},
    "batch_sampler of tuples": lambda: {"batch_sampler": [(1, 2), (3,)]},
    "batch_sampler generator": lambda: {"batch_sampler": ([n, n + 1] for n in range(3))},
    "batch_sampler of ranges": lambda: {"batch_sampler": [range(3), range(3, 5)]},
    "batch_sampler of tensors": lambda: {"batch_sampler": list(torch.tensor([[1, 2], [0, 3]])), "dataset": Echo(4)},
    "batch_sampler without length": lambda: {"batch_sampler": Unsized([[1], [2, 3]])},
    "batch_sampler of string keys": lambda: {"batch_sampler": [["a"], ["b", "a"]], "dataset": {"a": 1, "b": 2}},
    "batch_sampler empty": lambda: {"batch_sampler": []},
    "batch_sampler of empty batches": lambda: {"batch_sampler": [[], [1]], "collate_fn": as_list},
    "DistributedSampler rank 0": lambda: {"sampler": DistributedSampler(range(9), 2, 0), "batch_size": 2},
    "DistributedSampler rank 1": lambda: {
        "sampler": DistributedSampler(range(9), 2, 1, seed=3, drop_last=True), "batch_size": 2
    },
}  # fmt: skip


@pytest.mark.covering(1)
@NONE_OR_ONE
@pytest.mark.parametrize("kind", SAMPLERS)
@same_as_torch("samplers", async_for=False, defaults=False)
def test_samplers_of_every_kind(make: Subject, kind: str, num_workers: int) -> object:
    """Two epochs over torch's samplers, iterables, generators and keys of any kind; the global generator after it."""
    options = {"dataset": Squares(10), "num_workers": num_workers, **SAMPLERS[kind]()}
    loader = make(**options)
    return make.batches(loader), make.batches(loader), torch.get_rng_state()


@FEW_WORKERS
@same_as_torch("samplers")
def test_distributed_sampler_reads_its_epoch_at_iter(make: Subject, num_workers: int) -> object:
    """set_epoch before iter() decides the order of that epoch."""
    sampler = DistributedSampler(range(13), num_replicas=2, rank=1)
    loader = make(Squares(13), batch_size=3, sampler=sampler, num_workers=num_workers)
    epochs = []
    for epoch in (0, 1, 0):
        sampler.set_epoch(epoch)
        epochs.append(make.batches(loader))
    orders = [[x for batch in batches for x in batch.tolist()] for batches in epochs]
    assert orders[0] == orders[2] != orders[1]
    return epochs


@FEW_WORKERS
@same_as_torch("samplers")
def test_changes_to_a_sampler_count_from_the_next_epoch(make: Subject, num_workers: int) -> object:
    """A list that is changed between epochs gives the new order."""
    order = [1, 2, 3]
    loader = make(Squares(10), sampler=order, num_workers=num_workers)
    first = make.batches(loader)
    order.reverse()
    order.append(9)
    return first, make.batches(loader), len(loader)


DATASETS: dict[str, Callable[[], Any]] = {
    "list": lambda: [1.5, 2.5, 3.5, 4.5, 5.5],
    "str": lambda: "abcde",
    "range": lambda: range(5),
    "ndarray": lambda: np.arange(10).reshape(5, 2),
    "tensor": lambda: torch.arange(10).reshape(5, 2),
    "TensorDataset": lambda: TensorDataset(torch.arange(5), torch.arange(10).reshape(5, 2)),
    "ConcatDataset": lambda: ConcatDataset([Squares(2), Squares(3)]),
    "StackDataset": lambda: StackDataset(a=Squares(5), b=[1, 2, 3, 4, 5]),
    "StackDataset of tuples": lambda: StackDataset(Squares(5), Many(5)),
    "Subset": lambda: Subset(Squares(9), [8, 0, 7, 1, 6]),
    "Subset of what fetches batches": lambda: Subset(Many(9), [8, 0, 7, 1, 6]),
    "random_split": lambda: random_split(Squares(10), [0.5, 0.5], generator())[1],
    "dict": lambda: dict(enumerate("abcde")),
}


@pytest.mark.covering(1)
@NONE_OR_ONE
@pytest.mark.parametrize("kind", DATASETS)
@same_as_torch("datasets", async_for=False)
def test_datasets_of_torch_and_plain_sequences(make: Subject, kind: str, num_workers: int) -> object:
    """Any object with __getitem__ and __len__ is a dataset; samples are shuffled, in batches."""
    return make.batches(make(DATASETS[kind](), batch_size=2, shuffle=True, num_workers=num_workers))


@FEW_WORKERS
@pytest.mark.parametrize("shuffle", [False, True])
@same_as_torch("fetch")
def test_indices_are_python_ints(make: Subject, shuffle: bool, num_workers: int) -> object:
    """The dataset sees the type that the sampler yields: int."""
    return make.batches(make(KeyTypes(5), batch_size=2, shuffle=shuffle, num_workers=num_workers))


@FEW_WORKERS
@same_as_torch("samplers")
def test_sampler_may_have_no_end(make: Subject, num_workers: int) -> object:
    """Taking some batches of an infinite sampler, twice."""
    loader = make(Squares(8), sampler=Counted(None), batch_size=3, num_workers=num_workers)
    return [[batch for _, batch in zip(range(5), loader, strict=False)] for _ in range(2)]


@FEW_WORKERS
@same_as_torch("samplers")
def test_batch_sampler_may_have_no_end(make: Subject, num_workers: int) -> object:
    """Taking some batches of an infinite batch sampler."""
    loader = make(Squares(8), batch_sampler=Counted(None, batch=3), num_workers=num_workers)
    return [[batch for _, batch in zip(range(5), loader, strict=False)] for _ in range(2)]


@pytest.mark.covering(2)
@pytest.mark.parametrize(("num_workers", "prefetch_factor"), [(0, None), (1, 1), (1, 2), (2, 2), (3, 1), (3, 4)])
@pytest.mark.parametrize("batched", ["batch_size", "batch_sampler", "unbatched"])
@same_as_torch("how far the sampler is read", defaults=False)
def test_sampler_is_read_as_far_as_torch_reads(
    make: Subject, num_workers: int, prefetch_factor: int | None, batched: str
) -> object:
    """At iter() as far as the window, then one batch of indices for each batch taken."""
    sampler = Counted(60, batch=3 if batched == "batch_sampler" else None)
    options: dict[str, Any] = {"batch_sampler": sampler} if batched == "batch_sampler" else {"sampler": sampler}
    if batched != "batch_sampler":
        options["batch_size"] = 3 if batched == "batch_size" else None
    it = iter(make(Squares(60), num_workers=num_workers, prefetch_factor=prefetch_factor, **options))
    read = [sampler.read]
    for _ in range(6):
        next(it)
        read.append(sampler.read)
    return read, sampler.started


@FEW_WORKERS
@same_as_torch("how far the sampler is read")
def test_sampler_is_read_in_the_thread_of_the_consumer(make: Subject, num_workers: int) -> object:
    """A sampler may use objects that belong to the consumer's thread."""
    sampler = Counted(20)
    list(make(Squares(20), sampler=sampler, num_workers=num_workers))
    return sampler.threads == {threading.get_ident()}


@FEW_WORKERS
@pytest.mark.parametrize("fail_at", [0, 3, 12])
@same_as_torch("failing samplers")
def test_error_of_a_sampler_is_raised_as_it_is(make: Subject, fail_at: int, num_workers: int) -> object:
    """The main process gets the same type and text, after the batches that were read before."""
    taken = []

    def take() -> None:
        for batch in make(Squares(8), sampler=Counted(20, fail_at=fail_at), batch_size=None, num_workers=num_workers):
            taken.append(batch)

    error = failure(take)
    assert taken == [(n % 8) ** 2 for n in range(len(taken))]
    assert len(taken) <= fail_at
    return error


def draws(act: Callable[[], object]) -> tuple[int, object]:
    """How many numbers of 64 bits an act takes from torch's global generator; -1 for something else."""
    seed_everything(5)
    result = act()
    after = torch.get_rng_state()
    torch.manual_seed(5)
    for count in range(12):
        if torch.equal(torch.get_rng_state(), after):
            torch.set_rng_state(after)
            return count, result
        torch.empty((), dtype=torch.int64).random_()
    torch.set_rng_state(after)
    return -1, result


@pytest.mark.covering(2)
@FEW_WORKERS
@pytest.mark.parametrize("shuffle", [False, True])
@same_as_torch("draws from the global generator", async_for=False)
def test_draws_from_the_global_generator_are_counted(make: Subject, shuffle: bool, num_workers: int) -> object:
    """None at construction, one at iter(), one more for a shuffled epoch; four for two shuffled epochs."""
    constructed, loader = draws(lambda: make(Squares(6), batch_size=2, shuffle=shuffle, num_workers=num_workers))
    at_iter, it = draws(lambda: iter(loader))
    at_first, _ = draws(lambda: next(it))
    later, _ = draws(lambda: list(it))
    epochs, _ = draws(lambda: [make.batches(loader), make.batches(loader)])
    counts = [constructed, at_iter, at_first, later, epochs]
    assert epochs == (4 if shuffle else 2)
    return counts


@FEW_WORKERS
@same_as_torch("draws from the global generator")
def test_own_generator_spares_the_global_one(make: Subject, num_workers: int) -> object:
    """With `generator`, base seed and permutation come from it, in this order."""
    own = generator()
    loader = make(Squares(6), batch_size=2, shuffle=True, generator=own, num_workers=num_workers)
    count, batches = draws(lambda: list(loader))
    expected = generator()
    torch.empty((), dtype=torch.int64).random_(generator=expected)
    assert [x for batch in batches for x in batch.tolist()] == (torch.randperm(6, generator=expected) ** 2).tolist()
    return count, own.get_state()


@FEW_WORKERS
@same_as_torch("draws from the global generator", defaults=False)
def test_generators_of_python_and_numpy_are_left_alone(make: Subject, num_workers: int) -> object:
    """If the dataset draws nothing, loading changes neither generator."""
    import random

    list(make(Squares(6), shuffle=True, num_workers=num_workers))
    return random.random(), float(np.random.rand()), torch.rand(1)


@FEW_WORKERS
@same_as_torch("draws from the global generator", defaults=False)
def test_training_draws_between_batches_are_the_same(make: Subject, num_workers: int) -> object:
    """A loop that draws while a sampler draws at every step sees torch's numbers: reads happen at the same times."""
    seen: list[object] = []
    for batch in make(Squares(12), sampler=StepwiseRandom(12), batch_size=2, num_workers=num_workers):
        seen += [batch, torch.rand(1)]
    return seen


@same_as_torch("samplers")
def test_two_loaders_may_share_a_generator(make: Subject) -> object:
    """They draw from it in the order in which they are used."""
    own = generator()
    a, b = (make(Squares(6), shuffle=True, generator=own, num_workers=n) for n in (0, 1))
    return [make.batches(loader) for loader in (a, b, a)]


def test_counting_of_draws_notices_other_draws() -> None:
    """The instrument of this file measures."""
    assert draws(lambda: None)[0] == 0
    assert draws(lambda: torch.empty((), dtype=torch.int64).random_())[0] == 1
    assert draws(lambda: torch.rand(7))[0] == -1
