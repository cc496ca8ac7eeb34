"""States of the user's own objects: whose they are, what they cost, that they are exact and come back whole."""

from __future__ import annotations

import itertools
import json
import logging
import os
import pickle
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, Dataset, IterableDataset, Sampler

from asyncloader import DataLoader, sample_rng
from asyncloader.engine.progress import Progress
from asyncloader.samplers import ElasticSampler
from asyncloader.testing import assert_resumable, assert_resumable_async
from tests.support import effort, inside

LENGTH = 20

pytestmark = [pytest.mark.on_threads, pytest.mark.filterwarnings("ignore:This DataLoader will create")]


class Counting(Dataset[Any]):
    """A map-style dataset whose samples depend on how many it has given; and on the generators, if it is noisy."""

    given = 0

    def __init__(self, noisy: bool = False) -> None:
        self.noisy = noisy

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[int, int, float]:
        self.given += 1
        return index, self.given, random.random() if self.noisy else 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]


class Epochs(Sampler[int]):
    """Shuffles by an epoch that it counts itself."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length = length
        self.epoch_number = 0
        self.at = 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        order = random.Random(self.epoch_number).sample(range(self.length), self.length)
        while self.at < self.length:
            self.at += 1
            yield order[self.at - 1]
        self.at = 0
        self.epoch_number += 1

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch_number, "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch_number, self.at = state["epoch"], state["at"]


class StaysAtItsEnd(Epochs):
    """The same, but its state after an epoch says that there is nothing left, until it is iterated over again."""

    def __init__(self) -> None:
        super().__init__()
        self.resumed_at: int | None = None

    def __iter__(self) -> Iterator[int]:
        if self.resumed_at is None:
            self.epoch_number += 1
        self.at, self.resumed_at = self.resumed_at or 0, None
        order = random.Random(self.epoch_number).sample(range(self.length), self.length)
        for index in order[self.at :]:
            self.at += 1
            yield index

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.resumed_at = self.at if self.epoch_number else None


class InThrees(Sampler[list[int]]):
    """A batch sampler without a state, around a sampler with one."""

    def __init__(self, sampler: Sampler[int]) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        yield from BatchSampler(self.sampler, 3, drop_last=False)


def maker(dataset: Callable[[], Any], num_workers: int, **options: Any) -> Callable[[], DataLoader[Any]]:
    """Return a function that makes loaders over new datasets, with new samplers."""

    def make() -> DataLoader[Any]:
        made = {name: value() if callable(value) else value for name, value in options.items()}
        return DataLoader(dataset(), num_workers=num_workers, **{"batch_size": 3, **made})

    return make


def everything(loader: Any) -> list[Any]:
    return [[part.tolist() for part in batch] if isinstance(batch, list) else batch.tolist() for batch in loader]


# ----------------------------------------------------------------------------------------------------------- datasets


@pytest.mark.parametrize(
    ("num_workers", "options"),
    [
        (0, {}),
        (0, {"snapshot_every_n_steps": 3}),
        pytest.param(2, {"snapshot_every_n_steps": 3, "worker_backend": "process"}, marks=pytest.mark.slow),
        (2, {"snapshot_every_n_steps": 2, "persistent_workers": True, "worker_backend": "process"}),
        (2, {"snapshot_every_n_steps": 4, "batch_size": None, "scheduling": "dynamic", "num_workers_again": 2}),
        (1, {"worker_backend": "thread"}),
        (1, {"persistent_workers": True, "batch_sampler": lambda: InThrees(Epochs()), "batch_size": 1}),
    ],
)
def test_a_map_style_dataset_is_resumed_in_its_state(num_workers: int, options: dict[str, Any]) -> None:
    """What its workers made since their states were taken is made again: with its keys, its seeds, and in its order."""
    is_alone = options.pop("num_workers_again", None) is None  # else which worker makes which batch is a matter of time
    noisy = options.get("worker_backend") == "process"  # threads share the generators that are drawn from
    if noisy and effort.is_quick:
        options = {"batch_size": 4, **options}  # each batch is a state, which is gone on from in new workers
    assert_resumable(maker(lambda: Counting(noisy), 1 if not is_alone else num_workers, **options))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_dataset_whose_state_is_that_of_a_global_generator(num_workers: int) -> None:
    """What is made again from it draws from that, and leaves it where it was."""

    class Drawing(Counting):
        def __getitem__(self, index: int) -> Any:
            return index, torch.rand(())

        def state_dict(self) -> dict[str, Any]:
            return {"generator": torch.get_rng_state()}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            torch.set_rng_state(state["generator"])

    make = maker(Drawing, num_workers, snapshot_every_n_steps=3, shuffle=True)
    for done in (5, 7):
        loader = make()
        iterator = iter(loader)
        for _ in range(done):
            next(iterator)
        if done == 7:
            assert everything(iterator) == []  # the epoch is over: what follows is the next one
        state = loader.state_dict()
        expected = everything(loader if done == 7 else iterator)
        torch.manual_seed(1)
        resumed = make()
        resumed.load_state_dict(state)
        assert everything(resumed) == expected


async def test_a_map_style_dataset_is_resumed_in_async_for() -> None:
    """By the other face too, without workers."""
    await assert_resumable_async(maker(Counting, 0, snapshot_every_n_steps=2))


@pytest.mark.processes
@pytest.mark.parametrize("every", [1, 4, 0])
def test_a_map_style_dataset_goes_on_after_a_death(every: int, tmp_path: Path) -> None:
    """Every index is read once but for what is made again, and without a state being taken the batches are right."""

    class Dying(Counting):
        def __getitem__(self, index: int) -> Any:
            if index == 13 and (marker := tmp_path / "die").exists():
                marker.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__getitem__(index)

    def run() -> list[Any]:
        torch.manual_seed(3)
        return everything(maker(lambda: Dying(noisy=True), 2, snapshot_every_n_steps=every)())

    expected = run()
    (tmp_path / "die").touch()
    found = run()
    if not every:  # the count began anew
        expected, found = ([[keys, noise] for keys, _, noise in batches] for batches in (expected, found))
    assert found == expected


@pytest.mark.processes
def test_persistent_workers_that_die_in_a_later_epoch_keep_their_state(tmp_path: Path) -> None:
    """Another one begins where the dead one was, also before it has made a batch of that epoch."""

    class Dying(Counting):
        def __getitem__(self, index: int) -> Any:
            if index == 0 and (marker := tmp_path / "die").exists():
                marker.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__getitem__(index)

    loader = maker(Dying, 1, persistent_workers=True)()
    first = everything(loader)
    (tmp_path / "die").touch()
    second = everything(loader)
    loader.close()
    assert [count for _, counts, _ in first + second for count in counts] == list(range(1, 2 * LENGTH + 1))


def test_overlapping_samples_leave_the_last_state_that_was_taken() -> None:
    """Several batches are in work then, so it is not exact; but it is asked for, and it comes back."""
    loader = maker(Counting, 1, concurrency=2)()
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    iterator.close()
    given = json.loads(state["workers"])[0][1]["dataset"]["given"]
    assert given >= 3
    resumed = maker(Counting, 1, concurrency=2)()
    resumed.load_state_dict(state)
    counts = [count for _, counts, _ in everything(resumed) for count in counts]
    assert sorted(counts) == list(range(given + 1, given + LENGTH - 3 + 1))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_a_stream_counts_over_epochs_is_kept_where_it_outlasts_them(num_workers: int) -> None:
    """Without workers, and in persistent ones; others begin each epoch with what the trainer's process has."""

    class Stream(IterableDataset[int]):
        epoch = at = 0

        def __iter__(self) -> Iterator[int]:
            while self.at < 7:
                self.at += 1
                yield 100 * self.epoch + self.at
            self.at = 0
            self.epoch += 1

        def state_dict(self) -> dict[str, Any]:
            return {"epoch": self.epoch, "at": self.at}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.epoch, self.at = state["epoch"], state["at"]

    for options in ({}, {"persistent_workers": True})[: 1 + num_workers]:
        assert_resumable(maker(Stream, num_workers, **options))


