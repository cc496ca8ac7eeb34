"""Samples that raise: skipped or replaced, counted, bounded, and never in silence."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from asyncloader import DataLoader
from tests.faults.datasets import Augmented, plain

pytestmark = pytest.mark.on_threads

FACES = ["for", "async for"]


class Bad(ValueError):
    """What bad samples raise."""


class Flawed(Dataset[int]):
    """Samples that are their index; some raise.

    Args:
        bad: Indices of the bad samples.
        length: Of the dataset.
    """

    def __init__(self, bad: set[int], length: int = 16) -> None:
        self.bad = bad
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if index in self.bad:
            raise Bad(f"sample {index} is bad")
        return index


class FlawedTogether(Flawed):
    """The same, fetched a batch at a time."""

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self[index] for index in indices]


class FlawedStream(IterableDataset[int]):
    """An iterator, not a generator, that raises now and then and goes on."""

    def __init__(self, bad: set[int], length: int = 16) -> None:
        self.bad = bad
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return _Steps(self)


class _Steps(Iterator[int]):
    def __init__(self, stream: FlawedStream) -> None:
        self.stream = stream
        self.at = -1

    def __next__(self) -> int:
        self.at += 1
        if self.at >= self.stream.length:
            raise StopIteration
        if self.at in self.stream.bad:
            raise Bad(f"sample {self.at} is bad")
        return self.at


async def epoch(loader: Any, face: str = "for") -> list[Any]:
    """Return the batches, and in the place of one the type of what it raised and the notes."""
    iterator = iter(loader)
    batches: list[Any] = []
    while True:
        try:
            batches.append(plain(next(iterator) if face == "for" else await anext(iterator)))
        except (StopIteration, StopAsyncIteration):
            return batches
        except Bad as error:
            batches.append(str(error))


BAD = {1, 4, 5, 6, 7, 10}
SKIPPED = [[0, 2, 3], [8, 9, 11], [12, 13, 14, 15]]
REPLACED = [[0, 2, 2, 3], "sample 4 is bad", [8, 9, 11, 11], [12, 13, 14, 15]]


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("num_workers", [0, 2])
async def test_bad_samples_are_skipped_or_replaced(
    face: str, num_workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Skip leaves out samples, and batches with none; replace keeps sizes, and raises where no sample is good."""
    for dataset in (Flawed(BAD), FlawedTogether(BAD)):
        for on_error, expected in (("skip", SKIPPED), ("replace", REPLACED)):
            caplog.clear()
            loader = DataLoader(dataset, batch_size=4, num_workers=num_workers, on_error=on_error)  # type: ignore[arg-type]
            batches = await epoch(loader, face)
            assert [batch for batch in batches if batch] == expected
            (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
            assert "index 1 raised Bad" in record.getMessage()
            instead = (
                "the batch is made without it" if on_error == "skip" else "a good one of its batch takes its place"
            )
            assert instead in record.getMessage()
            assert "sample 1 is bad" in record.getMessage()  # its traceback
    assert [plain(batch) for batch in DataLoader(Flawed(set()), 4, num_workers=num_workers, on_error="skip")] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
        [12, 13, 14, 15],
    ]


@pytest.mark.parametrize("num_workers", [0, 2])
async def test_without_batching_a_bad_sample_is_a_batch(num_workers: int) -> None:
    """It is left out by skip, and raised by replace, for there is no other in its batch."""
    options: dict[str, Any] = {"batch_size": None, "num_workers": num_workers}
    assert await epoch(DataLoader(Flawed({1}, 3), on_error="skip", **options)) == [0, 2]
    assert await epoch(DataLoader(Flawed({1}, 3), on_error="replace", **options)) == [0, "sample 1 is bad", 2]


