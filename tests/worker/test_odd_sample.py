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
        ([X, X, None, X], (2, "is None")),
        ([None, X], (0, "is None")),
        ([{"x": X, "y": 1}, {"x": X, "y": None}], (1, "has None at ['y']")),
        ([(X, [1, None])] * 3, (0, "has None at [1][1]")),
        (
            [X, X, Y],
            (2, "is a Tensor of the shape (1, 3), where others of the batch are a Tensor of the shape (3,)"),
        ),
        (
            [(Y, 0), (X, 0), (X, 1.5)],
            (0, "has a Tensor of the shape (1, 3) at [0], where others of the batch have a Tensor of the shape (3,)"),
        ),
        (
            [np.zeros(2), np.zeros(2), [0, 0]],
            (2, "is a list of 2, where others of the batch are a ndarray of the shape (2,)"),
        ),
        (
            [{"x": X}, {"x": X}, {"z": X}],
            (2, "is a dict with the keys ['z'], where others of the batch are a dict with the keys ['x']"),
        ),
        (
            [[1, 2], [1, 2], [1, 2, 3]],
            (2, "is a list of 3, where others of the batch are a list of 2"),
        ),
        ([A, A[:, ::-1]], (1, "is a ndarray that is a flipped view (.copy() makes one that can be collated)")),
        ([A, A.astype(">f4")], (1, "is a ndarray whose bytes are in the other order (>f4)")),
        ([{"x": A}, {"x": A.astype(object)}], (1, "has a ndarray of the dtype object at ['x']")),
        ([np.array(["x"])] * 2, (0, "is a ndarray of the dtype <U1")),
        ([{"x": DAY, "y": None}] * 2, (0, f"has a datetime64 of the dtype {DAY.dtype} at ['x']")),
        ([{"x": None, "y": DAY}] * 2, (0, "has None at ['x']")),
        ([{"a": X, "b": {"f": len}}] * 2, (0, "has a builtin_function_or_method at ['b']['f']")),
        ([(A, np.float32(1), True, "text", b"bytes", np.True_, range(2))] * 2, None),
        ([X, X], None),
        ([], None),
        ([[0] * 1000, [0] * 1000], None),
    ],
    ids=repr,
)
def test_under_torchs_default(samples: list[Any], found: Any) -> None:
    """What cannot be collated comes first, in the order of collation; then the sample that is not as most are."""
    assert find_odd_sample(samples, must_be_alike=True) == found


@pytest.mark.parametrize(
    ("samples", "found"),
    [([X, None], (1, "is None")), ([X, Y], None), ([(X, None), (X, None)], None)],
    ids=repr,
)
def test_under_a_collate_fn_of_the_users(samples: list[Any], found: Any) -> None:
    """It may expect samples that differ, and None where each sample has it."""
    assert find_odd_sample(samples, must_be_alike=False) == found


LEAVES = [A, A[::-1], A.astype(">f4"), A.astype(object), DAY, None, X, 1, 2.5, "a", len, np.float16(1), np.array("b")]


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.dictionaries(st.sampled_from("abc"), inner) | st.lists(inner)


@given(st.recursive(st.sampled_from(LEAVES), _containers))
def test_whatever_torch_refuses_is_named(sample: Any) -> None:
    """Samples that are all alike are collated by torch, or a part of them is named; never both."""
    try:
        default_collate([sample, sample])
    except Exception:
        assert find_odd_sample([sample, sample], must_be_alike=True) is not None
    else:
        assert find_odd_sample([sample, sample], must_be_alike=True) is None


def test_nothing_that_samples_raise_gets_out() -> None:
    """The error that is being explained is raised, and not another one."""

    class Hostile(dict[str, int]):
        def __len__(self) -> int:
            raise RuntimeError("no")

    assert find_odd_sample([Hostile(), None], must_be_alike=True) is None
