"""Into how many slices a batch is divided, by what its samples cost. Arithmetic: no time passes."""

from __future__ import annotations

from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given

from asyncloader.engine.slicer import Slicer


def slicer_of(making_s: float) -> Slicer:
    slicer = Slicer()
    slicer.made(1, making_s)
    return slicer


@given(
    count=st.integers(0, 5000),
    num_workers=st.integers(0, 100),
    costs=st.lists(st.tuples(st.integers(0, 64), st.floats(0, 10)), max_size=5),
)
def test_slices_cover_the_batch_and_none_is_empty(count: int, num_workers: int, costs: list[tuple[int, float]]) -> None:
    """Whatever was measured: each sample is in one slice."""
    slicer = Slicer()
    for samples, seconds in costs:
        slicer.made(samples, seconds)
    bounds = slicer.cut(count, num_workers)
    assert (bounds[0], bounds[-1]) == (0, count)
    assert len(bounds) == 2 or all(begin < end for begin, end in pairwise(bounds))


@pytest.mark.parametrize(
    ("making_s", "count", "num_workers", "slices"),
    [
        (20e-3, 64, 4, 27),  # of 8 samples at first, of one in the end
        (1e-3, 64, 4, 3),  # of 20 ms each
        (1e-3, 39, 4, 1),  # not twice 20 ms
        (10e-6, 512, 4, 1),
        (1.0, 1, 4, 1),
        (1.0, 64, 1, 1),  # nobody to share with
        (0.0, 64, 4, 1),
    ],
)
def test_a_slice_is_worth_its_ticket(making_s: float, count: int, num_workers: int, slices: int) -> None:
    """Slices take a worker 20 ms at least; a batch that does not take two of these stays whole."""
    assert len(slicer_of(making_s).cut(count, num_workers)) - 1 == slices


def test_a_first_batch_is_divided_before_anything_is_known() -> None:
    """Into slices that become smaller, down to a single sample: workers that start first do more of it."""
    sizes = [end - begin for begin, end in pairwise(Slicer().cut(64, 4))]
    assert sizes[0] == 8
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 1


def test_what_samples_cost_is_what_they_cost_now() -> None:
    """A long past of cheap ones does not keep dear ones together, nor one ticket decide."""
    slicer = slicer_of(1e-6)
    for _ in range(100):
        slicer.made(64, 64e-6)
    slicer.made(64, 64e-4)
    assert len(slicer.cut(64, 4)) == 2
    for _ in range(50):
        slicer.made(64, 0.64)
    assert len(slicer.cut(64, 4)) > 2


def test_batches_stay_whole_where_slices_often_cannot_be_joined() -> None:
    """One in eight may be made again, and one more."""
    slicer = slicer_of(1.0)
    for refused in (False, True, *[False] * 8, True, False):
        assert len(slicer.cut(64, 4)) > 2
        if refused:
            slicer.refused()
        else:
            slicer.joined(())
    slicer.refused()
    assert slicer.is_whole
    assert slicer.cut(64, 4) == [0, 64]
