"""An epoch that is gone on with by other numbers of ranks: what was drawn of it, in the order of its steps."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import islice, zip_longest
from typing import Any

Make = Callable[[int, int], Any]
"""Makes the sampler of a rank: number of ranks, rank."""


def draw(make: Make, legs: Sequence[tuple[int, int]], last: int, *, told_by: int = 0) -> list[Any]:
    """Draw an epoch, some steps on so many ranks, then on others, and to its end on the last ones.

    Each leg goes on from the state of one rank of the one before, as it comes out of JSON; that of the others must be
    the same, and what `state_after` says too. All ranks must get as many.

    Args:
        make: Makes samplers.
        legs: Numbers of ranks, and how many batches or samples each of them takes.
        last: Ranks of the last leg.
        told_by: Which rank tells the state, modulo their number.

    Returns:
        What the samplers yielded, step by step, and in a step rank by rank.
    """
    drawn: list[Any] = []
    state: dict[str, Any] | None = None
    for ranks, steps in [*legs, (last, None)]:
        samplers = [make(ranks, rank) for rank in range(ranks)]
        for sampler in samplers:
            if state is not None:
                sampler.load_state_dict(state)
                assert sampler.state_dict() == {**state, "world": ranks}
        taken = [list(islice(sampler, steps)) for sampler in samplers]
        assert len(set(map(len, taken))) == 1
        drawn += [yielded for step in zip_longest(*taken) for yielded in step]
        states = [sampler.state_dict() for sampler in samplers]
        assert all(other == states[0] for other in states)
        assert all(sampler.state_after(len(taken[0])) == states[0] for sampler in samplers)
        state = json.loads(json.dumps(states[told_by % ranks]))
    return drawn


def flat(batches: list[list[Any]]) -> list[Any]:
    return [key for batch in batches for key in batch]
