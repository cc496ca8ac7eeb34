"""Identities: every option of every class that has states is decided on, and each decision is tested.

A state that is loaded where an option differs either gives exactly what is promised, or is refused with the option's
name. An option that nobody has decided on fails the first test.
"""

from __future__ import annotations

import inspect
import itertools
import json
import types
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import asyncloader
import asyncloader.datasets
import asyncloader.samplers
from asyncloader import DataLoader, StateMismatchError, identity
from asyncloader.run.fits import describe
from asyncloader.samplers import (
    BalancedBatchSampler,
    ElasticSampler,
    LengthBatchSampler,
    MixtureSampler,
    PackingBatchSampler,
    WeightedSampler,
)
from tests.support import inside

pytestmark = pytest.mark.on_threads

Options = dict[str, Any]
COUNT = 48
LENGTHS = [number % 7 + 1 for number in range(COUNT)]
OTHER_LENGTHS = [*LENGTHS[:-2], 7, 7]
THREAD: Options = {"num_workers": 1, "worker_backend": "thread"}


class Same(NamedTuple):
    """The option belongs to the identity: a state of one value is refused with another, and the error says `field`."""

    one: Any
    other: Any
    field: str = ""
    base: Options = types.MappingProxyType({})  # type: ignore[assignment]


class Free(NamedTuple):
    """The option may differ: the rest of the epoch is the same."""

    one: Any
    other: Any
    base: Options = types.MappingProxyType({})  # type: ignore[assignment]


class Rank(NamedTuple):
    """Ranks and their number, which an elastic sampler is resumed on any of."""


Decision = Same | Free | Rank
SEED_AND_ENDS: dict[str, Decision] = {
    "num_replicas": Rank(),
    "rank": Rank(),
    "seed": Same(0, 1),
    "drop_last": Same(False, True),
}
WINDOWED: dict[str, Decision] = {
    **SEED_AND_ENDS,
    "lengths": Same(LENGTHS, OTHER_LENGTHS),
    "sampler": Same(None, ElasticSampler(COUNT, seed=1), "seed"),
    "window": Same(16, 12),
    "shuffle": Same(True, False),
}
SAMPLERS: dict[type, tuple[Options, dict[str, Decision]]] = {
    ElasticSampler: (
        {"dataset": COUNT},
        {**SEED_AND_ENDS, "dataset": Same(COUNT, COUNT + 1, "length"), "shuffle": Same(True, False)},
    ),
    MixtureSampler: (
        {"lengths": [30, 18], "stop": "all"},
        {
            **SEED_AND_ENDS,
            "lengths": Same([30, 18], [18, 30]),
            "by": Same(None, [1.0, 2.0]),
            "weights": Free([1, 1], [2, 1]),  # those of the state are used, and a warning says so
            "stop": Same("all", "first"),
            "shuffle": Same(True, False),
        },
    ),
    WeightedSampler: (
        {"weights": LENGTHS},
        {
            **SEED_AND_ENDS,
            "weights": Same(LENGTHS, OTHER_LENGTHS),
            "num_samples": Same(COUNT, COUNT + 1),
            "replacement": Same(True, False),
        },
    ),
    LengthBatchSampler: (
        {"lengths": LENGTHS, "max_tokens": 14, "window": 16},
        {
            **WINDOWED,
            "max_tokens": Same(14, 15),
            "max_batch": Same(None, 3),
            "too_long": Same("raise", "alone"),
            "buckets": Same([3, 7], [4, 7]),
        },
    ),
    PackingBatchSampler: (
        {"lengths": LENGTHS, "block_size": 10, "window": 16},
        {
            **WINDOWED,
            "block_size": Same(10, 11),
            "batch_size": Free(1, 2),
            "too_long": Same("raise", "cut"),
            "cost": Same(None, np.square),
        },
    ),
    BalancedBatchSampler: (
        {"costs": LENGTHS, "batch_size": 3, "window": 18},
        {
            **{option: decision for option, decision in WINDOWED.items() if option != "lengths"},
            "costs": Same(LENGTHS, OTHER_LENGTHS),
            "cost": Same(None, np.square),
            "batch_size": Same(3, 4),
            "window": Same(18, 12),
        },
    ),
}
TORCHS: dict[type, tuple[Options, dict[str, Decision]]] = {
    SequentialSampler: ({"data_source": range(COUNT)}, {"data_source": Same(range(COUNT), range(40), "samples")}),
    RandomSampler: (
        {"data_source": range(COUNT)},
        {
            "data_source": Same(range(COUNT), range(40), "samples"),
            "replacement": Same(False, True),
            "num_samples": Same(40, 41, "samples"),
            "generator": Same(None, torch.Generator(), "generators"),
        },
    ),
    SubsetRandomSampler: (
        {"indices": range(40)},
        {
            "indices": Same([*range(40)], [*range(8, COUNT)]),
            "generator": Same(None, torch.Generator(), "generators"),
        },
    ),
    WeightedRandomSampler: (
        {"weights": LENGTHS, "num_samples": 40},
        {
            "weights": Same(LENGTHS, OTHER_LENGTHS),
            "num_samples": Same(40, 41, "samples"),
            "replacement": Same(True, False),
            "generator": Same(None, torch.Generator(), "generators"),
        },
    ),
    DistributedSampler: (
        {"dataset": range(COUNT), "num_replicas": 2, "rank": 0},
        {
            "dataset": Same(range(COUNT), range(40), "samples"),
            "num_replicas": Same(2, 3),
            "rank": Same(0, 1),
            "shuffle": Same(True, False),
            "seed": Same(0, 1),
            "drop_last": Same(False, True),
        },
    ),
    BatchSampler: (
        {"sampler": range(COUNT), "batch_size": 4, "drop_last": False},
        {
            "sampler": Same([*range(COUNT)], [*range(COUNT)][::-1], "keys"),
            "batch_size": Same(4, 5),
            "drop_last": Same(False, True),
        },
    ),
}


