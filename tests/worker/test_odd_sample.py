"""Which sample of a batch is named when the batch cannot be collated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from asyncloader.worker.odd_sample import find_odd_sample

X = torch.zeros(3)
Y = torch.zeros(1, 3)


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
        ([X, X], None),
        ([], None),
        ([[0] * 1000, [0] * 1000], None),
    ],
    ids=repr,
)
def test_under_torchs_default(samples: list[Any], found: Any) -> None:
    """None comes first; otherwise the sample that is not as most of them are."""
    assert find_odd_sample(samples, must_be_alike=True) == found


@pytest.mark.parametrize(
    ("samples", "found"),
    [([X, None], (1, "is None")), ([X, Y], None), ([(X, None), (X, None)], None)],
    ids=repr,
)
def test_under_a_collate_fn_of_the_users(samples: list[Any], found: Any) -> None:
    """It may expect samples that differ, and None where each sample has it."""
    assert find_odd_sample(samples, must_be_alike=False) == found


def test_nothing_that_samples_raise_gets_out() -> None:
    """The error that is being explained is raised, and not another one."""

    class Hostile:
        @property
        def shape(self) -> Any:
            raise RuntimeError("no")

    assert find_odd_sample([Hostile(), None], must_be_alike=True) is None
