"""The examples of torch's documentation of torch.utils.data, in our words, run on our loader with both kinds of loop.

Where the documentation prints a value that depends on neither a seed nor a GPU, that value is asserted; elsewhere what
the example shows: what is in it, how often, how much of it.
"""

from __future__ import annotations

import asyncio
import collections
import math
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Self

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SequentialSampler,
    StackDataset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    default_convert,
    get_worker_info,
    random_split,
)
from torch.utils.data._utils.collate import default_collate_fn_map

from asyncloader import DataLoader
from tests.conformance.comparison import TORCH

pytestmark = [pytest.mark.on_threads, pytest.mark.covering(1)]

Take = Callable[[DataLoader[Any]], list[Any]]

ANY_WORKERS = pytest.mark.parametrize("num_workers", [0, 2])


@pytest.fixture(params=["for", "async for"])
def take(request: pytest.FixtureRequest) -> Take:
    """Takes all that a loader gives, with one kind of loop."""

    async def collect(loader: DataLoader[Any]) -> list[Any]:
        return [batch async for batch in loader]

    return list if request.param == "for" else lambda loader: asyncio.run(collect(loader))


def singles(*values: int) -> list[Tensor]:
    return [torch.tensor([value]) for value in values]


# ------------------------------------------------------------------------------------------------ iterable datasets


class RangeSharedInIter(IterableDataset[int]):
    """Numbers, of which each worker's `__iter__` gives its part."""

    def __init__(self, start: int, end: int) -> None:
        self.start = start
        self.end = end

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        if info is None:
            return iter(range(self.start, self.end))
        share = math.ceil((self.end - self.start) / info.num_workers)
        first = self.start + info.id * share
        return iter(range(first, min(first + share, self.end)))


class Range(IterableDataset[int]):
    """Numbers, all of which each copy of the dataset gives."""

    def __init__(self, start: int, end: int) -> None:
        self.start = start
        self.end = end

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.end))


def share_range(worker_id: int) -> None:
    """Leave this worker's part to the copy of the dataset that is in it."""
    info = get_worker_info()
    assert info is not None
    dataset = info.dataset
    share = math.ceil((dataset.end - dataset.start) / info.num_workers)
    dataset.start += worker_id * share
    dataset.end = min(dataset.start + share, dataset.end)


def test_a_stream_divided_in_iter(take: Take) -> None:
    """Without workers 3, 4, 5, 6; two workers have 3, 4 and 5, 6, and give by turns; of twelve some have nothing."""
    dataset = RangeSharedInIter(3, 7)
    assert take(DataLoader(dataset)) == singles(3, 4, 5, 6)
    assert take(DataLoader(dataset, num_workers=2)) == singles(3, 5, 4, 6)
    assert take(DataLoader(dataset, num_workers=12)) == singles(3, 4, 5, 6)


def test_a_stream_divided_by_worker_init_fn(take: Take) -> None:
    """Undivided, every worker gives all of it; `worker_init_fn` divides it through get_worker_info().dataset."""
    dataset = Range(3, 7)
    assert take(DataLoader(dataset)) == singles(3, 4, 5, 6)
    assert take(DataLoader(dataset, num_workers=2)) == singles(3, 3, 4, 4, 5, 5, 6, 6)
    assert take(DataLoader(dataset, num_workers=2, worker_init_fn=share_range)) == singles(3, 5, 4, 6)
    assert take(DataLoader(dataset, num_workers=12, worker_init_fn=share_range)) == singles(3, 4, 5, 6)
    assert (dataset.start, dataset.end) == (3, 7)


def test_each_workers_last_batch_may_be_short(take: Take) -> None:
    """drop_last drops the last batch of each worker if it is not full: more than one batch's worth in all."""
    dataset = RangeSharedInIter(0, 10)
    sizes = [len(batch) for batch in take(DataLoader(dataset, batch_size=3, num_workers=2))]
    assert sizes == [3, 3, 2, 2]
    kept = take(DataLoader(dataset, batch_size=3, num_workers=2, drop_last=True))
    assert [batch.tolist() for batch in kept] == [[0, 1, 2], [5, 6, 7]]


# ----------------------------------------------------------------------------------- automatic batching and collation


class Words(Dataset[str]):
    """Words of different lengths."""

    words = ("a", "bbbb", "cc", "ddd", "eeeee", "ffffff", "gg")

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> str:
        return self.words[index]