class OwnIterator(IterableDataset[int]):
    """Is its own iterator, and does not begin anew."""

    at = 0

    def __iter__(self) -> OwnIterator:
        return self

    def __next__(self) -> int:
        if self.at == 5:
            raise StopIteration
        self.at += 1
        return self.at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("is_begun", [False, True])
def test_without_workers_a_state_before_the_first_batch_is_that_of_the_dataset(is_begun: bool) -> None:
    """Which is the same object for the next loader, and has been read since."""
    dataset = OwnIterator()
    loader = DataLoader(dataset, batch_size=2)
    iterator = iter(loader) if is_begun else None
    state = loader.state_dict()
    whole = everything(loader if iterator is None else iterator)
    resumed = DataLoader(dataset, batch_size=2)
    resumed.load_state_dict(state)
    assert everything(resumed) == whole == [[1, 2], [3, 4], [5]]


def test_a_state_between_epochs_fits_another_number_of_workers(caplog: pytest.LogCaptureFixture) -> None:
    """Then what the dataset has counted is lost, and the log says so."""
    loader = maker(Counting, 0)()
    first = everything(loader)
    resumed = maker(Counting, 2)()
    resumed.load_state_dict(loader.state_dict())
    assert [keys for keys, _, _ in everything(resumed)] == [keys for keys, _, _ in first]
    assert "the dataset begins anew" in caplog.text


