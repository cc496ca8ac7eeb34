"""What is read of samplers: torch's batches, from any place, with the states that they had."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import BatchSampler, SequentialSampler

from asyncloader.engine.actions import VOID
from asyncloader.engine.progress import Progress
from asyncloader.iteration.plan import Plan, is_drawn_from, samplers_within
from asyncloader.workers.protocol.snapshot import Pace


class Counting:
    """A sampler whose iterator is itself, and tells where it is."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.at = 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.at == self.length:
            raise StopIteration
        self.at += 1
        return self.at - 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def plan_of(sampler: Any, progress: Progress | None = None) -> Plan:
    """The plan over what torch's loader would iterate over."""
    return Plan(sampler, iter(sampler), progress or Progress(), Pace())


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("length", [0, 1, 6, 7])
def test_batches_are_torchs(length: int, drop_last: bool) -> None:
    """The short one at the end as well; and there is nothing after the end."""
    sampler = BatchSampler(SequentialSampler(range(length)), 3, drop_last)
    progress = Progress()
    plan = plan_of(sampler, progress)
    assert list(plan) == list(sampler)
    assert next(plan, None) is None
    assert progress.read == len(sampler)
    assert progress.named_samples == sum(map(len, sampler))


@pytest.mark.parametrize("batches", range(5))
def test_a_plan_goes_on_in_the_middle(batches: int) -> None:
    """What comes before is left out; behind the end there is nothing."""
    sampler = BatchSampler(SequentialSampler(range(10)), 3, False)
    plan = plan_of(sampler, Progress(batches))
    plan.go_on(None, batches)
    assert list(plan) == list(sampler)[batches:]


def test_what_was_yielded_out_of_order_is_void() -> None:
    """It keeps its place, and names no samples."""
    progress = Progress(1, {2})
    sampler = BatchSampler(SequentialSampler(range(8)), 2, False)
    plan = plan_of(sampler, progress)
    plan.go_on(None, 1)
    assert [*plan] == [[2, 3], VOID, [6, 7]]
    assert progress.named_samples == 4


def test_states_are_those_after_a_batch() -> None:
    """The last one that is not beyond what is done with, and how many batches were drawn since."""
    progress = Progress()
    plan = plan_of(BatchSampler(Counting(8), 2, False), progress)
    for _ in range(3):
        next(plan)
    for position in range(3):
        state, drawn, _ = progress.sampler_state()
        if position:
            assert state is not None
            told = state.thaw()["sampler"] or state.thaw()["iterator"]
            assert told["at"] == 2 * (position - drawn)
        progress.done(position)


def test_what_a_sampler_raises_is_raised_and_ends_the_plan() -> None:
    """As torch's BatchSampler, a generator, would have it."""

    class Failing(Counting):
        def __next__(self) -> int:
            if self.at == 3:
                raise KeyError(self.at)
            return super().__next__()

    plan = plan_of(BatchSampler(Failing(8), 2, False))
    assert next(plan) == [0, 1]
    with pytest.raises(KeyError):
        next(plan)
    assert next(plan, None) is None


def test_an_iterator_that_was_drawn_from_is_read_on() -> None:
    """Some libraries advance it before the run begins."""
    sampler = BatchSampler(SequentialSampler(range(6)), 2, False)
    iterator = iter(sampler)
    assert not is_drawn_from(iterator)
    next(iterator)
    assert is_drawn_from(iterator)
    assert list(Plan(sampler, iterator, Progress(), Pace())) == [[2, 3], [4, 5]]


def test_samplers_within_are_found_once_from_the_outermost_on() -> None:
    """However they refer to each other."""
    inner = SequentialSampler(range(3))
    outer = BatchSampler(inner, 2, False)
    assert samplers_within(outer) == [outer, inner]
    inner.sampler = outer  # type: ignore[attr-defined]
    assert samplers_within(outer) == [outer, inner]