class Counting(list[int]):
    """Numbers, and a state."""

    def state_dict(self) -> Options:
        return {}

    def load_state_dict(self, state: Options) -> None:
        assert state == {}


DATA = [*range(COUNT)]
LOADER: dict[str, Decision] = {
    "dataset": Same(DATA, DATA[:-1], "dataset_length"),
    "batch_size": Same(4, 5),
    "shuffle": Same(True, False, "sampler"),
    "sampler": Same(DATA, DATA[::-1], "keys", {"shuffle": None}),
    "batch_sampler": Same([[0, 1], [2]], [[0], [1, 2]], "keys", {"shuffle": None, "batch_size": 1}),
    "num_workers": Free(0, 2, {"worker_backend": "thread"}),
    "collate_fn": Free(None, torch.tensor),
    "pin_memory": Free(False, False),  # needs a device
    "drop_last": Same(False, True),
    "timeout": Free(0, 60, THREAD),
    "worker_init_fn": Free(None, print, THREAD),
    "multiprocessing_context": Free(None, "fork", {"num_workers": 1}),
    "generator": Same(None, torch.Generator()),
    "prefetch_factor": Free(None, 4, THREAD),
    "persistent_workers": Free(False, True, THREAD),
    "pin_memory_device": Free("", ""),  # deprecated and ignored
    "in_order": Free(True, False, THREAD),
    "concurrency": Free(None, 2, THREAD),
    "scheduling": Free("static", "dynamic", THREAD),
    "seeding": Same("batch", "sample"),
    "seeding_rank": Same(None, 1),
    "max_buffered_bytes": Free(0, 1 << 20, THREAD),
    "on_error": Free("raise", "skip"),
    "max_errors": Free(None, 3, {"on_error": "skip"}),
    "on_timeout": Free("raise", "skip", {**THREAD, "timeout": 60}),
    "on_crash": Free("retry", "raise", THREAD),
    "max_retries": Free(2, 3, THREAD),
    "worker_backend": Free("process", "thread", {"num_workers": 1}),
    "trace": Free(None, None),  # a file
    "snapshot_every_n_steps": Same(1, 0, "dataset_state", {"dataset": Counting(DATA)}),
    "max_workers": Free(None, 2, {"num_workers": "auto", "worker_backend": "thread"}),
    "max_worker_memory": Free(None, 1 << 40, {"num_workers": 1}),
}
CASES = [
    (kind, option, decision)
    for kind, (_, decisions) in {**SAMPLERS, **TORCHS}.items()
    for option, decision in decisions.items()
]


