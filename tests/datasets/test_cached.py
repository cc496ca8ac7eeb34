"""CachedDataset: each sample is made once, by whichever process; what is kept is right, whoever is killed."""

from __future__ import annotations

import asyncio
import os
import pickle
import random
import shutil
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset

from asyncloader import ConfigurationError, DataLoader, sample_rng, sample_seed
from asyncloader.datasets import CachedDataset
from tests.support.nursery import Program

COUNT = 40


class Noted(Dataset[Any]):
    """Writes a line for each sample that is made; a sample is some arrays."""

    def __init__(self, log: Path, count: int = COUNT, factor: int = 1) -> None:
        self.log = log
        self.count = count
        self.factor = factor

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        with open(self.log, "a") as log:
            log.write(f"{index}\n")
        if not 0 <= index < self.count:
            raise IndexError(index)
        return sample(index, self.factor)


class Awaited(Noted):
    """The same, awaited."""

    is_open = False
    was_closed = threading.Event()

    async def __aenter__(self) -> None:
        assert not self.is_open
        self.is_open = True

    async def __aexit__(self, *_: object) -> None:
        self.is_open = False
        self.was_closed.set()

    async def __getitem__(self, index: int) -> dict[str, Any]:  # type: ignore[override]
        assert self.is_open
        await asyncio.sleep(0)
        return super().__getitem__(index)


class Batches(Noted):
    """Makes the samples of a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        with open(self.log, "a") as log:
            log.write(f"{indices}\n")
        return [sample(index) for index in indices]


class AwaitedBatches:
    """Has no samples but by the batch."""

    async def __getitems__(self, indices: list[int]) -> list[Any]:
        await asyncio.sleep(0)
        return [sample(index) for index in indices]

    def __len__(self) -> int:
        return COUNT


def sample(index: int, factor: int = 1) -> dict[str, Any]:
    return {
        "name": f"{index}" * 10,
        "array": np.full((index % 5 + 1, 3), index * factor, np.int32),
        "tensor": torch.full((7,), index / 2)[::2],
    }


def is_right(one: dict[str, Any], index: int, factor: int = 1) -> bool:
    there = sample(index, factor)
    return (
        one["name"] == there["name"]
        and bool((one["array"] == there["array"]).all())
        and one["array"].dtype == np.int32
        and torch.equal(one["tensor"], there["tensor"])
    )


class Made:
    """Makes a sample of any number, and never raises an IndexError."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index**2


def test_to_iterate_over_it_ends(tmp_path: Path) -> None:
    """After the last sample, whatever the dataset would say of further ones; and as often as somebody does."""
    cached = CachedDataset(Made(), tmp_path, fingerprint="v1")
    assert [*zip(cached, range(100), strict=False)] == [(0, 0), (1, 1), (4, 2), (9, 3)]
    assert list(cached) == [0, 1, 4, 9]


def first(samples: list[Any]) -> Any:
    return samples


@pytest.fixture
def where(tmp_path: Path) -> Path:
    """The folder of a cache, which is not there yet."""
    return tmp_path / "cache"


