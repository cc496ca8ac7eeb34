"""BlockShuffleSampler: blocks near each other, every sample once, on any number of ranks, from any state."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncloader import ConfigurationError, StateMismatchError
from asyncloader.samplers import BlockShuffleSampler
from tests.samplers.legs import draw
from tests.support import effort


def blocks_of(indices: Any, sizes: Any) -> Any:
    return np.searchsorted(np.cumsum(sizes), indices, side="right")


@settings(max_examples=effort.examples(225), deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any),
    st.integers(1, 40),
    st.integers(1, 4),
    st.booleans(),
)
def test_an_epoch_has_every_sample_once(sizes: list[int], window: int, ranks: int, shuffle: bool) -> None:
    """Whatever is empty, short or left over; ranks get equally many."""
    samplers = [
        BlockShuffleSampler(sizes, window=window, num_replicas=ranks, rank=rank, shuffle=shuffle)
        for rank in range(ranks)
    ]
    drawn = [list(sampler) for sampler in samplers]
    assert {len(own) for own in drawn} == {-(-sum(sizes) // ranks)} == set(map(len, samplers))
    whole = [index for step in zip(*drawn, strict=True) for index in step]
    assert sorted(whole[: sum(sizes)]) == list(range(sum(sizes)))
    if not shuffle:
        assert whole[: sum(sizes)] == list(range(sum(sizes)))


def test_blocks_come_together_and_mixed() -> None:
    """A window has few blocks, each block is in few windows, and the order within is random."""
    sizes = [50] * 96
    sampler = BlockShuffleSampler(sizes, num_replicas=1, rank=0, seed=3)
    assert sampler.window == 200
    windows = np.array(list(sampler)).reshape(-1, 200)
    seen = [set(blocks_of(window, sizes).tolist()) for window in windows]
    assert {len(blocks) for blocks in seen} == {4}
    assert set().union(*seen) == set(range(96))
    assert all(np.abs(np.corrcoef(np.arange(200), window)[0, 1]) < 0.3 for window in windows)
    sampler.set_epoch(1)
    assert list(sampler) != windows.ravel().tolist()


@settings(max_examples=effort.examples(90), deadline=None)
@given(
    legs=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 12)), max_size=3),
    last=st.integers(1, 4),
)
def test_an_epoch_goes_on_on_other_ranks(legs: list[tuple[int, int]], last: int) -> None:
    """From the state of any rank: nothing is lost, and nothing comes twice but what fills the last step up."""
    sizes = [7, 0, 13, 5, 22, 9, 4]

    def make(ranks: int, rank: int) -> BlockShuffleSampler:
        sampler = BlockShuffleSampler(sizes, window=16, num_replicas=ranks, rank=rank, seed=5)
        sampler.set_epoch(2)
        return sampler

    drawn = draw(make, legs, last)
    assert drawn[:60] == list(make(1, 0))
    assert len(drawn) < 60 + 4


def test_what_does_not_fit_is_refused() -> None:
    """A state of other blocks; arguments of no use."""
    state = BlockShuffleSampler([3, 4]).state_dict()
    with pytest.raises(StateMismatchError, match="blocks"):
        BlockShuffleSampler([4, 3], window=14).load_state_dict(state)
    for sizes in ([], [0], [-1, 3], [1.5], [[1]]):
        with pytest.raises(ConfigurationError, match="block_sizes are the numbers of samples"):
            BlockShuffleSampler(sizes)
    for window in (0, True, 1.5):
        with pytest.raises(ConfigurationError, match="window should be an integer of at least"):
            BlockShuffleSampler([3], window=window)  # type: ignore[arg-type]