@ANY_WORKERS
def test_what_loading_is_roughly_equivalent_to(take: Take, num_workers: int) -> None:
    """The four short loops that describe loading, with and without automatic batching."""
    table, stream = TensorDataset(torch.arange(10)), Range(0, 10)
    order = BatchSampler(SequentialSampler(table), batch_size=4, drop_last=False)
    written_out = [default_collate([table[i] for i in indices]) for indices in order]
    assert repr(take(DataLoader(table, batch_size=4, num_workers=num_workers))) == repr(written_out)
    assert repr(take(DataLoader(table, batch_sampler=order, num_workers=num_workers))) == repr(written_out)
    one_by_one = take(DataLoader(table, batch_size=None, num_workers=num_workers))
    assert repr(one_by_one) == repr([default_convert(table[i]) for i in range(10)])
    few = min(num_workers, 1)  # every worker would give all of the stream
    assert [batch.tolist() for batch in take(DataLoader(stream, batch_size=4, num_workers=few))] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9],
    ]
    assert take(DataLoader(stream, batch_size=None, num_workers=few)) == list(range(10))


class Point(NamedTuple):
    x: Any
    y: Any


# What is shown for default_collate: the samples of a batch, and the batch.
COLLATED: dict[str, tuple[list[Any], Any]] = {
    "ints": ([0, 1, 2, 3], torch.tensor([0, 1, 2, 3])),
    "strings": (["a", "b", "c"], ["a", "b", "c"]),
    "mappings": (
        [{"A": 0, "B": 1}, {"A": 100, "B": 100}],
        {"A": torch.tensor([0, 100]), "B": torch.tensor([1, 100])},
    ),
    "named tuples": ([Point(0, 0), Point(1, 1)], Point(x=torch.tensor([0, 1]), y=torch.tensor([0, 1]))),
    "tuples": ([(0, 1), (2, 3)], [torch.tensor([0, 2]), torch.tensor([1, 3])]),
    "lists": ([[0, 1], [2, 3]], [torch.tensor([0, 2]), torch.tensor([1, 3])]),
}

# And for default_convert, which is what happens to a sample without batching.
CONVERTED: dict[str, tuple[Any, Any]] = {
    "int": (0, 0),
    "array": (np.array([0, 1]), torch.tensor([0, 1])),
    "named tuple": (Point(0, 0), Point(x=0, y=0)),
    "named tuple of arrays": (Point(np.array(0), np.array(0)), Point(x=torch.tensor(0), y=torch.tensor(0))),
    "list of arrays": ([np.array([0, 1]), np.array([2, 3])], [torch.tensor([0, 1]), torch.tensor([2, 3])]),
}


@ANY_WORKERS
@pytest.mark.parametrize("kind", COLLATED)
def test_default_collate(take: Take, num_workers: int, kind: str) -> None:
    """Samples of each kind become the batch that is shown."""
    samples, batch = COLLATED[kind]
    assert repr(take(DataLoader(samples, batch_size=len(samples), num_workers=num_workers))) == repr([batch])


@ANY_WORKERS
@pytest.mark.parametrize("kind", CONVERTED)
def test_default_convert(take: Take, num_workers: int, kind: str) -> None:
    """Without batching, a sample of each kind becomes what is shown."""
    sample, converted = CONVERTED[kind]
    assert repr(take(DataLoader([sample], batch_size=None, num_workers=num_workers))) == repr([converted])


class Money:
    """A type that default_collate does not know."""

    def __init__(self, cents: int) -> None:
        self.cents = cents


def collate_money(batch: list[Money], *, collate_fn_map: Any = None) -> Tensor:
    return torch.tensor([money.cents for money in batch])