def kept(where: Path) -> list[Path]:
    """Return the files of samples."""
    return [path for path in where.rglob("*") if path.is_file() and not path.suffix]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Where datasets note what they make."""
    path = tmp_path / "log"
    path.touch()
    return path


def made(log: Path) -> list[str]:
    """Return what was made since the last time."""
    lines = log.read_text().splitlines()
    log.write_text("")
    return lines


# ---- samples ----


def test_each_sample_is_made_once(where: Path, log: Path) -> None:
    """And comes back as it was made; what a reader does to it is for that reader alone."""
    cached = CachedDataset(Noted(log), where, fingerprint="v1")
    for _ in range(3):
        for index in range(COUNT):
            one = cached[index]
            assert is_right(one, index)
            one["array"][:] = -1
            one["tensor"][:] = -1
            one["name"] = ""
    assert made(log) == [str(index) for index in range(COUNT)]
    assert len(cached) == COUNT
    assert len(kept(where)) == COUNT


def test_what_is_random_comes_after(where: Path, log: Path) -> None:
    """`transform` sees every sample every time, and what it does is not kept."""

    def once_more(one: dict[str, Any]) -> int:
        one["array"] += 1
        seen.append(int(one["array"][0, 0]))
        return len(seen)

    seen: list[int] = []
    cached = CachedDataset(Noted(log), where, fingerprint="v1", transform=once_more)
    assert [cached[3] for _ in range(3)] == [1, 2, 3]
    assert seen == [4, 4, 4]
    assert made(log) == ["3"]


def test_errors_are_the_datasets_own(where: Path, log: Path) -> None:
    """They are not kept."""
    cached = CachedDataset(Noted(log), where, fingerprint="v1")
    for _ in range(2):
        with pytest.raises(IndexError):
            cached[COUNT]
    assert made(log) == [str(COUNT)] * 2


SAMPLES = [
    None,
    0,
    "text",
    b"bytes" * 1000,
    [],
    torch.zeros(0),
    np.zeros((0, 3)),
    torch.ones(3, dtype=torch.bfloat16),
    np.array("x"),
    np.array([{}, None]),
    torch.arange(12).reshape(3, 4).T,
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    torch.ones(2, 2).to_sparse(),
    torch.ones(2, requires_grad=True),
    (torch.tensor(1), {"a": [np.float32(1.5)]}),
]


def test_whatever_can_be_pickled_comes_back(where: Path) -> None:
    """Whatever can be pickled."""

    class Sorts(Dataset[Any]):
        def __len__(self) -> int:
            return len(SAMPLES)

        def __getitem__(self, index: int) -> Any:
            return SAMPLES[index]

    cached = CachedDataset(Sorts(), where, fingerprint="sorts")
    for _ in range(2):
        for index, there in enumerate(SAMPLES):
            one = cached[index]
            assert type(one) is type(there)
            if isinstance(there, torch.Tensor):
                assert one.dtype == there.dtype
                assert one.shape == there.shape
                assert one.requires_grad == there.requires_grad
                assert torch.equal(one.to_dense(), there.to_dense())
            elif isinstance(there, np.ndarray):
                assert one.dtype == there.dtype
                assert one.shape == there.shape
                assert (one == there).all()
            else:
                assert one == there
    assert len(kept(where)) == len(SAMPLES)


def test_what_cannot_be_pickled_is_an_error(where: Path) -> None:
    """It is pickle's own; nothing would be gained by going on without a cache."""

    class Bad(Dataset[Any]):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> Any:
            return lambda: 1

    with pytest.raises((AttributeError, pickle.PicklingError)):
        CachedDataset(Bad(), where, fingerprint="bad")[0]


def test_keys_are_numbers_and_texts(where: Path) -> None:
    """What equals a number finds its sample; a text is no number, and no path. Other keys are an error."""
    asked: list[Any] = []

    class ByName(Dataset[Any]):
        def __getitem__(self, key: Any) -> Any:
            asked.append(key)
            return repr(key)

    cached = CachedDataset(ByName(), where, fingerprint="by name")
    keys = ["a", "b", "7", 7, -7, 1 << 70, "", "../a", "/", "\ud800"]
    for _ in range(2):
        assert [cached[key] for key in keys] == list(map(repr, keys))
    assert cached[np.int64(7)] == cached[torch.tensor(7)] == "7"
    assert asked == keys
    assert [*where.parent.iterdir()] == [where]
    for key in (slice(1, 2), 1.5, ("a", 1), b"a", None):
        with pytest.raises(TypeError):
            cached[key]
    assert asked == keys


class Collated(Dataset[Any]):
    """Its batches are batches."""

    collated = True

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return index, index * 2

    def __getitems__(self, indices: list[int]) -> Any:
        raise AssertionError("a batch is no list of samples")


def test_samples_of_a_dataset_that_collates(where: Path) -> None:
    """Are asked for one by one."""
    loader = DataLoader(CachedDataset(Collated(), where, fingerprint="v1"), 3)
    for _ in range(2):
        assert [[part.tolist() for part in batch] for batch in loader] == [
            [[0, 1, 2], [0, 2, 4]],
            [[3, 4, 5], [6, 8, 10]],
        ]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"fingerprint": 1}, "a text with all that decides"),
        ({"fingerprint": ""}, "a text with all that decides"),
        ({"dataset": iter}, "it is no map-style dataset"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], error: str, log: Path) -> None:
    """At construction, in words."""

    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(())

    options = {"folder": "cache", "fingerprint": "v1", **arguments}
    dataset = Stream() if options.pop("dataset", None) is iter else Noted(log)
    with pytest.raises(ConfigurationError, match=error):
        CachedDataset(dataset, **options)

    class AsyncStream:
        async def __aiter__(self) -> AsyncIterator[int]:
            yield 1

    with pytest.raises(ConfigurationError, match="it is no map-style dataset"):
        CachedDataset(AsyncStream(), "cache", fingerprint="v1")


