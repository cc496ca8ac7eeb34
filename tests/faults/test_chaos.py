"""Runs with random faults in random configurations, held against undisturbed ones; `make soak` goes on for longer."""

from __future__ import annotations

import os
import time

import pytest

from tests.faults import chaos

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


def test_disturbed_epochs_are_those_of_an_undisturbed_loader() -> None:
    """A dozen runs, always the same."""
    played = dict(chaos.soak(first_seed=100, runs=12, seconds=float("inf")))
    assert len(played) == 12
    assert sum(map(bool, played.values())) >= 9


@pytest.mark.soak
def test_soak() -> None:
    """New runs for as long as ASYNCLOADER_SOAK_S says; the seed of a failure is in its notes."""
    seconds = float(os.environ.get("ASYNCLOADER_SOAK_S", "60"))
    first = int(time.time()) * 1000
    played = dict(chaos.soak(first_seed=first, runs=None, seconds=seconds))
    print(f"{len(played)} runs from seed {first}")
    assert sum(map(bool, played.values())) >= 0.7 * len(played) - 3
