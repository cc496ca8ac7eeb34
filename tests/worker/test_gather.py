"""Rows of data in memory, found once a batch: what torch gives sample by sample, errors and oddities too."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.utils.data._utils.fetch as torch_fetch
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset, default_collate
from torch.utils.data._utils import collate as torch_collate

from asyncloader import DataLoader
from asyncloader.transport.collate import recycling_collate
from asyncloader.transport.whole import Whole
from tests.worker.fetching import fetching

LENGTH = 20


def tensors(offset: int = 0, length: int = LENGTH, dtype: torch.dtype = torch.float32) -> TensorDataset:
    """Rows, labels, and large rows of strange numbers."""
    numbers = torch.arange(length) + offset
    wide = (numbers[:, None] * 1000 + torch.arange(12_000)).to(torch.int16)
    return TensorDataset(numbers.view(-1, 1).expand(-1, 3).to(dtype).contiguous(), numbers, wide)


class Doubled(TensorDataset):
    """Samples of its own."""

    def __getitem__(self, index: Any) -> Any:
        return tuple(2 * part for part in super().__getitem__(index))


class Named(TensorDataset):
    """Another name, nothing else."""

    def __len__(self) -> int:
        return 5


class Together(TensorDataset):
    """Batches of its own."""

    def __getitems__(self, indices: list[int]) -> Any:
        return [(index,) for index in indices]


class OwnSubset(Subset[Any]):
    """Samples of its own."""

    def __getitem__(self, index: Any) -> Any:
        return ("own", index)

    def __getitems__(self, indices: list[int]) -> Any:
        return [self[index] for index in indices]


def with_attribute() -> TensorDataset:
    made = tensors()
    made.__getitems__ = lambda indices: [(index,) for index in indices]  # type: ignore[attr-defined]
    return made


def changed(change: Callable[[Any], Any]) -> TensorDataset:
    return TensorDataset(change(torch.arange(LENGTH * 12, dtype=torch.float32).view(LENGTH, 3, 4)))


GATHERED: dict[str, Callable[[], Any]] = {
    "tensors": tensors,
    "every other row": lambda: changed(lambda tensor: tensor[::2]),
    "one row for all": lambda: changed(lambda tensor: tensor[:1].expand(LENGTH, -1, -1)),
    "rows without elements": lambda: changed(lambda tensor: tensor[:, :0]),
    "bfloat16": lambda: changed(torch.Tensor.bfloat16),
    "float8": lambda: changed(lambda tensor: tensor.to(torch.float8_e4m3fn)),
    "bool": lambda: changed(torch.Tensor.bool),
    "complex": lambda: changed(lambda tensor: tensor * 1j),
    "uint16": lambda: changed(lambda tensor: tensor.to(torch.uint16)),
    "a subset": lambda: Subset(tensors(), [3, 1, -1, 19, 3]),
    "a subset by a range": lambda: Subset(tensors(), range(1, 19, 3)),
    "a subset by an array": lambda: Subset(tensors(), cast(Any, np.array([3, 1, -1, 19]))),
    "a subset by numpy's numbers": lambda: Subset(tensors(), [*np.array([3, 1, -1, 19])]),
    "a subset of a subset": lambda: Subset(Subset(tensors(), range(2, 18)), [3, 1, -1, 5]),
}

FETCHED: dict[str, Callable[[], Any]] = {
    "samples of its own": lambda: Doubled(*tensors().tensors),
    "a class with another name": lambda: Named(*tensors().tensors),
    "batches of its own": lambda: Together(*tensors().tensors),
    "batches by an attribute": with_attribute,
    "a subset with samples of its own": lambda: OwnSubset(tensors(), [1, 2, 3]),
    "tensors that require grad": lambda: changed(lambda tensor: tensor.requires_grad_()),
    "conjugate views": lambda: changed(lambda tensor: (tensor * 1j).conj()),
    "sparse tensors": lambda: changed(torch.Tensor.to_sparse),
    "rows in another order": lambda: changed(lambda tensor: tensor.transpose(1, 2)),
    "parameters": lambda: changed(lambda tensor: torch.nn.Parameter(tensor, requires_grad=False)),
    "a subset that is out of range": lambda: Subset(tensors(), [1, 20]),
    "a subset by other keys": lambda: Subset(tensors(), cast(Any, [1, [2], slice(3)])),
    "several": lambda: ConcatDataset([tensors(), tensors(100, 7)]),
    "a subset of several": lambda: Subset(ConcatDataset([tensors(), tensors(100, 7)]), [26, -1, 0, 20, 19]),
    "stacked": lambda: StackDataset(tensors(), tensors(100)),
}

KEYS: dict[str, Any] = {
    "some": [3, 1, 0, 3],
    "one": [2],
    "from behind": [0, -1, -3],
    "a tuple": (2, 1),
    "a range": range(3),
    "an array": np.array([1, 0]),
    "numpy's numbers": [np.int64(1), np.int32(0), 2],
    "out of range": [1, 500],
    "out of range from behind": [1, -500],
    "too large": [1, 2**64 - 1],
    "bools": [True, False],
    "a bool among numbers": [1, True],
    "fractions": [1.0, 2.0],
    "texts": ["a"],
    "lists": [[0, 1], [1, 0]],
    "slices": [slice(0, 2), slice(1, 3)],
    "tensors": [*torch.arange(3)],
    "a tensor": torch.arange(3),
    "an unsigned array": np.array([1, 2**64 - 1], np.uint64),
    "none": [],
    "nothing": None,
}
USUAL = ("some", "one", "from behind", "a tuple", "a range", "an array", "numpy's numbers")


def outcome(make: Callable[[], Any]) -> Any:
    """A batch, or what is raised."""
    try:
        return make()
    except Exception as error:
        return type(error), str(error)


def fetched(dataset: Any, keys: Any, **options: Any) -> tuple[Any, bool]:
    """What we make of the keys, and whether there was nothing to collate."""
    samples = outcome(lambda: fetching(dataset, collate_fn=default_collate, **options)(keys))
    if isinstance(samples, tuple) and isinstance(samples[0], type):
        return samples, False
    return outcome(lambda: recycling_collate(default_collate)(samples)), isinstance(samples, Whole)


def torchs(dataset: Any, keys: Any) -> Any:
    return outcome(lambda: torch_fetch._MapDatasetFetcher(dataset, True, default_collate, False).fetch(keys))


def assert_same(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    if isinstance(ours, torch.Tensor):
        form = [(t.dtype, t.shape, t.stride(), t.requires_grad) for t in (ours, theirs)]
        assert form[0] == form[1]
        as_bytes = [t.detach().resolve_conj().contiguous().view(-1).view(torch.uint8) for t in (ours, theirs)]
        assert torch.equal(*as_bytes)
    elif isinstance(ours, (list, tuple)):
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)
    elif isinstance(ours, dict):
        assert_same([*ours.items()], [*theirs.items()])
    else:
        assert ours == theirs


@pytest.mark.parametrize("name", GATHERED)
def test_rows_are_those_of_torch(name: str) -> None:
    """Values, dtypes, strides, and what is raised, by keys of all sorts; the usual ones are gathered."""
    dataset = GATHERED[name]()
    for kind, keys in KEYS.items():
        ours, is_whole = fetched(dataset, keys)
        assert_same(ours, torchs(dataset, keys))
        assert is_whole or kind not in USUAL or not isinstance(ours, (list, dict)), kind


@pytest.mark.parametrize("name", FETCHED)
@pytest.mark.filterwarnings("ignore")
def test_all_else_is_fetched_as_torch_does(name: str) -> None:
    """Sample by sample, whatever comes of that."""
    for keys in ([0, 1, 2], [1, 25], [-1]):
        theirs = torchs(FETCHED[name](), keys)
        ours, is_whole = fetched(FETCHED[name](), keys)
        if isinstance(theirs, (list, dict)):
            assert_same(ours, theirs)
        else:
            assert ours == theirs or ours[0] is theirs[0]
        assert not is_whole


def test_changes_between_batches_are_seen() -> None:
    """Of tensors, of indices, of the dataset itself; as with torch."""
    inner = TensorDataset(torch.arange(10))
    subset = Subset(inner, [1, 2, 3])
    fetch = fetching(subset, collate_fn=default_collate)
    changes: list[Callable[[], Any]] = [
        lambda: None,
        lambda: inner.tensors[0].mul_(2),
        lambda: setattr(inner, "tensors", (torch.arange(10.0), torch.ones(10))),
        lambda: cast(list[int], subset.indices).reverse(),
        lambda: setattr(subset, "dataset", TensorDataset(torch.full((10,), 7.0), torch.ones(10))),
        lambda: setattr(subset, "dataset", inner),
        lambda: setattr(inner, "tensors", (torch.ones(10, requires_grad=True), torch.ones(10))),
    ]
    for change in changes:
        change()
        samples = fetch([0, 1, -1])
        assert_same(recycling_collate(default_collate)(samples), torchs(subset, [0, 1, -1]))
    assert not isinstance(samples, Whole)


def test_collation_that_the_user_changed_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another function for tensors or tuples in torch's map, or another collate_fn."""
    fetch = fetching(tensors(), collate_fn=default_collate)
    assert isinstance(fetch([1]), Whole)
    for key in (torch.Tensor, tuple, dict, object):
        with monkeypatch.context() as patch:
            patch.setitem(torch_collate.default_collate_fn_map, key, lambda batch, collate_fn_map: "the user's")
            assert type(fetch([1])) is list
    assert type(fetching(tensors(), collate_fn=list)([1])) is list
    assert type(fetching(tensors(), collate_fn=default_collate, auto_collation=False)(1)) is tuple


