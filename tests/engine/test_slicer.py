"""Into how many slices a batch is divided, by what its samples cost. Arithmetic: no time passes."""

from __future__ import annotations

from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given

from asyncloader.engine.slicer import Slicer


def slicer_of(making_s: float, carrying_s: float = 0.0) -> Slicer:
    slicer = Slicer()
    slicer.made(1, making_s)
    slicer.sent(1, carrying_s)
    return slicer


@given(
    count=st.integers(0, 5000),
    num_workers=st.integers(1, 100),
    costs=st.lists(st.tuples(st.integers(0, 64), st.floats(0, 10)), max_size=5),
)
def test_slices_cover_the_batch_and_none_is_empty(count: int, num_workers: int, costs: list[tuple[int, float]]) -> None:
    """Whatever was measured: each sample is in one slice."""
    slicer = Slicer()
    for samples, seconds in costs:
        slicer.made(samples, seconds)
        slicer.sent(samples, seconds / 50)
        slicer.opened(samples, seconds / 50)
    bounds = slicer.cut(count, num_workers)
    assert (bounds[0], bounds[-1]) == (0, count)
    assert count < 2 or all(begin < end for begin, end in pairwise(bounds))


@pytest.mark.parametrize(
    ("making_s", "count", "num_workers", "slices"),
    [
        (20e-3, 64, 4, 27),  # of 8 samples at first, of one in the end
        (1e-3, 64, 4, 3),  # of 20 ms each
        (1e-3, 39, 4, 1),  # not twice 20 ms
        (10e-6, 512, 4, 1),
        (1.0, 1, 4, 1),
        (1.0, 64, 1, 1),  # nobody to share with
    ],
)
def test_a_slice_is_worth_its_ticket(making_s: float, count: int, num_workers: int, slices: int) -> None:
    """Slices take a worker 20 ms at least; a batch that does not take two of these stays whole."""
    assert len(slicer_of(making_s).cut(count, num_workers)) - 1 == slices


def test_a_first_batch_is_divided_before_anything_is_known() -> None:
    """One sample for each worker, to find out; then so that workers that start first do more of it."""
    bounds = Slicer().cut(64, 4)
    sizes = [end - begin for begin, end in pairwise(bounds)]
    assert sizes[:5] == [1, 1, 1, 1, 7]
    assert sizes[4:] == sorted(sizes[4:], reverse=True)
    assert sizes[-1] == 1
    assert len(Slicer().cut(3, 4)) - 1 == 3


def test_samples_that_are_dear_to_carry_stay_where_they_are() -> None:
    """But now and then it is tried again: what was measured first is not how it stays."""
    slicer = slicer_of(1e-3, 50e-6)
    tries = [len(slicer.cut(64, 4)) for _ in range(60)]
    assert tries[0] == 2
    assert max(tries) > 2


def test_means_follow_what_samples_cost_now() -> None:
    """After some dozens of tickets the first ones are forgotten."""
    slicer = slicer_of(1e-6)
    for _ in range(200):
        slicer.made(1, 21e-3)
    assert len(slicer.cut(64, 4)) - 1 == 27


def test_the_window_is_counted_in_batches_where_all_workers_share_one() -> None:
    """And as torch's where each has a batch of its own; in between so that there are slices for all."""
    assert Slicer.window(slices=16, tickets=8, prefetch_factor=2) == 2
    assert Slicer.window(slices=1, tickets=8, prefetch_factor=2) == 8
    assert Slicer.window(slices=3, tickets=16, prefetch_factor=2) == 6


def test_samples_that_were_unlike_have_to_be_alike_for_long() -> None:
    """The first slice decides; after a miss 64 slices in a row do."""
    slicer = Slicer()
    slicer.told("a row", missed=False)
    assert slicer.layout == "a row"
    slicer.told("another", missed=True)
    seen = []
    for _ in range(64):
        seen.append(slicer.layout)
        slicer.told("another", missed=False)
    assert seen == [None] * 64
    assert slicer.layout == "another"
