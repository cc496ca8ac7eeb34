"""States of generators, written down and read."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from asyncloader.run.rng_snapshot import RNGSnapshot, restores_forgotten


def draw() -> list[Any]:
    """Draw from all generators; normal variates are made in pairs, of which one is kept for later."""
    return [random.gauss(0, 1), random.random(), np.random.standard_normal(), np.random.rand(), torch.rand(3).tolist()]


def test_what_is_read_draws_what_would_have_been_drawn() -> None:
    """The second variate of a pair too, in every library."""
    snapshot = RNGSnapshot(None, [[3, 1, 2]])  # a sampler that may draw from any of them
    draw()
    text = snapshot.as_text(snapshot.capture())
    expected = [draw(), draw()]
    snapshot.restore(snapshot.from_text(text))
    assert [draw(), draw()] == expected


def test_what_is_put_back_afterwards_is_not_restored() -> None:
    """A loader that has restored the generators before finds them as it has left them, and draws nothing again."""
    snapshot = RNGSnapshot(None, [[3, 1, 2]])
    snapshot.restore(snapshot.capture())
    marks = snapshot.marks([True] * len(snapshot))
    with restores_forgotten():
        snapshot.restore(snapshot.capture())
        assert any(snapshot.set_since(marks))
    assert not any(snapshot.set_since(marks))