@pytest.mark.parametrize("num_workers", [0, 1])
async def test_a_stream_goes_on_after_a_bad_sample_if_it_can(num_workers: int) -> None:
    """An iterator does; a generator has ended with what it raised, which is raised, for the epoch would be short."""
    options: dict[str, Any] = {"batch_size": 4, "num_workers": num_workers}
    assert await epoch(DataLoader(FlawedStream(BAD), on_error="skip", **options)) == SKIPPED
    assert await epoch(DataLoader(FlawedStream(BAD), on_error="replace", **options)) == REPLACED
    assert await epoch(DataLoader(Generated(), on_error="skip", **options)) == [[0, 1, 2, 3], "sample 5 is bad"]


class Generated(IterableDataset[int]):
    """A generator that raises at sample 5."""

    def __iter__(self) -> Iterator[int]:
        yield from range(5)
        raise Bad("sample 5 is bad")


@pytest.mark.processes
@pytest.mark.parametrize("num_workers", [0, 2])
async def test_too_many_bad_samples_raise(num_workers: int) -> None:
    """From the first batch on that exceeds max_errors, in the order of batches whatever worker is faster."""
    options: dict[str, Any] = {"batch_size": 4, "num_workers": num_workers, "on_error": "skip"}
    bad = {1, 9, 13, 14, 21, 25}
    for max_errors, raising in ((6, []), (2, [3, 5, 6]), (0, [0, 2, 3, 5, 6]), (0.1, [5, 6]), (1.0, [])):
        batches = await epoch(DataLoader(Flawed(bad, 40), max_errors=max_errors, **options))
        assert [i for i, batch in enumerate(batches) if isinstance(batch, str)] == raising
    sizes = [len(batch) for batch in await epoch(DataLoader(Flawed(bad, 40), **options))]
    assert sizes == [3, 4, 3, 2, 4, 3, 3, 4, 4, 4]
    iterator = iter(DataLoader(Flawed({1}), max_errors=0, **options))
    with pytest.raises(Bad, match="sample 1") as caught:
        next(iterator)
    assert any("max_errors=0" in note for note in caught.value.__notes__)


async def test_keys_of_any_kind_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """Keys of a mapping; the sample that replaces a bad one depends on nothing but its place."""
    data = {"a": 1, "b": 2, "c": 3}
    sampler = ["a", "missing", "b", "c"]
    loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=1, on_error="replace")  # type: ignore[arg-type]
    assert await epoch(loader) == [[1, 2, 2, 3]]
    assert "'missing' raised KeyError" in caplog.text


class AugmentedFlawed(Augmented):
    """Random samples, some of them bad after they have drawn."""

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        if index % 7 == 3:
            raise Bad(f"sample {index} is bad")
        return sample


@pytest.mark.processes
async def test_what_is_mended_is_the_same_every_time() -> None:
    """Any number of workers, any scheduling: the same samples are left out, the rest draws the same numbers."""
    import torch

    epochs = []
    for num_workers, scheduling in ((1, "static"), (2, "static"), (2, "dynamic")):
        torch.manual_seed(5)
        loader = DataLoader(
            AugmentedFlawed(40),
            batch_size=4,
            shuffle=True,
            num_workers=num_workers,
            scheduling=scheduling,  # type: ignore[arg-type]
            on_error="replace",
        )
        epochs.append(await epoch(loader))
    assert epochs[0] == epochs[1] == epochs[2]
    assert len(epochs[0]) == 10


