"""Batches made in the trainer's process: by the same maker as in workers, with other surroundings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

import asyncloader
from asyncloader import DataLoader
from asyncloader.engine.error_limit import ErrorLimit
from asyncloader.engine.progress import Progress
from asyncloader.engine.taking import Taking
from asyncloader.messages.messages import EpochSpec, WorkerSpec
from asyncloader.messages.outcome import Batch, Failure
from asyncloader.observe.faults import Faults
from asyncloader.run.fetching import FetchThread, InlineHost, InlineMaker
from asyncloader.worker.batch_maker import BatchMaker


class Squares:
    """Samples by key; what is raised for keys that are exceptions."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, key: Any) -> int:
        if isinstance(key, BaseException):
            raise key
        return key * key


def make_maker(pin: Any = None, *, is_stream: bool = False) -> InlineMaker:
    """A maker of lists of squares."""
    spec = WorkerSpec(Squares(), False, True, list, False, None, 0, 1, False)
    maker = BatchMaker(0, spec, InlineHost(list))
    maker.begin(EpochSpec(0, (1, 0, 0)))
    return InlineMaker(maker, Faults(), pin, is_stream=is_stream, is_batched=True)


def test_a_batch_has_its_number_its_keys_and_its_times() -> None:
    """What a state needs to make it again, and what the figures count."""
    item = make_maker().item(5, [2, 3])
    assert type(item.outcome) is Batch
    assert item.outcome.data == [4, 9]
    assert (item.seq, item.number, item.keys) == (5, 5, [2, 3])
    assert item.times is not None


def test_batches_of_a_stream_are_not_made_again_by_keys() -> None:
    """They are read over."""
    item = make_maker(is_stream=True).item(5, [2, 3])
    assert (item.seq, item.number, item.keys) == (5, -1, None)


@pytest.mark.parametrize("error", [ValueError("bad"), KeyError(1)])
def test_what_a_sample_raises_is_raised_as_it_is(error: Exception) -> None:
    """The same object, with the indices of the batch, and without words about workers."""
    item = make_maker().item(0, [error])
    assert type(item.outcome) is Failure
    assert item.open() == (None, error)
    assert [note.partition(" [")[0] for note in error.__notes__] == ["The batch has the indices"]
    assert error.keys == [error]  # type: ignore[attr-defined]
    del error.keys  # type: ignore[attr-defined]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), GeneratorExit()])
def test_an_interruption_is_no_failure_of_the_batch(error: BaseException) -> None:
    """It passes through, and the batch can be made anew, with the same number."""
    maker = make_maker()
    with pytest.raises(type(error)):
        maker.item(3, [error])
    assert maker.item(3, [1]).outcome.data == [1]  # type: ignore[union-attr]


def test_what_pinning_raises_stands_for_the_batch() -> None:
    """And the next one is made."""

    def pin(batch: Any) -> Any:
        if 4 in batch:
            raise MemoryError("locked")
        return tuple(batch)

    maker = make_maker(pin)
    raised = maker.item(0, [2]).open()[1]
    assert isinstance(raised, MemoryError)
    assert str(raised) == "locked"
    assert maker.item(1, [3]).open() == ((9,), None)


def test_a_system_exit_in_the_thread_is_told_to_the_consumer() -> None:
    """Nobody else would tell; the thread goes on."""
    progress = Progress()
    limit = ErrorLimit(DataLoader(Squares())._options(), progress, Faults())
    fetching = FetchThread(make_maker(), Taking(progress, limit))
    handoff = fetching.taking.handoff
    try:
        fetching.start()
        for request in ([0, [SystemExit(3)]], [1, [2]]):
            fetching.requests.put(request)
            handoff.wait(lambda: bool(handoff.ready), None)
            item = handoff.ready.popleft()
            assert item.seq == item.number
            if item.seq == 0:
                assert isinstance(item.open()[1], SystemExit)
            else:
                assert item.open() == ([4], None)
    finally:
        fetching.stop()
        fetching.join(10.0)


class Drawing:
    """Each sample is a number of its own generator."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> float:
        return float(asyncloader.sample_rng().random())


@pytest.mark.parametrize("ahead", [[], [1], [2, 3]])
def test_numbers_of_batches_are_those_of_the_plan(ahead: list[int]) -> None:
    """Also where some were delivered out of order before: samples draw what they draw with workers."""

    def rest(num_workers: int) -> list[list[float]]:
        torch.manual_seed(0)
        loader = DataLoader(Drawing(), 2, num_workers=num_workers, in_order=False)  # type: ignore[arg-type]
        next(iter(loader))
        state = {**loader.state_dict(), "position": 1 if 1 not in ahead else 0, "ahead": ahead}
        loader.close()
        loader.load_state_dict(state)
        batches = sorted(batch.tolist() for batch in loader)
        loader.close()
        return batches

    batches = rest(0)
    assert batches == rest(1)
    assert len({sample for batch in batches for sample in batch}) == 2 * len(batches)


class Unloadable(IterableDataset[int]):
    """Its state cannot be brought back."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(4))

    def state_dict(self) -> dict[str, int]:
        return {"at": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise OSError("gone")


def test_what_a_dataset_raises_when_it_is_opened_is_raised_by_iter() -> None:
    """As torch does where it makes the iterator."""
    loader = DataLoader(Unloadable(), 2)
    next(iter(loader))
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(OSError, match="gone"):
        iter(loader)
