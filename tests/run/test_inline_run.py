"""Batches made in the trainer's process: by the same maker as in workers, with other surroundings."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, IterableDataset

import asyncloader
from asyncloader import DataLoader
from asyncloader.engine.error_limit import ErrorLimit
from asyncloader.engine.progress import Call, Progress
from asyncloader.engine.taking import Taking
from asyncloader.messages.messages import EpochSpec, Kind, WorkerSpec
from asyncloader.messages.snapshot import Pace
from asyncloader.observe.faults import Faults
from asyncloader.run.inline_run import InlineHost, InlineRun
from asyncloader.run.plan import Plan
from asyncloader.worker.batch_maker import BatchMaker
from tests import inside


class Squares:
    """Samples by key; what is raised for keys that are exceptions."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, key: Any) -> int:
        if isinstance(key, BaseException):
            raise key
        return key * key


def make_run(pin: Any = None, *, is_stream: bool = False, plan: Any = ()) -> InlineRun:
    """A run whose batches are lists of squares."""
    spec = WorkerSpec(Squares(), False, True, list, False, None, 0, 1, False)
    maker = BatchMaker(0, spec, InlineHost())
    maker.begin(EpochSpec(0, (1, 0, 0)))
    maker.spec = replace(spec, is_iterable=is_stream)
    progress = Progress()
    sampler = BatchSampler(plan, 1, drop_last=False)
    keys = Plan(sampler, iter(sampler), progress, Pace())
    return InlineRun(
        keys, Taking(progress, ErrorLimit(inside.options(DataLoader(Squares())), progress, Faults())), maker, pin
    )


def test_a_batch_has_its_number_its_keys_and_its_times() -> None:
    """What a state needs to make it again, and what the figures count."""
    item = make_run().item(5, [2, 3])
    assert item.outcome.kind == Kind.BATCH
    assert item.outcome.data == [4, 9]
    assert (item.batch, item.in_stream, item.keys) == (5, 5, [2, 3])
    assert item.times is not None


def test_batches_of_a_stream_are_not_made_again_by_keys() -> None:
    """They are read over."""
    item = make_run(is_stream=True).item(5, [2, 3])
    assert (item.batch, item.in_stream, item.keys) == (5, -1, None)


@pytest.mark.parametrize("error", [ValueError("bad"), KeyError(1)])
def test_what_a_sample_raises_is_raised_as_it_is(error: Exception) -> None:
    """The same object, with the indices of the batch, and without words about workers."""
    item = make_run().item(0, [error])
    assert item.outcome.kind == Kind.FAILURE
    assert item.open() == (None, error)
    assert [note.partition(" [")[0] for note in error.__notes__] == ["The batch has the indices"]
    assert error.keys == [error]  # type: ignore[attr-defined]
    del error.keys  # type: ignore[attr-defined]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), GeneratorExit()])
def test_an_interruption_is_no_failure_of_the_batch(error: BaseException) -> None:
    """It passes through, and the batch can be made anew, with the same number."""
    run = make_run(plan=[error])
    run.read()
    with run.making, pytest.raises(type(error)):
        run.make()
    assert run.to_do == deque([(0, [error])])
    run.to_do[0] = (0, [1])
    with run.making:
        run.make()
    assert not run.to_do
    assert run.ready[0].open() == ([1], None)
    assert not run.is_torn


def test_samples_of_a_stream_that_were_read_before_an_interruption_are_gone() -> None:
    """They cannot be read again."""
    run = make_run(plan=[KeyboardInterrupt()], is_stream=True)
    run.read()
    with run.making, pytest.raises(KeyboardInterrupt):
        run.make()
    assert run.is_torn
    assert not run._serve_one()


def test_what_pinning_raises_stands_for_the_batch() -> None:
    """And the next one is made."""

    def pin(batch: Any) -> Any:
        if 4 in batch:
            raise MemoryError("locked")
        return tuple(batch)

    run = make_run(pin)
    raised = run.item(0, [2]).open()[1]
    assert isinstance(raised, MemoryError)
    assert str(raised) == "locked"
    assert run.item(1, [3]).open() == ((9,), None)


def test_a_task_looks_again_when_nobody_makes_its_batch() -> None:
    """A thread may have taken it, as it takes whatever comes first; and at the end nobody looks for ever."""
    run = make_run(plan=[1, 2])
    assert not run.has_news()
    waiters = run.handoff._waiters
    waiters.append(object())
    assert run.has_news()
    assert run.read()
    assert not run.has_news()
    with run.making:
        run.make()
    assert run.has_news()
    assert run.taking.take(Call()) is not None
    assert run.has_news()
    assert run.read()
    assert not run.read()
    waiters.append(object())
    assert not run.has_news()
    assert not run.is_over
    with run.making:
        run.make()
    assert run.taking.take(Call()) is not None
    assert run.is_over
    assert run.has_news()


def test_a_system_exit_in_the_thread_is_told_to_the_consumer() -> None:
    """Nobody else would tell; the thread goes on."""
    run = make_run(plan=[SystemExit(3), 2])
    handoff = run.taking.handoff
    try:
        for number in range(2):
            run.read()
            run.kick()
            handoff.wait(lambda: bool(handoff.ready), None)
            item = handoff.ready.popleft()
            assert item.batch == item.in_stream == number
            if number == 0:
                assert isinstance(item.open()[1], SystemExit)
            else:
                assert item.open() == ([4], None)
    finally:
        run.stop()
        run.join(10.0)


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
