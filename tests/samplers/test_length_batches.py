"""LengthBatchSampler: what its batches look like."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncloader import ConfigurationError
from asyncloader.samplers import LengthBatchSampler
from tests.support import effort


@settings(deadline=None, max_examples=effort.examples(90))
@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=400),
    max_batch=st.none() | st.integers(1, 9),
    buckets=st.none() | st.just([10, 30, 60]) | st.lists(st.integers(60, 120), min_size=1, max_size=3),
)
def test_batches_are_within_the_budget(lengths: list[int], max_batch: int | None, buckets: Any) -> None:
    """Padded to their longest sample, or to the bucket that all of them are in; in no more than `max_batch`."""
    sampler = LengthBatchSampler(lengths, max_tokens=120, max_batch=max_batch, buckets=buckets, window=100)
    for batch in sampler:
        own = np.array(lengths)[batch]
        padded_to = own.max()
        if buckets:
            bucket = np.searchsorted(sampler.buckets, own)
            assert len(set(bucket.tolist())) == 1
            padded_to = sampler.buckets[bucket[0]]
        assert len(batch) * padded_to <= 120 or len(batch) == 1
        assert max_batch is None or len(batch) <= max_batch


def test_samples_of_a_batch_are_of_like_length_and_batches_in_any_order() -> None:
    """Of log-normal lengths less than 3 % is padding, said and counted; long and short batches take turns."""
    lengths = np.random.default_rng(0).lognormal(5.7, 1.0, 50_000).astype(np.int64).clip(1, 8192)
    sampler = LengthBatchSampler(lengths, max_tokens=32_768)
    share = sampler.padding_share
    batches = list(sampler)
    padded = sum(int(lengths[batch].max()) * len(batch) for batch in batches)
    counted = 1 - lengths.sum() / padded
    assert counted < 0.03
    assert abs(share - counted) < 0.01
    longest = np.array([lengths[batch].max() for batch in batches])
    assert abs(np.corrcoef(longest[:-1], longest[1:])[0, 1]) < 0.1


def test_without_shuffling_windows_are_as_the_samples_lie() -> None:
    """Each begins with its longest; at first, padding is that of the first one."""
    sampler = LengthBatchSampler([1, 2, 3, 4, 5, 6, 7, 8], max_tokens=8, window=4, shuffle=False)
    assert sampler.padding_share == pytest.approx(2 / 12)
    assert list(sampler) == [
        [3, 2],
        [1, 0],
        [7],
        [6],
        [5],
        [4],
    ]


def test_samples_above_the_budget_may_be_alone() -> None:
    """If that is asked for."""
    sampler = LengthBatchSampler([5, 50, 5, 70], max_tokens=10, too_long="alone", shuffle=False)
    assert sorted(map(sorted, sampler)) == [[0, 2], [1], [3]]
    with pytest.raises(ConfigurationError, match=r'sample 3 has 70 tokens, more than max_tokens .10.*too_long="alone"'):
        LengthBatchSampler([5, 50, 5, 70], max_tokens=10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens should be an integer of at least 1"),
        ({"max_tokens": 9, "max_batch": 0}, "max_batch should be an integer of at least 1"),
        ({"max_tokens": 9, "buckets": [4, 10]}, r"between 1 and max_tokens \(9\)"),
        ({"max_tokens": 9, "buckets": []}, "buckets should be lengths"),
        ({"max_tokens": 9, "buckets": [2.5]}, "a bucket should be an integer"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    """At construction, with what is wrong."""
    with pytest.raises(ConfigurationError, match=message):
        LengthBatchSampler([1, 2, 3], **options)
