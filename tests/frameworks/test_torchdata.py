"""All kinds of states of torchdata's StatefulDataLoader, in ours. tests/stateful has a few of them."""

from __future__ import annotations

import random

import pytest

from tests.stateful.matrix import wrong
from tests.stateful.programs import EVERYTHING

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]


def test_states_of_some_kinds() -> None:
    """A twelfth of the programs, others in each run."""
    assert not wrong(random.SystemRandom().sample(EVERYTHING, len(EVERYTHING) // 12))


@pytest.mark.slow
@pytest.mark.parametrize("dataset", sorted({program[0] for program in EVERYTHING}))
def test_states_of_all_kinds(dataset: str) -> None:
    """Every dataset, sampler, number of workers and moment: what follows is what follows there."""
    assert not wrong([program for program in EVERYTHING if program[0] == dataset])