WAYS: list[Any] = [
    {"num_workers": 0},
    {"num_workers": 2},
    pytest.param({"num_workers": 1, "multiprocessing_context": "spawn"}, marks=pytest.mark.slow),
    {"num_workers": 2, "worker_backend": "thread"},
    {"num_workers": 0, "concurrency": 4},
    {"num_workers": 1, "concurrency": 4},
]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_epochs_are_those_of_torch(way: dict[str, Any]) -> None:
    """The same shuffled batches wherever they are made, inline and in slabs; they may be written to."""
    dataset = Subset(tensors(), range(2, 18))
    order = [torch.Generator().manual_seed(5) for _ in range(2)]
    theirs = list(torch.utils.data.DataLoader(dataset, 7, shuffle=True, generator=order[0]))
    loader = DataLoader(dataset, 7, shuffle=True, generator=order[1], **way)
    ours = list(loader)
    assert_same(ours, theirs)
    assert loader.stats().samples == len(dataset)
    for batch in ours:
        batch[0].zero_()
    assert torch.equal(dataset[0][0], torch.full((3,), 2.0))


FEW_WAYS: list[dict[str, Any]] = [{"num_workers": 0}, {"num_workers": 1}, {"num_workers": 0, "concurrency": 4}]


class Keys:
    """A batch sampler with bad keys."""

    def __iter__(self) -> Iterable[list[int]]:  # type: ignore[override]
        yield from ([0, 1], [2, 99], [98, 97], [3, 4])

    def __len__(self) -> int:
        return 4