# ---- workers ----


def test_workers_share_it(where: Path, log: Path, start_method: str) -> None:
    """What one has made none makes again, in the next epoch, whatever way they were started."""
    cached = CachedDataset(Noted(log), where, fingerprint="v1")
    how: Any = {"multiprocessing_context": start_method, "persistent_workers": True}
    loader = DataLoader(cached, batch_size=4, num_workers=2, collate_fn=first, **how)
    for _ in range(2):
        samples = [one for batch in loader for one in batch]
        assert all(map(is_right, samples, range(COUNT)))
    loader.close()
    assert sorted(map(int, made(log))) == list(range(COUNT))
    assert is_right(cached[3], 3)
    assert not made(log)
    assert len(pickle.dumps(cached)) < 1000


@pytest.mark.parametrize("num_workers", [0, 1])
def test_of_an_async_dataset_only_what_is_missing_is_awaited(where: Path, log: Path, num_workers: int) -> None:
    """Only what is missing is awaited; what the dataset opens is opened and closed."""
    dataset = Awaited(log)
    dataset.was_closed.clear()
    cached = CachedDataset(dataset, where, fingerprint="v1", transform=lambda one: one["name"])
    some = DataLoader(Subset(cached, [1, 3, 5]), batch_size=2, num_workers=num_workers)
    assert [name for batch in some for name in batch] == ["1" * 10, "3" * 10, "5" * 10]
    loader = DataLoader(cached, batch_size=8, num_workers=num_workers, concurrency=4)
    for _ in range(2):
        assert [name for batch in loader for name in batch] == [f"{index}" * 10 for index in range(COUNT)]
    assert sorted(map(int, made(log))) == list(range(COUNT))
    some.close()
    loader.close()
    assert num_workers or dataset.was_closed.wait(10)


class Draws:
    """Numbers, awaited."""

    def __init__(self, bad: int = -1) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 12

    async def __getitem__(self, index: int) -> int:
        return index

    def transformed(self, index: int) -> tuple[int, float]:
        if index == self.bad:
            raise KeyError(index)
        return index, sample_rng().random()


class Drawn(Draws):
    """The same, without a cache."""

    async def __getitem__(self, index: int) -> Any:  # type: ignore[override]
        return self.transformed(await super().__getitem__(index))


def test_async_transforms_are_awaited(where: Path) -> None:
    """From the cache too."""

    async def double(sample: int) -> int:
        return 2 * sample

    for transform in (double, lambda sample: double(sample)):
        cached: Any = CachedDataset(Draws(), where, fingerprint="v1", transform=transform)
        for _ in range(2):
            assert [batch.tolist() for batch in DataLoader(cached, 6)] == [[*range(0, 12, 2)], [*range(12, 24, 2)]]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_dataset_that_awaits_batches_alone_is_cached(where: Path, num_workers: int) -> None:
    """A dataset that awaits batches, and knows nothing else."""
    cached = CachedDataset(AwaitedBatches(), where, fingerprint="v1")
    loader = DataLoader(cached, batch_size=8, num_workers=num_workers, collate_fn=first)
    for _ in range(2):
        assert all(map(is_right, [one for batch in loader for one in batch], range(COUNT)))
    assert is_right(asyncio.run(cached.getitem(3)), 3)
    assert len(kept(where)) == COUNT


async def test_datasets_that_turn_out_to_be_async(where: Path, log: Path) -> None:
    """A plain method may return what is to be awaited."""

    class Hidden(Noted):
        def __getitem__(self, index: int) -> Any:
            return asyncio.sleep(0, super().__getitem__(index))

    cached: Any = CachedDataset(Hidden(log), where, fingerprint="v1")
    assert is_right(await cached[3], 3)
    assert is_right(cached[3], 3)