# ----------------------------------------------------------------------------------------------------------- samplers


@pytest.mark.parametrize(
    ("num_workers", "backend"), [(0, "process"), (2, "thread"), pytest.param(2, "process", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "options",
    [
        {"sampler": Epochs},
        {"sampler": Epochs, "batch_size": 5},
        {"sampler": StaysAtItsEnd},
        {"sampler": Epochs, "drop_last": True},
        {"sampler": Epochs, "batch_size": None},
        {"batch_sampler": lambda: InThrees(Epochs()), "batch_size": 1},
    ],
)
def test_epochs_that_a_sampler_counts(options: dict[str, Any], num_workers: int, backend: str) -> None:
    """Go on after the end of an epoch, and after an epoch that was resumed."""
    assert_resumable(maker(lambda: range(LENGTH), num_workers, worker_backend=backend, **options))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_samplers_are_iterated_over_as_often_as_without_a_state(num_workers: int) -> None:
    """What they do when they are is not done once more at a resume."""

    class Counted(Sampler[list[int]]):
        begun = 0

        def __iter__(self) -> Iterator[list[int]]:
            self.begun += 1
            return iter([[number] for number in range(8)])

    fresh, again = Counted(), Counted()
    loader = DataLoader(range(8), batch_sampler=fresh, num_workers=num_workers)  # type: ignore[arg-type]
    next(iter(loader))
    resumed = DataLoader(range(8), batch_sampler=again, num_workers=num_workers)  # type: ignore[arg-type]
    resumed.load_state_dict(loader.state_dict())
    assert len(list(resumed)) == 7
    assert again.begun == fresh.begun


@pytest.mark.processes
@pytest.mark.forked("events of multiprocessing are not sent")
def test_out_of_order_with_a_sampler_that_has_a_state() -> None:
    """Batches that came early are not made again."""

    class Slow(Dataset[int]):
        def __init__(self) -> None:
            self.gate = torch.multiprocessing.get_context("fork").Event()

        def __len__(self) -> int:
            return LENGTH

        def __getitem__(self, index: int) -> int:
            if index == 0:
                self.gate.wait(30)
            return index

    def make() -> DataLoader[Any]:
        return DataLoader(Slow(), 2, sampler=ElasticSampler(LENGTH, 1, 0, shuffle=False), num_workers=2, in_order=False)

    loader = make()
    iterator = iter(loader)
    found = [index for _ in range(3) for index in next(iterator).tolist()]
    state = loader.state_dict()
    iterator.close()
    assert 0 not in found
    assert state["ahead"]
    resumed = make()
    resumed.dataset.gate.set()
    resumed.load_state_dict(state)
    found += [index for batch in resumed for index in batch.tolist()]
    assert sorted(found) == list(range(LENGTH))


class OneIsLate(Dataset[Any]):
    """Samples that draw a number of their own; one waits at a gate."""

    def __init__(self, late: int) -> None:
        self.late, self.gate = late, threading.Event()

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[int, float]:
        if index == self.late:
            self.gate.wait(30)
        return index, float(sample_rng().random())


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    "order",
    [
        lambda: {"batch_size": 2, "sampler": ElasticSampler(LENGTH, 1, 0, shuffle=False)},
        lambda: {"batch_size": 2, "sampler": Epochs()},
        lambda: {"batch_sampler": [[0], [1, 2, 3], [4], [5, 6], *([each] for each in range(7, LENGTH))]},
    ],
    ids=["elastic", "with a state", "unequal"],
)
def test_samples_draw_the_same_numbers_after_batches_that_came_early(
    order: Callable[[], dict[str, Any]], num_workers: int
) -> None:
    """A state knows how many samples came before it also where its run has not read the batches again that are done."""

    first_key, *_ = BatchSampler(order().get("sampler", [0]), 1, False)

    def make(**options: Any) -> DataLoader[Any]:
        torch.manual_seed(3)
        return DataLoader(OneIsLate(first_key[0]), seeding="sample", worker_backend="thread", **order(), **options)

    def samples(batches: Any) -> list[tuple[int, float]]:
        return [pair for indices, values in batches for pair in zip(indices.tolist(), values.tolist(), strict=True)]

    whole = make()
    whole.dataset.gate.set()
    expected = sorted(samples(whole))
    first = make(num_workers=2, in_order=False)
    iterator = iter(first)
    given = [next(iterator) for _ in range(4)]
    state = first.state_dict()
    first.dataset.gate.set()
    iterator.close()
    assert state["ahead"]
    second = make(num_workers=num_workers)
    second.dataset.gate.set()
    second.load_state_dict(state)
    for batch in second:
        given.append(batch)
        third = make()
        third.dataset.gate.set()
        third.load_state_dict(json.loads(json.dumps(second.state_dict())))
        assert sorted(samples([*given, *third])) == expected


def test_a_sampler_with_a_state_is_read_no_further_than_torch_reads_it() -> None:
    """Others save its state less torch's window: so it is exactly that far ahead, however slow the trainer is."""
    sampler = Epochs(400)
    iterator = iter(DataLoader(range(400), sampler=sampler, num_workers=2, prefetch_factor=3))  # type: ignore[arg-type]
    for yielded in range(1, 300):
        next(iterator)
        assert sampler.at == yielded + 6


# --------------------------------------------------------------------------------------------------------------- costs


class Costly:
    """What takes its time to provide a state, and counts how often it has."""

    asked = 0

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        until = perf_counter() + 0.01
        while perf_counter() < until:
            pass
        return {"asked": self.asked}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class CostlySampler(Costly, Epochs):
    """A sampler that does."""


class CostlyDataset(Costly, Dataset[int]):
    """A dataset that does; its samples are how often it has."""

    def __len__(self) -> int:
        return 300

    def __getitem__(self, index: int) -> int:
        return self.asked


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_costly_state_is_taken_seldom(num_workers: int) -> None:
    """Of 300 batches that take a moment; what comes between is drawn or made again."""
    sampler = CostlySampler(300)
    began = perf_counter()
    asked = everything(DataLoader(CostlyDataset(), sampler=sampler, num_workers=num_workers))[-1][0]
    allowed = 3 + (perf_counter() - began) / 0.5
    assert 1 <= sampler.asked <= allowed
    assert 1 <= asked <= allowed


@pytest.mark.parametrize("every", [0, None])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_state_that_is_never_to_be_taken_is_not(every: int | None, num_workers: int) -> None:
    """No state of the dataset is taken; the batches are resumed all the same."""
    options = {"num_workers": num_workers, "snapshot_every_n_steps": every}
    loader = DataLoader(CostlyDataset(), **options)
    iterator = iter(loader)
    assert next(iterator).tolist() == [0]
    resumed = DataLoader(CostlyDataset(), **options)
    resumed.load_state_dict(loader.state_dict())
    assert everything(resumed) == [[0]] * 299
    iterator.close()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_state_that_cannot_be_taken_costs_no_batch(num_workers: int, caplog: pytest.LogCaptureFixture) -> None:
    """Who never asks for states does not hear of it; who asks is told, once."""

    class Stuck(Counting):
        def state_dict(self) -> dict[str, Any]:
            return {"lock": threading.Lock()}

    loader = maker(Stuck, num_workers, sampler=StuckSampler)()
    caplog.set_level(logging.WARNING, "asyncloader")
    whole = everything(loader)
    assert len(whole) == 7
    caplog.clear()
    iterator = iter(loader)
    next(iterator)
    states = [loader.state_dict() for _ in range(2)]
    iterator.close()
    assert caplog.text.count("The state of the dataset could not be taken (TypeError: cannot pickle") == 1
    resumed = maker(Stuck, num_workers, sampler=StuckSampler)()
    resumed.load_state_dict(states[1])
    assert [keys for keys, _, _ in everything(resumed)] == [keys for keys, _, _ in whole[1:]]


class StuckSampler(Epochs):
    """Its state cannot be copied."""

    def state_dict(self) -> dict[str, Any]:
        return {"lock": threading.Lock()}


# -------------------------------------------------------------------------------------------------------------- wholes


class Typed:
    """What has a state of many types, and keeps the one that is brought back."""

    STATE: ClassVar[dict[Any, Any]] = {"counter": Counter("abca"), 3: (1, 2.5, None), "list": [True, {"x": 1e300}]}
    loaded: Any = None

    def state_dict(self) -> dict[Any, Any]:
        return self.STATE

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        assert state == self.STATE
        assert [type(part) for part in state.values()] == [Counter, tuple, list]
        Typed.loaded = state


class TypedSampler(Typed, Epochs):
    """A sampler that does."""


class TypedDataset(Typed, Counting):
    """A dataset that does."""


@pytest.mark.parametrize("owner", ["sampler", "dataset"])
def test_states_come_back_with_their_types(owner: str) -> None:
    """A Counter, a tuple, a key that is a number: JSON would lose these."""
    make = maker(Counting, 0, sampler=TypedSampler) if owner == "sampler" else maker(TypedDataset, 0)
    loader = make()
    next(iter(loader))
    Typed.loaded = None
    resumed = make()
    resumed.load_state_dict(loader.state_dict())
    next(iter(resumed))
    assert Typed.loaded == Typed.STATE


class Named(NamedTuple):
    """A key of a class that no state can name."""

    name: str


class Table(Counting):
    """Has its rows under keys of one kind."""

    def __init__(self, keys: Sequence[Any]) -> None:
        super().__init__()
        self.rows = {key: number for number, key in enumerate(keys)}

    def __getitem__(self, key: Any) -> tuple[int, int, float]:
        return super().__getitem__(self.rows[key])


@pytest.mark.parametrize("seeding", ["batch", "sample"])
@pytest.mark.parametrize("batch_size", [2, None])
@pytest.mark.parametrize("kind", ["tuple", "tuple in a tuple", "number of numpy", "text", "bytes"])
def test_keys_come_back_from_json_as_they_were(kind: str, batch_size: int | None, seeding: Any) -> None:
    """A state has those of the batches since the dataset's last state: these are made again."""
    make_key: dict[str, Callable[[int], Any]] = {
        "tuple": lambda number: ("a", number),
        "tuple in a tuple": lambda number: (number, ("b", np.int32(number))),
        "number of numpy": np.int64,
        "text": str,
        "bytes": lambda number: b"%d" % number,
    }
    keys = [*map(make_key[kind], range(8))]

    def loader() -> DataLoader[Any]:
        return DataLoader(Table(keys), batch_size, sampler=keys, snapshot_every_n_steps=3, seeding=seeding)

    whole = [torch.as_tensor(numbers).tolist() for _, numbers, _ in loader()]
    begun = loader()
    samples = iter(begun)
    for position in range(1, len(whole)):
        next(samples)
        other = loader()
        other.load_state_dict(json.loads(json.dumps(begun.state_dict())))
        assert [torch.as_tensor(numbers).tolist() for _, numbers, _ in other] == whole[position:]


def test_keys_that_json_would_change_are_refused_by_it() -> None:
    """Those of a class of the user's, which is a kind of tuple: pickled, they come back."""
    keys = [Named(str(number)) for number in range(6)]
    loader = DataLoader(Table(keys), 1, sampler=keys, snapshot_every_n_steps=3)
    samples = iter(loader)
    next(samples)
    next(samples)
    with pytest.raises(TypeError, match="not JSON serializable"):
        json.dumps(loader.state_dict())
    other = DataLoader(Table(keys), 1, sampler=keys, snapshot_every_n_steps=3)
    other.load_state_dict(pickle.loads(pickle.dumps(loader.state_dict())))
    assert [count.item() for _, count, _ in other] == [3, 4, 5, 6]


def test_states_are_whole_in_any_thread_and_inside_the_sampler() -> None:
    """A position is never told without the state of the sampler that belongs to it."""
    states: list[dict[str, Any]] = []

    class Asking(Epochs):
        def __iter__(self) -> Iterator[int]:
            for index in super().__iter__():
                states.append(loader.state_dict())  # as a handler of a signal would, in the middle of it
                yield index

    loader = DataLoader(range(300), batch_size=2, sampler=Asking(300), num_workers=1)  # type: ignore[arg-type]
    iterator = iter(loader)
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            states.append(loader.state_dict())

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        for _ in range(100):
            next(iterator)
    finally:
        over.set()
        asking.join()
        iterator.close()
    assert len(states) > 200
    for state in states:
        if state["epoch"] == 0 and state["base_seed"] is not None:
            assert json.loads(state["samplers"])["sampler"]["at"] == 2 * (state["position"] - state["drawn"])


def test_a_state_is_of_one_moment() -> None:
    """Another consumer, in a thread of its own, has its batch at each of the moments while a state is made."""
    positions = set()
    for moment in itertools.count():
        loader: DataLoader[int] = DataLoader(range(20), batch_size=2, seeding="sample")  # type: ignore[arg-type]
        iterator: Any = iter(loader)
        for _ in range(3):
            next(iterator)
        looks, latest, here = itertools.count(), inside.runs(loader).run(), threading.current_thread()
        assert latest is not None

        class Looked(Progress):
            def __getattribute__(self, name: str, moment: int = moment, looks: Any = looks, here: Any = here) -> Any:
                if name == "now" and threading.current_thread() is here and next(looks) == moment:
                    other = threading.Thread(target=next, args=(iterator,))  # noqa: B023 - it is joined at once
                    other.start()
                    other.join()
                return super().__getattribute__(name)

        latest.progress.__class__ = Looked
        state = loader.state_dict()
        assert state["position"] == state["drawn"]
        assert state["sample"] == 2 * state["position"]
        positions.add(state["position"])
        if next(looks) <= moment:  # a state is made with fewer looks
            break
    assert positions == {3, 4}
