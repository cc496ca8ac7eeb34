"""Which sample of a batch is named when the batch cannot be collated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import default_collate

from asyncloader.worker.odd_sample import find_odd_sample

X = torch.zeros(3)
Y = torch.zeros(1, 3)
A = np.zeros((2, 3), np.float32)
DAY = np.datetime64("2026-01-01")


@pytest.mark.parametrize(
    ("samples", "found"),
    [
        ([X, X, None, X], 2),
        ([None, X], 0),
        ([None], 0),
        ([{"x": X, "y": 1}, {"x": X, "y": None}], 1),
        ([(X, [1, None])] * 3, 0),
        ([X, X, Y], 2),
        ([(Y, 0), (X, 0), (X, 1.5)], 0),
        ([Y, X], 1),
        ([{"x": X}, {"x": X}, {"z": X}], 2),
        ([[1, 2], [1, 2], [1, 2, 3]], 2),
        ([A, A[:, ::-1]], 1),
        ([np.array(["x"])] * 2, 0),
        ([{"x": None, "y": DAY}] * 2, 0),
        ([(A, np.float32(1), True, "text", b"bytes", np.True_, range(2))] * 2, None),
        ([np.zeros(2), np.zeros(2), [0, 0]], None),
        ([X, X], None),
        ([], None),
        ([[0] * 1000, [0] * 1000], None),
    ],
    ids=repr,
)
def test_under_torchs_default(samples: list[Any], found: int | None) -> None:
    """The first sample that torch cannot collate with those before it; the first of all, if those after it agree."""
    assert find_odd_sample(samples) == found


LEAVES = [A, A[::-1], A.astype(">f4"), A.astype(object), DAY, None, X, 1, 2.5, "a", len, np.float16(1), np.array("b")]


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.dictionaries(st.sampled_from("abc"), inner) | st.lists(inner)


@given(st.recursive(st.sampled_from(LEAVES), _containers))
def test_whatever_torch_refuses_is_named(sample: Any) -> None:
    """Samples that are all alike are collated by torch, or one of them is named; never both."""
    try:
        default_collate([sample, sample])
    except Exception:
        assert find_odd_sample([sample, sample]) is not None
    else:
        assert find_odd_sample([sample, sample]) is None