async def test_where_opening_fails_what_was_opened_is_closed(where: Path, log: Path) -> None:
    """What was opened before is closed."""

    class Failing(Awaited):
        async def __aenter__(self) -> None:
            raise OSError("no")

    good = Awaited(log)
    cached: Any = CachedDataset(torch.utils.data.ConcatDataset([Failing(log), good]), where, fingerprint="v1")
    with pytest.raises(OSError, match="no"):
        await cached.__aenter__()
    assert not good.is_open


# ---- on disk ----


def test_it_stays_for_the_next_run(tmp_path: Path, log: Path) -> None:
    """The same fingerprint finds its samples; another one, or another length, does not."""
    folder = tmp_path / "cache"
    for _ in range(2):
        cached = CachedDataset(Noted(log), folder, fingerprint="v1")
        assert all(is_right(cached[index], index) for index in range(COUNT))
    assert len(made(log)) == COUNT
    assert is_right(CachedDataset(Noted(log, factor=2), folder, fingerprint="v2")[3], 3, 2)
    assert is_right(CachedDataset(Noted(log, count=COUNT + 1), folder, fingerprint="v1")[3], 3)
    assert made(log) == ["3", "3"]
    assert is_right(CachedDataset(Noted(log), folder, fingerprint="v1")[3], 3)
    assert not made(log)
    assert len(list(folder.iterdir())) == 3


class Epochs(Noted):
    """Is told epochs."""

    def set_epoch(self, epoch: int) -> None:
        self.factor = epoch


@pytest.mark.parametrize("wrapped", [False, True])
def test_samples_that_depend_on_the_epoch(where: Path, log: Path, wrapped: bool) -> None:
    """Are not kept: those of one epoch would come in all others, as no epoch reaches what is in the cache."""
    listener = Epochs(log)
    dataset: Any = Subset(listener, range(COUNT)) if wrapped else listener
    with pytest.raises(ConfigurationError, match="Epochs has set_epoch, so its samples may be others in each epoch"):
        CachedDataset(dataset, where, fingerprint="v1")
    cached = CachedDataset(dataset, where, fingerprint="v1", epoch_independent=True)
    loader = DataLoader(cached, 4, collate_fn=first)
    for epoch in (2, 3):
        loader.set_epoch(epoch)
        assert all(map(is_right, [one for batch in loader for one in batch], range(COUNT)))


class Around(Dataset[Any]):
    """Makes of what is kept what belongs to the epoch."""

    def __init__(self, kept: CachedDataset[Any]) -> None:
        self.kept = kept
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.kept)

    def __getitem__(self, index: int) -> int:
        return int(self.kept[index]["array"][0, 0]) * 100 + self.epoch


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_cache_below_what_depends_on_the_epoch(where: Path, log: Path, num_workers: int) -> None:
    """The way that the error names: each epoch has its own samples, and each is read once."""
    dataset = Around(CachedDataset(Noted(log), where, fingerprint="v1"))
    loader = DataLoader(dataset, 8, num_workers=num_workers, persistent_workers=num_workers > 0)
    for epoch in (1, 2):
        loader.set_epoch(epoch)
        assert [value for batch in loader for value in batch.tolist()] == [
            index * 100 + epoch for index in range(COUNT)
        ]
    loader.close()
    assert sorted(map(int, made(log))) == list(range(COUNT))


def test_the_dataset_of_a_cache_cannot_be_replaced(where: Path, log: Path) -> None:
    """Its samples would be those of the one before."""
    cached = CachedDataset(Noted(log), where, fingerprint="v1")
    with pytest.raises(AttributeError):
        cached.dataset = Noted(log, factor=2)  # type: ignore[misc]


def test_damage_is_noticed(where: Path, log: Path) -> None:
    """After a crash of the machine, a file may not be what was written: the sample is made anew."""
    cached = CachedDataset(Noted(log), where, fingerprint="v1")
    assert all(is_right(cached[index], index) for index in range(COUNT))
    made(log)
    (path,) = (path for path in kept(where) if b"7777777777" in path.read_bytes())
    content = path.read_bytes()
    for damaged in (content.replace(b"7777777777", b"7777777772"), content[:-9], bytes(len(content)), b"", b"x"):
        path.write_bytes(damaged)
        for _ in range(2):
            assert all(is_right(cached[index], index) for index in range(COUNT))
        assert made(log) == ["7"]
    assert path.read_bytes() == content