def case_id(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else value if isinstance(value, str) else type(value).__name__


def parameters(kind: type) -> set[str]:
    return inspect.signature(kind).parameters.keys() - {"args", "kwargs"}


def test_every_option_of_every_class_with_a_state_is_decided() -> None:
    """A new class, or a new option, needs a line in the tables of this file, and in docs/guides/resume.md."""
    rooms = (asyncloader, asyncloader.samplers, asyncloader.datasets)
    classes = {found for room in rooms for name in room.__all__ if isinstance(found := getattr(room, name), type)}
    stateful = {one for one in classes if hasattr(one, "load_state_dict")}
    assert stateful == {*SAMPLERS, DataLoader, asyncloader.samplers.OrderedSampler}  # whose subclasses have options
    for kind, (_, decisions) in {**SAMPLERS, **TORCHS}.items():
        assert decisions.keys() == parameters(kind), kind
    assert LOADER.keys() == parameters(DataLoader)


def keys_of(batch: Any) -> list[int]:
    return list(batch) if isinstance(batch, list) else [batch]


def through_json(state: Any) -> Any:
    return json.loads(json.dumps(state))


@pytest.mark.parametrize(("kind", "option", "decision"), [case for case in CASES if case[0] in SAMPLERS], ids=case_id)
def test_states_of_samplers(kind: Any, option: str, decision: Decision) -> None:
    """Each option of each kind, without a loader."""
    base, _ = SAMPLERS[kind]
    base = {**base, **getattr(decision, "base", {})}
    if isinstance(decision, Rank):
        one, other = kind(**base, num_replicas=2, rank=1), kind(**base, num_replicas=3, rank=2)
        first = [list(itertools.islice(kind(**base, num_replicas=2, rank=rank), 3)) for rank in range(2)]
        assert len(list(itertools.islice(one, 3))) == 3
        samplers = [other, *(kind(**base, num_replicas=3, rank=rank) for rank in range(2))]
        for sampler in samplers:
            sampler.load_state_dict(through_json(one.state_dict()))
        taken = [key for batch in [*first[0], *first[1], *itertools.chain(*samplers)] for key in keys_of(batch)]
        whole = [key for batch in kind(**base) for key in keys_of(batch)]
        assert not Counter(whole) - Counter(taken)
        assert len(taken) - len(whole) <= 2  # repeated where an epoch does not divide evenly
        return
    one, again, other = (kind(**{**base, option: value}) for value in (decision.one, decision.one, decision.other))
    whole = [key for batch in again for key in keys_of(batch)]
    begun = [key for batch in itertools.islice(one, 5) for key in keys_of(batch)]
    state = through_json(one.state_dict())
    again.load_state_dict(state)
    assert begun + [key for batch in again for key in keys_of(batch)] == whole
    if isinstance(decision, Free):
        other.load_state_dict(state)
        assert begun + [key for batch in other for key in keys_of(batch)] == whole
    else:
        with pytest.raises(StateMismatchError, match=f"fit: {decision.field or option} was") as caught:
            other.load_state_dict(state)
        assert caught.value.saved != caught.value.now


def loader_of(kind: Any, options: Options) -> DataLoader[Any]:
    torch.manual_seed(3)
    if kind is DataLoader:
        return DataLoader(**{"dataset": DATA, "batch_size": 4, "shuffle": True, **options})
    name, size = ("batch_sampler", 1) if kind is BatchSampler else ("sampler", 4)
    return DataLoader(DATA, size, **{name: kind(**options)})  # type: ignore[arg-type]


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(
    ("kind", "option", "decision"),
    [*[case for case in CASES if case[0] in TORCHS], *[(DataLoader, *one) for one in LOADER.items()]],
    ids=case_id,
)
def test_states_of_loaders(kind: Any, option: str, decision: Decision) -> None:
    """In the middle of an epoch: each option of ours and of torch's, and each option of torch's samplers."""
    assert not isinstance(decision, Rank)
    base = {} if kind is DataLoader else TORCHS[kind][0]

    def make(value: Any) -> DataLoader[Any]:
        return loader_of(kind, {**base, **decision.base, option: value})

    whole = [key for batch in make(decision.one) for key in batch.tolist()]
    loader = make(decision.one)
    iterator = iter(loader)
    begun = next(iterator).tolist()
    state = through_json(loader.state_dict())
    loader.close()
    for value in (decision.one, decision.other):
        other = make(value)
        if value is decision.other and isinstance(decision, Same):
            with pytest.raises(StateMismatchError, match=f"fit: {decision.field or option} was"):
                other.load_state_dict(state)
        else:
            other.load_state_dict(state)
            rest = [key for batch in other for key in batch.tolist()]
            assert sorted(rest) == sorted(whole[len(begun) :])
            if other.in_order:
                assert begun + rest == whole
        other.close()


class Numbers(IterableDataset[int]):
    """A stream."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(COUNT))


@pytest.mark.parametrize(
    ("option", "one", "other"),
    [("seeding", "batch", "sample"), ("snapshot_every_n_steps", 1, 0)],
)
def test_what_may_differ_for_streams(option: str, one: Any, other: Any) -> None:
    """Seeds, which are those of workers anyway; and how often states are taken."""
    loader: DataLoader[Any] = DataLoader(Numbers(), batch_size=4, **{option: one})
    begun = next(iter(loader)).tolist()
    resumed: DataLoader[Any] = DataLoader(Numbers(), batch_size=4, **{option: other})
    resumed.load_state_dict(through_json(loader.state_dict()))
    assert begun + [key for batch in resumed for key in batch.tolist()] == DATA


def mismatch(one: Any, other: Any, **options: Any) -> StateMismatchError:
    """Return the error of a loader of one dataset that loads a state of a loader of another one."""
    state = DataLoader(one, **options).state_dict()
    DataLoader(one, **options).load_state_dict(state)
    with pytest.raises(StateMismatchError) as caught:
        DataLoader(other, **options).load_state_dict(state)
    return caught.value


def test_torchs_datasets_are_compared_too() -> None:
    """A subset by its indices: a random split with another seed has other samples, and as many."""
    assert mismatch(Subset(DATA, range(40)), Subset(DATA, range(8, 48))).field == "indices"
    one, other = ConcatDataset([DATA, DATA[:5]]), ConcatDataset([DATA[:5], DATA])
    assert mismatch(one, other).field == "cumulative_sizes"
    assert mismatch(Subset(DATA, [*range(40)]), DATA[:40]).field == "datasets"
    assert mismatch(Subset(one, range(40)), Subset(other, range(40))).field == "cumulative_sizes"


def test_a_state_of_another_kind_of_sampler_is_refused() -> None:
    """Also inside of another sampler."""
    weighted, elastic = WeightedSampler([1] * COUNT), ElasticSampler(COUNT)
    for one, other in ((weighted, elastic), (elastic, weighted)):
        state = one.state_dict()
        with pytest.raises(StateMismatchError, match=r"kind was '.*Sampler' when it was taken, and is '.*Sampler' now"):
            other.load_state_dict(state)
        inside = LengthBatchSampler(LENGTHS, max_tokens=14, sampler=one).state_dict()
        with pytest.raises(StateMismatchError, match="kind was"):
            LengthBatchSampler(LENGTHS, max_tokens=14, sampler=other).load_state_dict(inside)


FORMS: dict[str, Callable[[Any, Path], Any]] = {
    "list": lambda lengths, folder: lengths.tolist(),
    "array": lambda lengths, folder: lengths.astype(np.int32),
    "tensor": lambda lengths, folder: torch.from_numpy(lengths),
    "file": lambda lengths, folder: saved(lengths, folder),
}


def saved(lengths: Any, folder: Path) -> Path:
    path = folder / f"{identity.checksum(lengths)['checksum']}.npy"
    np.save(path, lengths)
    return path


@pytest.mark.parametrize("form", FORMS)
def test_all_lengths_are_compared(form: str, tmp_path: Path) -> None:
    """A single change among 10,000 is found."""
    lengths = np.random.default_rng(0).integers(1, 100, 10_000)
    other = lengths.copy()
    other[5003] += 1
    make = lambda lengths, **options: LengthBatchSampler(lengths, max_tokens=1000, **options)  # noqa: E731
    state = make(FORMS[form](lengths, tmp_path)).state_dict()
    make(lengths).load_state_dict(state)
    with pytest.raises(StateMismatchError, match="lengths was"):
        make(FORMS[form](other, tmp_path)).load_state_dict(state)


def test_lengths_are_read_once_for_all_states(tmp_path: Path) -> None:
    """At the first state: 100 million take 0.7 s, each later state nothing."""
    np.save(tmp_path / "lengths.npy", np.ones(1000, np.int64))
    sampler = PackingBatchSampler(str(tmp_path / "lengths.npy"), block_size=10)
    first = sampler.state_dict()
    changed = np.load(tmp_path / "lengths.npy", mmap_mode="r+")
    changed[:] = 2
    changed.flush()
    assert sampler.state_dict() == first
    other = PackingBatchSampler(str(tmp_path / "lengths.npy"), block_size=10)
    with pytest.raises(StateMismatchError, match="lengths was"):
        other.load_state_dict(first)


def test_what_a_state_is_compared_with_is_plain_and_small() -> None:
    """Strings and numbers, of fixed names: torch.distributed.checkpoint needs that."""
    kinds = [
        describe(inside.options(DataLoader(Subset(DATA, DATA), sampler=sampler)))  # type: ignore[arg-type]
        for sampler in (None, WeightedSampler(LENGTHS, seed=np.int64(5)), [np.int64(3)], SubsetRandomSampler(DATA))  # type: ignore[arg-type]
    ]
    for found in kinds:
        assert through_json(found) == found
        assert found.keys() == kinds[0].keys()
        assert len(json.dumps(found)) < 1000


def test_checksums_are_of_values() -> None:
    """Equal numbers have one checksum in a list, an array or a tensor, of any width."""
    numbers = [3, 1, 2]
    forms = [numbers, tuple(numbers), np.array(numbers, np.uint8), torch.tensor(numbers), np.array(numbers)[::-1][::-1]]
    assert len({str(identity.checksum(form)) for form in forms}) == 1
    assert identity.checksum([1, 3, 2]) != identity.checksum(numbers)
    assert identity.checksum([[1], [2, 3]]) != identity.checksum([[1, 2], [3]])
    assert identity.checksum(["a", "b"]) != identity.checksum(["a", "c"])
    assert identity.checksum([object()]) == {"count": 1}
    long = np.zeros(1_000_000, np.int8)
    before = identity.checksum(long)
    long[-1] = 1
    assert identity.checksum(long) != before


def test_generators_of_loader_and_sampler_are_as_many() -> None:
    """A state has what each was, in their order: of another number, one would be set to what another had been."""
    one, other = RandomSampler(DATA), RandomSampler(DATA)
    state = DataLoader(DATA, sampler=one, generator=torch.Generator()).state_dict()
    with pytest.raises(StateMismatchError, match="generators was 2 when it was taken, and is 1 now"):
        DataLoader(DATA, sampler=other).load_state_dict(state)
