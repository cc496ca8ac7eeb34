"""Collated slices that are joined are what torch makes of all samples at once; or they are not joined."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from torch.utils.data import default_collate

from asyncloader.transport.join import CannotJoin, collated, columns_of, join
from tests.effort import examples
from tests.sameness import same

Point = namedtuple("Point", ["x", "label"])
Other = namedtuple("Other", ["x", "label"])


class Shifted(Point):
    """A namedtuple with a constructor of its own."""

    def __new__(cls, x: Any, label: Any) -> Shifted:
        return super().__new__(cls, x + 1, label)


LEAVES: list[Any] = [
    1,
    2.5,
    True,
    2**40,
    "a",
    b"b",
    torch.tensor(1.0),
    torch.tensor(1, dtype=torch.float64),
    torch.arange(3),
    torch.zeros(0, 3),
    torch.ones(2, 2, dtype=torch.bfloat16),
    torch.ones(3, dtype=torch.float8_e4m3fn),
    torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
    torch.ones(3, requires_grad=True),
    np.float32(3),
    np.float64(4),
    np.int16(5),
    np.array(6),
    np.ones((2, 2), np.float32),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.array(["text"]),
    None,
]
leaves = st.sampled_from(LEAVES)
containers: list[Any] = [
    lambda one, other: one,
    lambda one, other: (one, other),
    lambda one, other: [one, other],
    lambda one, other: {"one": one, "other": other},
    lambda one, other: {"other": other, "one": one},
    lambda one, other: {"one": one},
    lambda one, other: OrderedDict(one=one, other=other),
    Point,
    Other,
    lambda one, other: ({"deep": [one]}, (other,)),
    lambda one, other: ((), one, {}),
]


@st.composite
def batches(draw: st.DrawFn) -> list[Any]:
    """Draw samples that are mostly alike."""
    shapes = draw(st.lists(st.sampled_from(containers), min_size=1, max_size=2))
    first, second = draw(st.lists(leaves, min_size=1, max_size=2)), draw(st.lists(leaves, min_size=1, max_size=2))
    member = st.tuples(st.sampled_from(shapes), st.sampled_from(first), st.sampled_from(second))
    return [shape(one, other) for shape, one, other in draw(st.lists(member, min_size=1, max_size=6))]


def joined(samples: list[Any], bounds: list[int]) -> Any:
    """Collate slices of the samples, and join them."""
    slices = [samples[begin:end] for begin, end in pairwise(bounds)]
    return join([collated(part, default_collate(part), default_collate) for part in slices])


@hypothesis_settings(max_examples=examples(300), deadline=None)
@given(batches(), st.data())
def test_what_is_joined_is_what_torch_collates_at_once(samples: list[Any], data: st.DataObject) -> None:
    """Any samples, in any slices: the same, bit for bit, or it is made at once."""
    cuts = data.draw(st.sets(st.integers(1, len(samples)))) - {len(samples)}
    try:
        found = joined(samples, [0, *sorted(cuts), len(samples)])
    except Exception:  # of torch: or what it raises is about some samples only
        return
    assert same(found, default_collate(samples))


ALIKE: list[Any] = [
    lambda i: torch.full((3, 4), float(i)),
    lambda i: torch.full((3,), i, dtype=torch.bfloat16),
    lambda i: (i, i / 3, i % 2 == 0, f"sample {i}", bytes([i])),
    lambda i: {"image": np.full((2, 2), i, np.uint8), "label": np.float32(i), "name": str(i)},
    lambda i: Point(torch.tensor(i), [i, {"deep": i}]),
    lambda i: str(i),
    lambda i: torch.zeros(0, 3),
]


@pytest.mark.parametrize("kind", range(len(ALIKE)))
def test_samples_that_are_alike_are_joined(kind: int) -> None:
    """Every kind that torch's default knows, also in slices of one sample."""
    samples = [ALIKE[kind](i) for i in range(5)]
    assert same(joined(samples, [0, 3, 4, 5]), default_collate(samples))


@pytest.mark.parametrize(
    "samples",
    [
        [torch.tensor(1), 2],  # torch refuses to stack these, and has no objection to each
        [1, 2.5],
        [torch.ones(2), torch.ones(3)],
        [{"a": 1}, {"a": 1, "b": 2}],
        [Point(1, 2), Other(1, 2)],
        [Shifted(1, 2), Shifted(3, 4)],
        [OrderedDict(a=1), OrderedDict(a=2)],
    ],
)
def test_what_cannot_be_joined(samples: list[Any]) -> None:
    """What only looks alike when it is collated, and what others have made rules for."""
    with pytest.raises(CannotJoin):
        joined(samples, [0, 1, 2])


def test_what_was_collated_by_rules_of_the_users_cannot_be_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's map of collating functions may be changed, and then nobody knows what is made of the samples together."""
    collation = torch.utils.data._utils.collate
    monkeypatch.setitem(collation.default_collate_fn_map, int, lambda batch, collate_fn_map=None: [len(batch)])
    with pytest.raises(CannotJoin):
        joined([1, 2, 3], [0, 2, 3])


def test_large_tensors_of_a_batch_are_its_columns() -> None:
    """In the order in which they are collated; texts and small ones are none."""
    batch = {"name": ["a"] * 64, "image": torch.zeros(64, 3, 224), "pair": [torch.zeros(64), torch.zeros(64, 9000)]}
    assert columns_of(batch) == ((torch.float32, (3, 224)), (torch.float32, (9000,)))