@pytest.mark.forked("the map of collate functions is changed in this process")
@ANY_WORKERS
def test_default_collate_extended(take: Take, num_workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A type of one's own is collated by a function of one's own, or by an entry in torch's map of functions."""
    purse = [Money(5), Money(10), Money(20)]

    def collate(batch: list[Any]) -> Any:
        return collate_money(batch) if isinstance(batch[0], Money) else default_collate(batch)

    assert take(DataLoader(purse, 2, collate_fn=collate, num_workers=num_workers))[0].tolist() == [5, 10]
    monkeypatch.setitem(default_collate_fn_map, Money, collate_money)
    assert take(DataLoader(purse, 3, num_workers=num_workers))[0].tolist() == [5, 10, 20]


@ANY_WORKERS
def test_padding_in_collate_fn(take: Take, num_workers: int) -> None:
    """Sequences of different lengths become one tensor, padded to the longest of the batch."""

    def pad(words: list[str]) -> Tensor:
        codes = [torch.tensor([ord(letter) for letter in word]) for word in words]
        return torch.nn.utils.rnn.pad_sequence(codes, batch_first=True)

    shapes = [tuple(batch.shape) for batch in take(DataLoader(Words(), 3, collate_fn=pad, num_workers=num_workers))]
    assert shapes == [(3, 4), (3, 6), (1, 2)]


# ------------------------------------------------------------------------------------------------------------ samplers


class ByLength(Sampler[int]):
    """Indices of the shorter words first."""

    def __init__(self, data: Words) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[int]:
        sizes = torch.tensor([len(self.data[i]) for i in range(len(self.data))])
        yield from torch.argsort(sizes, stable=True).tolist()


class BatchesByLength(ByLength):
    """Batches of indices of words of about one length."""

    def __init__(self, data: Words, batch_size: int) -> None:
        super().__init__(data)
        self.batch_size = batch_size

    def __len__(self) -> int:
        return math.ceil(len(self.data) / self.batch_size)

    def __iter__(self) -> Any:
        order = torch.tensor(list(super().__iter__()))
        for chunk in torch.chunk(order, len(self)):
            yield chunk.tolist()


@ANY_WORKERS
def test_samplers_of_ones_own(take: Take, num_workers: int) -> None:
    """A sampler that sorts by length, as `sampler` and, in batches, as `batch_sampler`."""
    words = Words()
    in_order = take(DataLoader(words, batch_size=None, sampler=ByLength(words), num_workers=num_workers))
    assert in_order == ["a", "cc", "gg", "ddd", "bbbb", "eeeee", "ffffff"]
    loader = DataLoader(words, batch_sampler=BatchesByLength(words, 3), num_workers=num_workers)
    assert len(loader) == 3
    assert take(loader) == [["a", "cc", "gg"], ["ddd", "bbbb", "eeeee"], ["ffffff"]]


@ANY_WORKERS
def test_weighted_random_sampler(take: Take, num_workers: int) -> None:
    """With replacement the heavy index comes often; without, each comes once at most; as many as asked for."""
    weights = [0.1, 0.9, 0.4, 0.7, 3.0, 0.6]
    generator = torch.Generator().manual_seed(0)
    many = WeightedRandomSampler(weights, 6000, replacement=True, generator=generator)
    drawn = take(DataLoader(range(6), batch_size=None, sampler=many, num_workers=num_workers))
    counts = collections.Counter(drawn)
    assert len(drawn) == 6000
    for index, weight in enumerate(weights):
        assert counts[index] / 6000 == pytest.approx(weight / sum(weights), abs=0.03)

    once = WeightedRandomSampler([0.9, 0.4, 0.05, 0.2, 0.3, 0.1], 5, replacement=False, generator=generator)
    drawn = take(DataLoader(range(6), batch_size=None, sampler=once, num_workers=num_workers))
    assert len(drawn) == len(set(drawn)) == 5
    assert set(drawn) < set(range(6))


@ANY_WORKERS
@pytest.mark.parametrize("drop_last", [False, True])
def test_batch_sampler(take: Take, num_workers: int, drop_last: bool) -> None:
    """Ten indices in batches of three, with the short last one or without; as batch_sampler, and for bulk loading."""
    batches = BatchSampler(SequentialSampler(range(10)), batch_size=3, drop_last=drop_last)
    shown = [[0, 1, 2], [3, 4, 5], [6, 7, 8]] if drop_last else [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    loader = DataLoader(range(10), batch_sampler=batches, num_workers=num_workers)
    assert [batch.tolist() for batch in take(loader)] == shown

    class Bulk(Dataset[Any]):
        def __getitem__(self, indices: list[int]) -> list[int]:
            return list(indices)

    assert take(DataLoader(Bulk(), batch_size=None, sampler=batches, num_workers=num_workers)) == shown


@ANY_WORKERS
def test_distributed_sampler_loop(take: Take, num_workers: int) -> None:
    """The loop that calls set_epoch: each epoch all ranks together see all, in an order that is new and theirs alone.

    With process groups: tests/test_distributed.py.
    """
    dataset = TensorDataset(torch.arange(20))
    orders = []
    for rank in range(2):
        sampler: DistributedSampler[Any] = DistributedSampler(dataset, num_replicas=2, rank=rank)
        loader = DataLoader(dataset, shuffle=(sampler is None), sampler=sampler, num_workers=num_workers)
        orders.append([])
        for epoch in range(2):
            sampler.set_epoch(epoch)
            orders[rank].append([int(batch[0]) for batch in take(loader)])
    for epoch in range(2):
        assert sorted(orders[0][epoch] + orders[1][epoch]) == list(range(20))
    assert orders[0][0] != orders[0][1]


# --------------------------------------------------------------------------------------------------- kinds of datasets


@ANY_WORKERS
def test_random_split(take: Take, num_workers: int) -> None:
    """Splits by counts and by shares: of the right lengths, disjoint, complete, and the same for the same generator."""
    for total, lengths, counts in ((10, [3, 7], [3, 7]), (30, [0.3, 0.3, 0.4], [9, 9, 12])):
        seen = []
        for _ in range(2):
            parts = random_split(range(total), lengths, generator=torch.Generator().manual_seed(42))
            assert [len(part) for part in parts] == counts
            loaders = [DataLoader(part, batch_size=None, num_workers=num_workers) for part in parts]
            seen.append([take(loader) for loader in loaders])
        assert seen[0] == seen[1]
        assert sorted(index for part in seen[0] for index in part) == list(range(total))


@ANY_WORKERS
def test_stack_dataset(take: Take, num_workers: int) -> None:
    """Datasets side by side, as a tuple or by name."""
    images, texts = TensorDataset(torch.arange(6.0)), Words()
    pairs = StackDataset(list(range(6)), [texts[i] for i in range(6)])
    assert repr(take(DataLoader(pairs, 2, num_workers=num_workers))[0]) == repr([torch.tensor([0, 1]), ("a", "bbbb")])
    named = StackDataset(image=[images[i][0] for i in range(6)], text=[texts[i] for i in range(6)])
    batch = take(DataLoader(named, 3, num_workers=num_workers))[1]
    assert batch["image"].tolist() == [3.0, 4.0, 5.0]
    assert batch["text"] == ["ddd", "eeeee", "ffffff"]


# ----------------------------------------------------------------------------------------- seeds, and memory pinning


class Draws(Dataset[tuple[float, float]]):
    """What numpy's and Python's global generators give in the worker."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[float, float]:
        return float(np.random.rand()), random.random()


def seed_from_torch(worker_id: int) -> None:
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)


@pytest.mark.processes
@pytest.mark.parametrize("seeding", ["batch", "worker"])
def test_seeding_workers_from_torchs_seed(take: Take, seeding: Any) -> None:
    """The recipe for reproducible workers: a worker_init_fn that seeds, and a generator for the loader."""

    def draw(seed: int) -> list[Any]:
        generator = torch.Generator().manual_seed(seed)
        loader = DataLoader(
            Draws(), 2, num_workers=2, worker_init_fn=seed_from_torch, generator=generator, seeding=seeding
        )
        return [torch.stack(batch).tolist() for batch in take(loader)]

    assert draw(0) == draw(0)
    assert draw(0) != draw(1)
    drawn = [number for batch in draw(0) for numbers in batch for number in numbers]
    assert len(set(drawn)) == len(drawn)


class PairBatch:
    """A batch of a type of one's own, which knows how to pin itself."""

    def __init__(self, samples: list[tuple[Tensor, Tensor]]) -> None:
        inputs, targets = zip(*samples, strict=True)
        self.inputs = torch.stack(inputs, 0)
        self.targets = torch.stack(targets, 0)

    def pin_memory(self) -> Self:
        self.inputs = self.inputs.pin_memory()
        self.targets = self.targets.pin_memory()
        return self


def pair_loader(num_workers: int) -> DataLoader[Any]:
    numbers = torch.arange(10 * 5, dtype=torch.float32).view(10, 5)
    dataset = TensorDataset(numbers, numbers)
    return DataLoader(dataset, batch_size=2, collate_fn=PairBatch, pin_memory=True, num_workers=num_workers)


@ANY_WORKERS
@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_custom_batch_with_pin_memory_without_a_gpu(take: Take, num_workers: int) -> None:
    """A batch type of one's own arrives as it is; that there is nothing to pin memory for is warned of."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        batches = take(pair_loader(num_workers))
    is_told = any("no accelerator is found" in str(warning.message) for warning in seen)
    assert is_told == (TORCH >= (2, 13))  # 2.6 says nothing
    assert [type(batch) for batch in batches] == [PairBatch] * 5
    assert batches[1].inputs.tolist() == batches[1].targets.tolist() == [[10, 11, 12, 13, 14], [15, 16, 17, 18, 19]]


@ANY_WORKERS
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_custom_batch_with_pin_memory(take: Take, num_workers: int) -> None:
    """A batch type of one's own pins itself: both of its tensors are page-locked."""
    batches = take(pair_loader(num_workers))
    assert len(batches) == 5
    assert all(batch.inputs.is_pinned() and batch.targets.is_pinned() for batch in batches)
