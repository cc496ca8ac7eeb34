"""A look at the word that every draw changes."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncloader.seeding.generators import GLOBAL, check_of, left_alone
from asyncloader.seeding.positions import _look_at, positions

TWISTERS = [
    lambda: random.Random(3),
    lambda: np.random.RandomState(3),
    lambda: np.random.Generator(np.random.MT19937(3)),
]
OTHERS = [
    lambda: torch.Generator().manual_seed(3),
    lambda: np.random.default_rng(3),
    lambda: np.random.Generator(np.random.Philox(3)),
]


def words(generator: Any, count: int) -> None:
    """Draw so many words of 32 bits, or numbers."""
    if isinstance(generator, random.Random):
        generator.getrandbits(32 * count)
    elif isinstance(generator, torch.Generator):
        torch.empty(count).uniform_(generator=generator)
    else:
        generator.bytes(4 * count)


@pytest.mark.parametrize("make", TWISTERS)
def test_twisters_are_looked_at_where_they_lie(make: Any) -> None:
    """Otherwise each look would ask for a state."""
    assert _look_at(make()).func is not check_of  # type: ignore[attr-defined]


def test_so_are_the_global_ones_of_python_and_numpy() -> None:
    """Which every dataset has."""
    looks: list[Any] = [_look_at(generator) for generator in GLOBAL]
    assert [look.func is check_of for look in looks] == [True, False, False]


@pytest.mark.parametrize("make", [*TWISTERS, *OTHERS])
@given(counts=st.lists(st.sampled_from([1, 2, 7, 623, 624, 625, 1248, 624 * 13]), min_size=1, max_size=6))
def test_every_draw_is_seen(make: Any, counts: list[int]) -> None:
    """Also of as many words as a block has: the place in it is the same afterwards."""
    generator = make()
    where = positions([generator])
    before = where()[-1]
    for count in counts:
        assert where()[-1] == before
        words(generator, count)
        assert where()[-1] != before
        before = where()[-1]


def test_global_draws_are_seen_by_their_generators() -> None:
    """In the order in which the generators were given, which tells which one has moved."""
    with left_alone():
        where = positions(GLOBAL)
        for at, draw in enumerate((lambda: torch.rand(()), random.random, np.random.rand)):
            before = where()
            draw()
            assert [one != other for one, other in zip(before, where(), strict=True)] == [
                at == each for each in range(3)
            ]


def test_a_generator_that_draws_from_elsewhere_is_asked_for_its_state() -> None:
    """A subclass may override everything."""

    class Counts(random.Random):
        count = 0

        def getstate(self) -> Any:
            return 3, (self.count,), None

        def random(self) -> float:
            self.count += 1
            return 0.5

    generator = Counts()
    assert _look_at(generator).func is check_of  # type: ignore[attr-defined]
    where = positions([generator])
    before = where()[-1]
    generator.random()
    assert where()[-1] != before
