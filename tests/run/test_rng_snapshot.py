"""States of generators, written down and read."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from asyncloader.run.rng_snapshot import RNGSnapshot


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
