"""BlockShuffleSampler: blocks near each other, every sample once, on any number of ranks, from any state."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncloader import ConfigurationError, StateMismatchError
from asyncloader.samplers import BlockShuffleSampler


def blocks_of(indices: Any, sizes: Any) -> Any:
    return np.searchsorted(np.cumsum(sizes), indices, side="right")


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any),
    st.integers(1, 40),
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(1, 5),
    st.booleans(),
)
def test_an_epoch_has_every_sample_once(
    sizes: list[int], window: int, ranks: int, num_workers: int, batch_size: int, shuffle: bool
) -> None:
    """Whatever is empty, short or left over; ranks get equally many."""
    options: dict[str, Any] = {"window": window, "num_workers": num_workers, "batch_size": batch_size}
    samplers = [
        BlockShuffleSampler(sizes, num_replicas=ranks, rank=rank, shuffle=shuffle, **options) for rank in range(ranks)
    ]
    drawn = [list(sampler) for sampler in samplers]
    assert {len(own) for own in drawn} == {-(-sum(sizes) // ranks)} == set(map(len, samplers))
    whole = [index for step in zip(*drawn, strict=True) for index in step]
    assert sorted(whole[: sum(sizes)]) == list(range(sum(sizes)))
    if not shuffle:
        assert whole[: sum(sizes)] == list(range(sum(sizes)))


def test_blocks_come_together_and_mixed() -> None:
    """A worker's batches have few blocks at a time, each block has one worker, the order within is random."""
    sizes = [50] * 96
    workers, batch_size = 2, 10
    seen: dict[int, set[tuple[int, int]]] = {}
    for rank in range(2):
        sampler = BlockShuffleSampler(
            sizes, num_workers=workers, batch_size=batch_size, num_replicas=2, rank=rank, seed=3
        )
        assert sampler.window == 200
        batches = np.array(list(sampler)).reshape(-1, batch_size)
        for worker in range(workers):
            own = batches[worker::workers]
            for first in range(0, len(own) - 20, 20):  # as many batches as fill a window
                assert len(set(blocks_of(own[first : first + 20].ravel(), sizes))) <= 10
            for block in set(blocks_of(own.ravel(), sizes)):
                seen.setdefault(block, set()).add((rank, worker))
            assert np.abs(np.corrcoef(np.arange(200), own[:20].ravel() % 50)[0, 1]) < 0.3
    shared = [readers for readers in seen.values() if len(readers) > 1]
    assert len(seen) == 96
    assert len(shared) <= 3 * 5  # those at the ends of the four stretches, and in the windows across
    sampler.set_epoch(1)
    assert list(sampler) != batches.ravel().tolist()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 12), st.integers(0, 2))
def test_an_epoch_goes_on_on_other_ranks(before: int, after: int, steps: int, num_workers: int) -> None:
    """From the state of any rank: nothing lost, nothing twice, with other numbers of ranks and workers."""
    sizes = [7, 0, 13, 5, 22, 9, 4]

    def samplers(ranks: int, workers: int) -> list[BlockShuffleSampler]:
        options: dict[str, Any] = {"window": 16, "num_workers": workers, "batch_size": 3, "seed": 5}
        return [BlockShuffleSampler(sizes, num_replicas=ranks, rank=rank, **options) for rank in range(ranks)]

    first, found = samplers(before, 2), []
    for sampler in first:
        sampler.set_epoch(2)
        own = iter(sampler)
        found += [next(own) for _ in range(steps)]
    state = json.loads(json.dumps(first[-1].state_dict()))
    assert state == first[0].state_after(steps)
    for sampler in samplers(after, num_workers):
        sampler.load_state_dict(state)
        rest = list(sampler)
        found += rest
        sampler.set_epoch(3)
        assert sampler.state_dict()["lanes"] == [after, max(1, num_workers), 3]  # the next epoch is its own
    assert set(found) == set(range(60))
    assert len(found) - 60 < after  # what is repeated so that ranks have equally many


def test_what_does_not_fit_is_refused() -> None:
    """A state of other blocks; arguments of no use."""
    state = BlockShuffleSampler([3, 4]).state_dict()
    with pytest.raises(StateMismatchError, match="blocks"):
        BlockShuffleSampler([4, 3], window=14).load_state_dict(state)
    for sizes in ([], [0], [-1, 3], [1.5], [[1]]):
        with pytest.raises(ConfigurationError, match="block_sizes are the numbers of samples"):
            BlockShuffleSampler(sizes)
    for options in ({"window": 0}, {"num_workers": -1}, {"batch_size": True}):
        with pytest.raises(ConfigurationError, match="should be an integer of at least"):
            BlockShuffleSampler([3], **options)  # type: ignore[arg-type]