@pytest.mark.covering(2)
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("limit", [5, 0.2])
@pytest.mark.parametrize("stop_after", [1, 3, 5])
def test_max_errors_counts_on_after_a_resume(num_workers: int, limit: int | float, stop_after: int) -> None:
    """The epoch is given up at the same batch, whether it is resumed from a state or not."""

    class EveryFourth:
        def __len__(self) -> int:
            return 25

        def __getitem__(self, index: int) -> int:
            if index % 4 == 0:
                raise ValueError(index)
            return index

    def make() -> DataLoader[Any]:
        options: Any = {"num_workers": num_workers, "on_error": "skip", "max_errors": limit}
        return DataLoader(EveryFourth(), batch_size=4, **options)

    def count(iterator: Any) -> int:
        with pytest.raises(ValueError, match="20"):
            for number in range(10):  # noqa: B007
                next(iterator)
        return number

    with contextlib.closing(make()) as loader:
        assert count(iter(loader)) == 5
    with contextlib.closing(make()) as loader:
        iterator = iter(loader)
        for _ in range(stop_after):
            next(iterator)
        state = loader.state_dict()
    with contextlib.closing(make()) as loader:
        loader.load_state_dict(state)
        assert count(iter(loader)) == 5 - stop_after


class Odd(Dataset[Any]):
    """One sample is different: it raises, is None, or has another shape.

    Args:
        kind: What is different.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        if index != 37:
            return torch.zeros(3)
        if self.kind == "raises":
            raise Bad("it is bad")
        return None if self.kind == "is None" else torch.zeros(4)


class OddAwaited(Odd):
    """The same, awaited."""

    async def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)


@pytest.mark.covering(2)
@pytest.mark.parametrize("kind", ["raises", "is None", "has another shape"])
@pytest.mark.parametrize("dataset", [Odd, OddAwaited])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"seeding": "sample"},
        {"concurrency": 4},
        {"num_workers": 1},
        {"num_workers": 1, "worker_backend": "thread"},
        {"num_workers": 2, "scheduling": "dynamic"},
    ],
    ids=str,
)
def test_the_notes_name_the_sample(options: Any, dataset: type[Odd], kind: str) -> None:
    """By its index, wherever it is in a shuffled batch; `error.keys` has the indices of the batch."""
    loader: Any = DataLoader(dataset(kind), batch_size=50, shuffle=True, **options)
    with pytest.raises((Bad, RuntimeError, TypeError)) as caught:
        list(loader)
    notes, keys = caught.value.__notes__, caught.value.keys
    verb = "raised it" if kind == "raises" else "keeps the batch from being collated"
    assert f"The sample with the index 37 {verb}." in notes
    assert sorted({*keys}) == sorted(keys)
    assert 37 in keys
    assert len(keys) == 50
    (words,) = [note for note in notes if note.startswith("The batch has the indices")]
    assert words.endswith("(50 indices), all of them in error.keys.")
    assert len(words) < 120


def test_a_sample_is_named_beside_others_that_are_left_out() -> None:
    """Positions are those in the batch, not those among the samples that are left."""
    dataset: Any = Odd("is None")
    flawed: Any = FlawedThen({30, 35}, dataset)
    loader: Any = DataLoader(flawed, batch_size=50, on_error="skip")
    with pytest.raises((TypeError, RuntimeError)) as caught:
        list(loader)
    named = "The sample with the index 37 keeps the batch from being collated."
    assert caught.value.__notes__[0] == named


class FlawedThen(Flawed):
    """Bad samples, and otherwise those of another dataset."""

    def __init__(self, bad: set[int], other: Any) -> None:
        super().__init__(bad, len(other))
        self.other = other

    def __getitem__(self, index: int) -> Any:
        super().__getitem__(index)
        return self.other[index]


def test_keys_of_the_users_own_stay() -> None:
    """An exception that has an attribute of that name keeps it."""
    dataset: Any = Raising()
    for num_workers in (0, 1):
        with pytest.raises(WithKeys) as caught:
            list(DataLoader(dataset, batch_size=2, num_workers=num_workers))
        assert caught.value.keys == "mine"
        assert caught.value.__notes__[-1] == "The batch has the indices [0, 1]."


class WithKeys(Exception):
    """Has keys of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = "mine"


class Raising(Odd):
    """Raises them."""

    def __init__(self) -> None:
        super().__init__("")

    def __getitem__(self, index: int) -> Any:
        raise WithKeys