class Counted:
    """Unpickled, it needs as many values as its class has by then."""

    def __init__(self, *values: int) -> None:
        self.values = values

    def __reduce__(self) -> Any:
        return counted, self.values


def counted(*values: int) -> Counted:
    if len(values) != COUNTED[0]:
        raise TypeError(f"{COUNTED[0]} values are needed")
    return Counted(*values)


COUNTED = [1]


def test_samples_that_cannot_be_unpickled(where: Path) -> None:
    """The error is that of pickle, and names the file."""
    cached = CachedDataset([Counted(1)], where, fingerprint="counted")  # type: ignore[var-annotated]
    assert cached[0].values == cached[0].values == (1,)
    COUNTED[0] = 2
    try:
        with pytest.raises(TypeError, match="2 values") as caught:
            cached[0]
    finally:
        COUNTED[0] = 1
    (note,) = caught.value.__notes__
    assert note.startswith(f"It is the sample 0 of a cache, {where}")


FULL = """
    import logging, resource, sys
    from pathlib import Path
    import torch
    from asyncloader import DataLoader
    from asyncloader.datasets import CachedDataset

    class Sizes(torch.utils.data.Dataset):
        def __len__(self): return 64
        def __getitem__(self, index): return torch.full((10 if index < 32 else 1000,), float(index))

    logging.basicConfig(level="WARNING", format="%(message)s", stream=sys.stdout)
    cached = CachedDataset(Sizes(), sys.argv[1], fingerprint="v1")
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
    loader = DataLoader(cached, num_workers=1, persistent_workers=True)
    for epoch in range(3):
        assert [int(batch[0, 0]) for batch in loader] == list(range(64))
"""


def test_a_file_that_cannot_be_written_costs_no_sample(run: Callable[..., Program], where: Path) -> None:
    """Everything goes on without; what is there is whole."""
    done = run(FULL, where)
    assert done.returncode == 0, done.explain("")
    (warning,) = done.out.splitlines()
    assert warning.startswith("The cache of Sizes takes no more samples ([Errno 2")
    assert len(kept(where)) == len([path for path in where.rglob("*") if path.is_file()]) == 32


def test_a_disk_is_not_filled(where: Path, log: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """A tenth of it stays free."""
    cached = CachedDataset(Noted(log), where, fingerprint="v1")
    free = iter([11, 10, 9])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=100, free=next(free)))
    for _ in range(2):
        assert all(is_right(cached[index], index) for index in range(5))
    assert made(log) == ["0", "1", "2", "3", "4", "2", "3", "4"]
    (told,) = caplog.messages
    assert "takes no more samples ([Errno 28]" in told


# ---- killed, stopped, at once ----


def read_at_random(cached: Any, seed: int, *, for_ever: bool = False) -> None:
    draw, is_over = random.Random(seed), False
    while not is_over:
        for index in draw.sample(range(len(cached)), len(cached)):
            if not is_right(cached[index], index):
                os._exit(3)
        is_over = not for_ever
    os._exit(0)


