"""`scheduling="split"`: batches that several workers make are those that one worker would make, whatever happens."""

from __future__ import annotations

import random
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from torch.utils.data import Dataset

from asyncloader import BatchTimeoutError, ConfigurationError, DataLoader, WorkerDiedError
from asyncloader.engine import slices as slicing
from asyncloader.engine.actions import Ticket
from asyncloader.transport.batch_slabs import BatchSlabs
from tests import inside
from tests.faults.datasets import DEATHS, Augmented, Deadly, plain
from tests.patience import wait_until
from tests.sameness import same

OPTIONS: dict[str, Any] = {"scheduling": "split", "seeding": "sample"}
pytestmark = [pytest.mark.on_threads, pytest.mark.filterwarnings("ignore:This DataLoader will create")]
Point = namedtuple("Point", ["x", "label"])


@pytest.fixture(autouse=True)
def cheap_samples_are_divided_too(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Otherwise only samples that take long are, and tests would."""
    monkeypatch.setattr(slicing, "_LEAST_SLICE_S", 0.0001)


def epoch(dataset: Any, batch_size: int = 8, **options: Any) -> list[Any]:
    """Return the batches of one epoch."""
    torch.manual_seed(0)
    loader = DataLoader(dataset, batch_size, **{"num_workers": 2, **OPTIONS, **options})
    try:
        return list(loader)
    finally:
        loader.close()


def divided(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets, for each batch that is sent, into how many slices it is divided."""
    found: list[int] = []
    cut = slicing.Slices.cut

    def note(self: slicing.Slices, ticket: Ticket, num_workers: int) -> Ticket:
        is_first = ticket.bounds is None
        if is_first:
            found.append(0)
        found[-1] += 1
        return cut(self, ticket, num_workers)

    monkeypatch.setattr(slicing.Slices, "cut", note)
    return found


class Slow(Augmented):
    """Samples that take their time, so that batches of them are divided."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.001)
        return super().__getitem__(index)


class Shapes(Dataset[Any]):
    """One sample of each kind that torch's default collation knows."""

    kinds: tuple[Any, ...] = (
        lambda i: torch.full((300, 300), float(i)),
        lambda i: torch.arange(4) + i,
        lambda i: torch.tensor(i),
        lambda i: torch.full((3, 4), i, dtype=torch.bfloat16),
        lambda i: torch.full((2, 3, 32, 32), float(i)).to(memory_format=torch.channels_last),
        lambda i: torch.zeros(0, 3),
        lambda i: np.full((300, 300), i, np.uint8),
        lambda i: np.asfortranarray(np.full((2, 3), i, np.float32)),
        lambda i: np.float32(i),
        lambda i: np.array(i),
        lambda i: i,
        lambda i: i / 3,
        lambda i: i % 2 == 0,
        lambda i: f"sample {i}",
        lambda i: bytes([i]),
        lambda i: (i, torch.tensor(i), "text"),
        lambda i: [i, np.array([i])],
        lambda i: {"image": torch.full((200, 200), i), "label": i, "box": [float(i), 2.0]},
        lambda i: Point(torch.full((100, 200), float(i)), i),
        lambda i: {"nested": {"point": Point((i, {"deep": np.zeros(3)}), [i])}},
    )

    def __init__(self, kind: int) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 21

    def __getitem__(self, index: int) -> Any:
        return self.kinds[self.kind](index)


@pytest.mark.parametrize("backend", ["process", "thread"])
def test_every_collatable_type_is_as_torch_collates_it(backend: Any) -> None:
    """Values, types, dtypes and shapes; also of a last batch that is short."""
    for kind in range(len(Shapes.kinds)):
        ours = epoch(Shapes(kind), num_workers=2, worker_backend=backend)
        theirs = list(torch.utils.data.DataLoader(Shapes(kind), 8))
        assert len(ours) == len(theirs) == 3
        for one, other in zip(ours, theirs, strict=True):
            assert same(one, other), f"kind {kind}: {one!r} is not {other!r}"


@pytest.mark.covering(1)
@pytest.mark.parametrize("backend", ["process", "thread"])
@pytest.mark.parametrize("on_error", ["raise", "skip", "replace"])
def test_batches_are_bit_identical_to_static_ones(on_error: Any, backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With any number of workers, though batches were divided; where samples draw from the global generators too."""
    if backend == "thread":  # which leave the global generators alone
        dataset: Any = Shapes(17)
    else:
        dataset = Slow(40)
    static = epoch(dataset, scheduling="static", on_error=on_error, worker_backend=backend)
    slices = divided(monkeypatch)
    for num_workers in (2, 3):
        split = epoch(dataset, num_workers=num_workers, on_error=on_error, worker_backend=backend)
        assert same(split, static)
    assert max(slices) > 2


class Drawing:
    """A collate_fn that draws, keeps samples, and changes one."""

    kept: list[Any] = []  # noqa: RUF012

    def __call__(self, samples: list[Any]) -> Any:
        self.kept.append(samples[0])
        samples[1].add_(1)
        return samples, torch.stack(samples), random.random(), torch.rand(2)


class Images(Dataset[torch.Tensor]):
    """Samples that travel through shared memory."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((200, 200), float(index))


@pytest.mark.processes
def test_a_collate_fn_of_the_users_gets_all_samples_in_one_worker() -> None:
    """They are its own: it may keep and change them, and draws what it would draw of a whole batch."""
    assert same(
        epoch(Images(), collate_fn=Drawing(), num_workers=2),
        epoch(Images(), collate_fn=Drawing(), scheduling="static"),
    )


class Together(Augmented):
    """Samples that are fetched by one call, and seed themselves."""

    seeds_samples = True

    def __getitems__(self, indices: list[int]) -> list[Any]:
        from asyncloader import sample_seed

        samples = []
        for position, index in enumerate(indices):
            with sample_seed(position):
                samples.append(self[index])
        return samples


class Whole(Dataset[Any]):
    """A dataset that makes batches itself."""

    collated = True

    def __len__(self) -> int:
        return 24

    def __getitems__(self, indices: list[int]) -> Any:
        return torch.tensor(indices), torch.rand(len(indices))


@pytest.mark.processes  # what makes whole batches on threads draws from generators that all of them share
@pytest.mark.parametrize("dataset", [Together(24), Whole()], ids=["by one call", "whole batches"])
def test_batches_that_are_fetched_by_one_call(dataset: Any) -> None:
    """Slices are where samples seed themselves; whole batches stay whole."""
    assert same(epoch(dataset), epoch(dataset, scheduling="static"))


class Chosen(Together):
    """One call that returns as many samples as it likes: without some, two of each, or a batch of its own."""

    def __init__(self, choose: Callable[[list[Any]], Any]) -> None:
        super().__init__(24)
        self.choose = choose

    def __getitems__(self, indices: list[int]) -> Any:
        return self.choose(super().__getitems__(indices))


CHOICES: dict[str, Callable[[list[Any]], Any]] = {
    "without some": lambda samples: [sample for sample in samples if sample[1] > 0.3],
    "without the first": lambda samples: samples[1:],
    "two of each": lambda samples: [sample for sample in samples for _ in range(2)],
    "a batch": lambda samples: (torch.stack([sample[3] for sample in samples]), len(samples)),
    "a tuple": tuple,
}


@pytest.mark.parametrize("choice", CHOICES)
def test_samples_of_which_nobody_can_say_which_is_which(choice: str) -> None:
    """A batch whose `__getitems__` does not return a sample for each key is made as a whole."""
    options: dict[str, Any] = {"collate_fn": plain} if choice == "a batch" else {}
    dataset = Chosen(CHOICES[choice])
    assert same(epoch(dataset, **options), epoch(dataset, scheduling="static", **options))


# --------------------------------------------------------------------------------------------------------- bad samples


class Flawed(Dataset[int]):
    """Some samples raise."""

    def __init__(self, *bad: int) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> int:
        if index in self.bad:
            raise ValueError(f"sample {index} is bad")
        return index


def taken(dataset: Any, **options: Any) -> tuple[list[Any], Any]:
    """Return batches, and in the place of one what it raised with its notes; and the statistics."""
    loader = DataLoader(dataset, 8, **{"num_workers": 2, **OPTIONS, **options})
    iterator, found = iter(loader), []
    while True:
        try:
            found.append(plain(next(iterator)))
        except StopIteration:
            return found, loader.stats()
        except Exception as error:
            notes = [note for note in error.__notes__ if "Caught" not in note]  # who made it is another one
            found.append((type(error), error.args, notes))


@pytest.mark.covering(2)
@pytest.mark.parametrize("backend", ["process", "thread"])
@pytest.mark.parametrize("on_error", ["raise", "skip", "replace"])
@pytest.mark.parametrize("bad", [(1,), (3, 12, 9), tuple(range(8, 16)), tuple(range(24))])
def test_bad_samples_fare_as_in_whole_batches(bad: tuple[int, ...], on_error: Any, backend: Any) -> None:
    """The same batches, errors with the same notes, and samples in the statistics."""
    split, stats = taken(Flawed(*bad), on_error=on_error, worker_backend=backend)
    static, expected = taken(Flawed(*bad), on_error=on_error, worker_backend=backend, scheduling="static")
    assert split == static
    assert (stats.bad_count, stats.bad_samples) == (expected.bad_count, expected.bad_samples)
    assert sorted(stats.left_out) == sorted(expected.left_out)
    assert stats.errors == expected.errors


def test_the_limit_of_bad_samples_is_exceeded_at_the_same_batch() -> None:
    """They are counted in the order of the batches."""
    options = {"on_error": "skip", "max_errors": 2}
    assert taken(Flawed(1, 9, 10, 20), **options)[0] == taken(Flawed(1, 9, 10, 20), scheduling="static", **options)[0]


def refuse(samples: list[Any]) -> Any:
    raise KeyError("collate")


def test_what_collating_raises_stands_for_its_batch() -> None:
    """As in whole batches."""
    options = {"collate_fn": refuse}
    assert taken(Flawed(), **options)[0] == taken(Flawed(), scheduling="static", **options)[0]


# ------------------------------------------------------------------------------------------- samples that cannot travel


class Unpicklable(Dataset[Any]):
    """Samples that no other process can have."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return (number for number in [index])


class Torn:
    """Pickles, and does not come out."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return _refuse_to_come_out, ()


def _refuse_to_come_out() -> None:
    raise RuntimeError("not here")


class TornApart(Unpicklable):
    def __getitem__(self, index: int) -> Any:
        return Torn(index)


def numbers_of(samples: list[Any]) -> list[int]:
    return [sample.number if isinstance(sample, Torn) else next(sample) for sample in samples]


@pytest.mark.parametrize("dataset", [Unpicklable(), TornApart()], ids=["do not go in", "do not come out"])
def test_samples_that_cannot_be_sent_are_collated_where_they_are_made(dataset: Any) -> None:
    """One worker makes such batches, from the first on."""
    assert epoch(dataset, collate_fn=numbers_of) == [list(range(i, i + 8)) for i in (0, 8, 16)]


# ------------------------------------------------------------------------------------------------- deaths and hangs


@pytest.mark.processes
@pytest.mark.parametrize("death", ["SIGKILL", "sys.exit"])
def test_an_epoch_with_a_death_in_every_slice_is_bit_identical(death: str, tmp_path: Path) -> None:
    """Each sample of the first batch ends its worker once; its slice is made again."""
    dataset = Deadly(16, tmp_path, death, tuple(range(6)))
    assert same(epoch(dataset, 6, num_workers=3, max_retries=6), epoch(Augmented(16), 6, scheduling="static"))
    assert len(list(tmp_path.iterdir())) == 6
    assert death in DEATHS


@pytest.mark.processes
def test_a_slice_that_always_kills_costs_its_batch(tmp_path: Path) -> None:
    """The error names the whole batch, and the next ones follow."""
    loader = DataLoader(Deadly(24, tmp_path, "SIGKILL", (11,), times=100), 8, num_workers=2, max_retries=1, **OPTIONS)
    iterator = iter(loader)
    assert len(next(iterator)[0]) == 8
    with pytest.raises(WorkerDiedError) as caught:
        next(iterator)
    assert caught.value.keys[0] == list(range(8, 16))
    assert next(iterator)[0].tolist() == list(range(16, 24))
    loader.close()


@pytest.mark.processes
def test_a_batch_whose_slice_is_left_out_is_left_out(tmp_path: Path) -> None:
    """With `on_crash="skip"`, and it counts once."""
    dataset = Deadly(24, tmp_path, "SIGKILL", (9, 14), times=100)
    loader = DataLoader(dataset, 8, num_workers=2, on_crash="skip", **OPTIONS)
    assert [batch[0].tolist() for batch in loader] == [list(range(8)), list(range(16, 24))]
    assert loader.stats().left_out == (list(range(8, 16)),)


class HangsOnce(Augmented):
    """One sample hangs the first time."""

    def __init__(self, folder: Path, at: int) -> None:
        super().__init__(16)
        self.folder, self.at = folder, at

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        if index == self.at and not (self.folder / "hung").exists():
            (self.folder / "hung").touch()
            while not (self.folder / "go").exists():
                time.sleep(0.01)
        return sample


@pytest.mark.processes
def test_a_slice_that_hangs_is_made_again(tmp_path: Path) -> None:
    """With `on_timeout="retry"`."""
    dataset = HangsOnce(tmp_path, 5)
    found = epoch(dataset, on_timeout="retry", timeout=1)
    assert same(found, epoch(Augmented(16), scheduling="static"))


def test_a_timeout_names_the_slice_that_is_late(tmp_path: Path) -> None:
    """And the others of its batch are kept: the next call waits for it."""
    loader = DataLoader(HangsOnce(tmp_path, 5), 8, num_workers=2, timeout=0.5, **OPTIONS)
    iterator = iter(loader)
    wait_until((tmp_path / "hung").exists)
    with pytest.raises(BatchTimeoutError, match=r"\[5\]"):
        next(iterator)
    (tmp_path / "go").touch()
    assert [batch[0].tolist() for batch in iterator] == [list(range(8)), list(range(8, 16))]


# ------------------------------------------------------------------------------------------------------------- the rest


@pytest.mark.processes
def test_persistent_workers_and_an_epoch_that_was_left() -> None:
    """What is still made of the last run does not come into the next one."""
    torch.manual_seed(0)
    loader = DataLoader(Slow(32), 8, num_workers=2, persistent_workers=True, **OPTIONS)
    for _ in loader:
        break
    second = list(loader)
    loader.close()
    torch.manual_seed(0)
    static = DataLoader(Slow(32), 8, num_workers=2, persistent_workers=True, seeding="sample")
    for _ in static:
        break
    assert same(second, list(static))
    static.close()


@pytest.mark.processes
def test_a_run_is_resumed_in_its_middle() -> None:
    """From a state after each batch; with another number of workers."""

    def loader(num_workers: int) -> DataLoader[Any]:
        torch.manual_seed(0)
        return DataLoader(Slow(28), 8, shuffle=True, num_workers=num_workers, **OPTIONS)

    first, states, batches = loader(2), [], []
    for batch in first:
        batches.append(batch)
        states.append(first.state_dict())
    for done, state in enumerate(states[:-1], 1):
        other = loader(3)
        other.load_state_dict(state)
        assert same(list(other), batches[done:])


@pytest.mark.processes
def test_workers_come_and_go_in_the_middle_of_a_batch() -> None:
    """The number of workers changes nothing else."""
    torch.manual_seed(0)
    loader = DataLoader(Slow(80), 8, num_workers=2, **OPTIONS)
    found = []
    for step, batch in enumerate(loader):
        found.append(batch)
        loader.set_num_workers((1, 3, 2)[step % 3])
    assert same(found, epoch(Slow(80), scheduling="static"))


class Cheap(Dataset[Any]):
    """Samples that cost nothing, and are rows."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> Any:
        return torch.full((500,), float(index)), str(index)


@pytest.mark.parametrize("num_workers", [2, 4])
def test_cheap_samples_are_not_divided_once_that_is_known(num_workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first batch is divided, and no later one."""
    monkeypatch.setattr(slicing, "_LEAST_SLICE_S", 60.0)  # whatever else the machine does
    static = epoch(Cheap(), batch_size=32, scheduling="static")
    slices = divided(monkeypatch)
    loader = DataLoader(Cheap(), 32, num_workers=num_workers, **OPTIONS)
    assert same(list(loader), static)
    assert slices[0] > 1
    assert set(slices[1:]) == {1}
    stats = loader.stats()
    assert (stats.batches, stats.samples) == (8, 256)
    assert sum(worker.batches for worker in stats.workers) == sum(slices)


def test_out_of_order_batches_are_whole() -> None:
    """With `in_order=False` each comes when it is there."""
    found = [plain(batch[0]) for batch in epoch(Slow(40), in_order=False)]
    assert sorted(found) == [list(range(i, i + 8)) for i in range(0, 40, 8)]


@pytest.mark.processes
async def test_async_for_gives_whole_batches() -> None:
    """The other face."""
    torch.manual_seed(0)
    found = [batch async for batch in DataLoader(Slow(24), 8, num_workers=2, **OPTIONS)]
    assert same(found, epoch(Slow(24), scheduling="static"))


class Batches:
    """A batch sampler of the user's, with batches of all sizes, lists and tuples."""

    def __init__(self, *empty: Any) -> None:
        self.batches = [[0, 1, 2, 3, 4], (5, 6, 7), *empty, [8], list(range(9, 24))]

    def __iter__(self) -> Iterator[Any]:
        yield from self.batches

    def __len__(self) -> int:
        return len(self.batches)


@pytest.mark.processes
@pytest.mark.parametrize("collate_fn", [None, list])
def test_batch_samplers_of_the_users(collate_fn: Any) -> None:
    """Batches of any size are divided as far as that goes; empty ones are for a `collate_fn` of the user's."""

    def run(scheduling: Any) -> list[Any]:
        torch.manual_seed(0)
        batches = Batches(*[[]] * (collate_fn is list))
        options = {"scheduling": scheduling, "seeding": "sample", "collate_fn": collate_fn}
        return list(DataLoader(Slow(24), batch_sampler=batches, num_workers=3, **options))

    assert same(run("split"), run("static"))


def test_statistics_count_batches_and_the_work_of_all_who_made_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch in slices is one batch, its work that of all its slices."""
    slices = divided(monkeypatch)
    loader = DataLoader(Slow(32), 8, num_workers=2, **OPTIONS)
    count = len(list(loader))
    stats = loader.stats()
    assert max(slices) > 2
    assert (stats.batches, stats.samples, stats.work.count) == (count, 32, count)
    assert stats.work.mean_s > 8 * 0.001
    assert sum(worker.busy_s for worker in stats.workers) == pytest.approx(stats.work.total_s)


@pytest.mark.processes
def test_the_option_alone_implies_its_seeding() -> None:
    """The batches are those of static scheduling with it."""
    assert inside.options(DataLoader(Slow(8), scheduling="split")).seeding == "sample"
    assert inside.options(DataLoader(Slow(8))).seeding == "batch"
    torch.manual_seed(0)
    found = list(DataLoader(Slow(24), 8, num_workers=2, scheduling="split"))
    assert same(found, epoch(Slow(24), scheduling="static"))


class Unlike(Dataset[Any]):
    """Samples that agree with each other, but for one of each batch: the last in its middle."""

    def __init__(self, *, only_once: bool) -> None:
        self.only_once = only_once

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> Any:
        is_odd = index == 5 if self.only_once else index % 8 == 5
        return {"number": index / 2 if is_odd else index, "image": torch.full((200, 200), float(index))}


@pytest.mark.parametrize("only_once", [True, False])
def test_slices_that_differ_are_made_again_whole(only_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch collates all samples at once; and where that happens often nothing is divided any more."""
    slices = divided(monkeypatch)
    loader = DataLoader(Unlike(only_once=only_once), 8, num_workers=2, **OPTIONS)
    iterator = iter(loader)
    scheduler = inside.session(iterator).run.scheduler
    wait_until(lambda: scheduler.roster.num_takers == 2)  # one worker alone gets batches whole
    assert same(list(iterator), epoch(Unlike(only_once=only_once), scheduling="static"))
    assert loader.stats().samples == 96
    assert (slices[-1] > 1) is only_once


@pytest.mark.processes
def test_later_batches_are_made_where_they_belong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large tensors are not copied again once a batch has shown what they are like."""
    in_place: list[bool] = []
    whole = BatchSlabs.whole

    def note(self: BatchSlabs, parts: Any) -> Any:
        found = whole(self, parts)
        in_place.append(found is not None)
        return found

    monkeypatch.setattr(BatchSlabs, "whole", note)
    loader = DataLoader(Images(), 4, num_workers=2, **OPTIONS)
    assert same(list(loader), epoch(Images(), batch_size=4, scheduling="static"))
    assert len(in_place) >= 2
    assert all(in_place)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"seeding": "batch"}, 'needs seeding="sample"'),
        ({"seeding": "worker"}, 'needs seeding="sample"'),
        ({"batch_size": None}, "batch_size=None"),
        ({"concurrency": 4}, "concurrency"),
    ],
)
def test_what_cannot_be_divided_is_refused_at_construction(options: dict[str, Any], why: str) -> None:
    """With what would do."""
    with pytest.raises(ConfigurationError, match=why):
        DataLoader(Slow(8), **{**OPTIONS, **options})


class Counting(Augmented):
    """A dataset with a state of its own."""

    def state_dict(self) -> dict[str, int]:
        return {"count": 0}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def test_a_dataset_with_a_state_in_each_worker_is_refused() -> None:
    """Unless its state is not to be kept."""
    with pytest.raises(ConfigurationError, match="snapshot_every_n_steps=0"):
        DataLoader(Counting(8), **OPTIONS)
    assert len(epoch(Counting(8), snapshot_every_n_steps=0)) == 1


def test_streams_stay_static() -> None:
    """And need no other seeding for it."""

    class Stream(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(6))

    assert [plain(batch) for batch in DataLoader(Stream(), 3, num_workers=1, scheduling="split")] == [
        [0, 1, 2],
        [3, 4, 5],
    ]


@pytest.mark.processes
def test_without_workers_there_is_nobody_to_share_with() -> None:
    """The option does no harm."""
    assert same(epoch(Slow(16), num_workers=0), epoch(Slow(16), scheduling="static"))