@pytest.mark.parametrize("way", FEW_WAYS, ids=str)
def test_bad_keys(way: dict[str, Any]) -> None:
    """Cost their batch, or their sample alone where bad samples are skipped or replaced."""
    dataset, keys = tensors(), cast(Any, Keys())
    iterator = iter(DataLoader(dataset, batch_sampler=keys, **way))
    with_error = [outcome(lambda: next(iterator)[1].tolist()) for _ in range(4)]
    theirs = iter(torch.utils.data.DataLoader(dataset, batch_sampler=keys))
    assert with_error == [outcome(lambda: next(theirs)[1].tolist()) for _ in range(4)]
    skipped = [batch[1].tolist() for batch in DataLoader(dataset, batch_sampler=keys, on_error="skip", **way)]
    assert skipped == [[0, 1], [2], [3, 4]]
    replacing = iter(DataLoader(dataset, batch_sampler=keys, on_error="replace", **way))
    assert [next(replacing)[1].tolist(), next(replacing)[1].tolist()] == [[0, 1], [2, 2]]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_run_goes_on_from_a_state(num_workers: int) -> None:
    """In the middle of an epoch, to its end and over the next one."""

    def loader() -> DataLoader[Any]:
        torch.manual_seed(3)
        return DataLoader(TensorDataset(torch.arange(50)), 8, shuffle=True, num_workers=num_workers)

    whole = loader()
    expected = [batch for _ in range(2) for (batch,) in whole]
    first = loader()
    iterator = iter(first)
    begun = [next(iterator)[0] for _ in range(3)]
    state = first.state_dict()
    del iterator
    second = loader()
    second.load_state_dict(state)
    assert_same(begun + [batch for _ in range(2) for (batch,) in second], expected)


