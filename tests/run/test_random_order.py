"""torch's RandomSampler without a list: whoever looks finds nothing that differs, but for the memory."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler

from asyncloader.engine.progress import Progress
from asyncloader.run.random_order import Batches, indices, skip
from tests.faults.test_interrupts_everywhere import CtrlC


def take(iterator: Iterator[Any], count: int) -> list[Any]:
    """Take the next indices as a batch; [] at the end."""
    sampler: Any = SimpleNamespace(batch_size=count, drop_last=False)
    return next(Batches(iterator, sampler, Progress()), [])


def states(generator: torch.Generator | None) -> tuple[list[int], list[int] | None]:
    """Return where the generators are."""
    return torch.get_rng_state().tolist(), None if generator is None else generator.get_state().tolist()


@pytest.mark.parametrize("owns_generator", [False, True], ids=["global", "own generator"])
@pytest.mark.parametrize(
    ("length", "num_samples"),
    [(1, None), (10, None), (4096, None), (10_000, None), (10, 3), (10, 10), (10, 25), (10, 30), (5000, 12_000)],
)
def test_order_and_draws_are_those_of_torch(length: int, num_samples: int | None, owns_generator: bool) -> None:
    """Index by index: also at which moment something is drawn."""
    found = []
    for iterate in (iter, indices):
        torch.manual_seed(3)
        generator = torch.Generator().manual_seed(5) if owns_generator else None
        iterator = iterate(RandomSampler(range(length), num_samples=num_samples, generator=generator))
        seen: list[Any] = [states(generator)]
        for index in iterator:
            seen.append(index)
            if len(seen) < 40 or len(seen) % 997 == 0:
                seen.append(states(generator))
        assert next(iterator, None) is None
        found.append([*seen, states(generator)])
    assert found[0] == found[1]


def test_indices_are_ints() -> None:
    """Datasets may insist on it."""
    assert {type(index) for index in indices(RandomSampler(range(5)))} == {int}


def test_other_samplers_are_iterated_over_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """With replacement, subclasses, and where somebody has put another method into the class."""
    drawn = indices(RandomSampler(range(5), replacement=True, num_samples=3))
    assert len(list(drawn)) == 3

    class Own(RandomSampler):
        def __iter__(self) -> Iterator[int]:
            return iter([1, 2])

    assert list(indices(Own(range(9)))) == [1, 2]
    monkeypatch.setattr(RandomSampler, "__iter__", lambda self: iter([7]))
    assert list(indices(RandomSampler(range(9)))) == [7]


@pytest.mark.parametrize("iterate", [iter, indices], ids=["generator", "array"])
def test_taking_and_skipping(iterate: Any) -> None:
    """Any mixture of them goes through the order from the first index to the last."""
    make = lambda: RandomSampler(range(10_000), num_samples=25_000, generator=torch.Generator().manual_seed(1))  # noqa: E731
    whole = list(make())
    iterator, at = iterate(make()), 0
    for kind, count in [(take, 3), (skip, 5000), (take, 6000), (skip, 0), (take, 0), (skip, 12_000), (take, 1)]:
        got = kind(iterator, count)
        assert got == (whole[at : at + count] if kind is take else count)
        at += count
    assert skip(iterator, 10_000) == len(whole) - at
    assert take(iterator, 5) == []
    assert skip(iterator, 5) == 0


@pytest.mark.parametrize("owns_generator", [False, True], ids=["global", "own generator"])
def test_an_interrupt_at_each_moment_of_the_first_answer(owns_generator: bool) -> None:
    """The next question is answered with the same order, and the generators are where they would be."""

    def answers(moment: int) -> tuple[list[int], Any, bool]:
        torch.manual_seed(3)
        generator = torch.Generator().manual_seed(5) if owns_generator else None
        iterator = indices(RandomSampler(range(20), num_samples=30, generator=generator))
        batches, was_hit = Batches(iterator, BatchSampler(range(0), 4, False), Progress()), False
        try:
            with CtrlC(moment):
                taken = next(batches)
        except KeyboardInterrupt:
            was_hit = True
            taken = next(batches)
        return [*taken, *take(iterator, 30)], states(generator), was_hit

    whole, after, _ = answers(10**9)
    for moment in range(1, 1000):
        order, now, was_hit = answers(moment)
        assert (order, now) == (whole, after), moment
        if not was_hit:
            return
    pytest.fail("there is no end of it")


@pytest.mark.parametrize(("drop_last", "num_missing"), [(False, 3), (True, 2)])
def test_how_many_indices_the_next_batch_is_short_of(drop_last: bool, num_missing: int) -> None:
    """Of the size that it will have, if that is changed."""
    sampler = BatchSampler(range(10), 2, drop_last)
    batches = Batches(iter(range(10)), sampler, Progress())
    assert next(batches) == [0, 1]
    sampler.batch_size = 3
    assert batches.num_missing == num_missing
    assert len(next(batches)) == num_missing