@pytest.mark.parametrize("pairs", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_whoever_is_killed_loses_and_corrupts_nothing(where: Path, log: Path, pairs: int) -> None:
    """Processes that fill a cache are killed at any moment, two at a time; what is there is right all the same."""
    count, draw = 30 * pairs, random.Random()
    cached = CachedDataset(Noted(Path("/dev/null"), count), where, fingerprint="v1")
    statuses = []
    for number in range(pairs):
        pids = []
        for seed in (2 * number, 2 * number + 1):
            if not (pid := os.fork()):
                read_at_random(cached, seed, for_ever=True)
            pids.append(pid)
        pause(draw.uniform(0, 0.02))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            statuses.append(os.waitpid(pid, 0)[1])
    assert set(statuses) == {signal.SIGKILL}  # and nobody has read a sample that is not right
    assert all(is_right(cached[index], index) for index in range(count))
    noted = CachedDataset.__new__(CachedDataset)
    noted.__dict__.update(cached.__dict__, _dataset=Noted(log, count))
    assert all(is_right(noted[index], index) for index in range(count))
    assert not made(log)


def pause(seconds: float) -> None:
    """Wait for nothing in particular: what is killed is to be at any place."""
    signal.sigtimedwait([signal.SIGUSR2], seconds)


def test_two_who_fill_it_at_once(where: Path, log: Path) -> None:
    """No sample is another's, and none is lost."""
    cached = CachedDataset(Noted(log, 500), where, fingerprint="v1")
    pids = []
    for seed in range(4):
        if not (pid := os.fork()):
            read_at_random(cached, seed)
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 4
    made(log)
    assert all(is_right(cached[index], index) for index in range(500))
    assert not made(log)


RANKS = """
    import sys
    from pathlib import Path
    import torch
    from asyncloader.datasets import CachedDataset

    class Slow(torch.utils.data.Dataset):
        def __len__(self): return 200
        def __getitem__(self, index):
            open(sys.argv[2], "a").write(f"{index}\\n")
            return torch.full((1000,), float(index))

    rank = int(sys.argv[3])
    cached = CachedDataset(Slow(), sys.argv[1], fingerprint="v1")
    for index in range(rank, 200, 2):
        assert int(cached[index][0]) == index
    while len([path for path in Path(sys.argv[1]).rglob("*") if path.is_file() and not path.suffix]) < 200: pass
    assert [int(cached[index][0]) for index in range(200)] == list(range(200))
"""


def test_ranks_share_a_folder(start: Callable[..., Program], tmp_path: Path) -> None:
    """Two programs that begin at the same time fill one cache, and read each other's samples."""
    log = tmp_path / "ranks"
    for rank in [start(RANKS, tmp_path / "cache", log, rank) for rank in range(2)]:
        assert rank.wait() == 0, rank.explain("")
    assert sorted(map(int, made(log))) == list(range(200))
    assert len(list((tmp_path / "cache").iterdir())) == 1


class Augmented(Dataset[float]):
    """Draws where nothing should be drawn: before the cache."""

    def __init__(self, draw: Callable[[], float]) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> float:
        return index + self.draw()


class AugmentedAtOnce(Augmented):
    async def __getitem__(self, index: int) -> float:  # type: ignore[override]
        await asyncio.sleep(0)
        with sample_seed():
            return index + self.draw()


def own_draw() -> Callable[[], float]:
    generator = np.random.default_rng()
    return lambda: float(generator.random())


DRAWS: dict[str, Callable[[], Callable[[], float]]] = {
    "random": lambda: random.random,
    "numpy.random": lambda: np.random.rand,
    "torch": lambda: lambda: float(torch.rand(())),
    "draw.generator": own_draw,
}


def random_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for record in caplog.records if "draw random numbers" in (text := record.getMessage())]


@pytest.mark.parametrize("seeding", ["batch", "sample"])
@pytest.mark.parametrize("source", DRAWS)
def test_samples_that_are_random_before_they_are_kept_are_told_once(
    source: str, seeding: Any, where: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each epoch would have the augmentation of the first one; the log says from what, and what to do."""
    cached = CachedDataset(Augmented(DRAWS[source]()), where, fingerprint="v1")
    loader = DataLoader(cached, 4, seeding=seeding)
    assert torch.equal(torch.cat(list(loader)), torch.cat(list(loader)))
    (told,) = random_warnings(caplog)
    assert f"Augmented draw random numbers (from {source})" in told
    assert "transform=augment" in told


@pytest.mark.parametrize("seeding", ["batch", "sample"])
def test_what_is_random_after_the_cache_is_not_told(
    where: Path, seeding: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor are seeds that blocks of the dataset set, in which nothing is drawn."""
    augment = lambda sample: sample + random.random()  # noqa: E731
    for dataset in (Augmented(lambda: 0.5), AugmentedAtOnce(lambda: 0.5)):
        cached: Any = CachedDataset(dataset, where, fingerprint=type(dataset).__name__, transform=augment)
        is_async = isinstance(dataset, AugmentedAtOnce)
        loader = DataLoader(cached, 4, seeding="batch" if is_async else seeding)  # without workers, blocks seed nothing
        assert not torch.equal(torch.cat(list(loader)), torch.cat(list(loader)))

        async def make(cached: Any = cached) -> None:
            await asyncio.gather(*(cached.getitem(index) for index in range(12)))

        if is_async:
            asyncio.run(make())
    assert random_warnings(caplog) == []