class Collated(Dataset[Any]):
    """Says that its batches are batches."""

    collated = True

    def __init__(self, bad: int | None = None) -> None:
        self.bad = bad
        self.asked: list[Any] = []

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        if index == self.bad:
            raise KeyError(index)
        return {"index": index, "row": np.full(3, index)}

    def __getitems__(self, indices: list[int]) -> Any:
        self.asked.append(indices)
        if self.bad in indices:
            raise KeyError("in the batch")
        return {"index": torch.tensor(indices), "row": np.repeat(np.array(indices)[:, None], 3, 1), "together": True}


class CollatedAsync(Collated):
    """The same, awaited."""

    async def __getitem__(self, index: int) -> Any:  # type: ignore[override]
        return super().__getitem__(index)

    async def __getitems__(self, indices: list[int]) -> Any:
        return super().__getitems__(indices)


class CollatedOnly(Collated):
    """Has no samples."""

    __getitem__ = Dataset.__getitem__


@pytest.mark.covering(1)
@pytest.mark.parametrize("way", FEW_WAYS, ids=str)
@pytest.mark.parametrize("kind", [Collated, CollatedAsync])
def test_datasets_that_collate(kind: type[Collated], way: dict[str, Any]) -> None:
    """What they return is the batch, with tensors for arrays; through a Subset too; each sample is counted."""
    if kind is CollatedAsync and way.get("concurrency"):
        way = {**way, "concurrency": None}
    for dataset, expected in ((kind(), [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]), (Subset(kind(), [5, 3]), [[5, 3]])):
        loader: Any = DataLoader(cast(Any, dataset), 4, **way)
        batches = list(loader)
        assert [batch["index"].tolist() for batch in batches] == expected
        for batch in batches:
            assert torch.equal(batch["row"], batch["index"][:, None].expand(-1, 3))
            assert batch["together"] is True
        assert loader.stats().samples == sum(map(len, expected))
    given: Any = DataLoader(kind(), 4, collate_fn=lambda batch: batch["index"] * 2, **way)
    assert [batch.tolist() for batch in given] == [[0, 2, 4, 6], [8, 10, 12, 14], [16, 18]]


@pytest.mark.parametrize("way", FEW_WAYS, ids=str)
@pytest.mark.parametrize("kind", [Collated, CollatedAsync])
def test_a_bad_sample_of_a_dataset_that_collates(kind: type[Collated], way: dict[str, Any]) -> None:
    """Is found by asking for each alone; the others are collated by default."""
    batches = list(DataLoader(kind(bad=5), 4, on_error="skip", **way))
    assert [batch["index"].tolist() for batch in batches] == [[0, 1, 2, 3], [4, 6, 7], [8, 9]]
    assert ["together" in batch for batch in batches] == [True, False, True]
    iterator = iter(DataLoader(kind(bad=5), 4, **way))
    next(iterator)
    with pytest.raises(KeyError, match="in the batch"):
        next(iterator)


@pytest.mark.parametrize("way", FEW_WAYS, ids=str)
def test_who_has_no_samples_is_not_asked_for_them(way: dict[str, Any]) -> None:
    """What the batch raised is raised, and not that there is no such method."""
    iterator = iter(DataLoader(CollatedOnly(bad=5), 4, on_error="skip", **way))
    assert next(iterator)["index"].tolist() == [0, 1, 2, 3]
    with pytest.raises(KeyError, match="in the batch"):
        next(iterator)


class Noting(list[int]):
    """Indices of a Subset, which say of what kinds they were asked."""

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index) if type(index) is int else 1 / 0


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_sequences_of_users_are_asked_for_ints(num_workers: int, shuffle: bool) -> None:
    """Of Python's own; a row that cannot be gathered is fetched as ever."""
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
