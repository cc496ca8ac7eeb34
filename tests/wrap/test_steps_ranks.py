"""Two ranks that take equal steps, with batches on a device, and on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.nursery import Nursery
from tests.support.ranks import fork_ranks

PROGRAM = Path(__file__).with_name("steps_ranks.py")
WHOLE = ([[0, 1], [2, 3], [4, 5], [6, 7], [8]], [[number, number + 1] for number in range(1000, 1014, 2)])
TAKEN = {
    "drop": [whole[:5] for whole in WHOLE],
    "pad": [[*WHOLE[0], [8], [8]], WHOLE[1]],
}


@pytest.fixture(scope="module")
def ranks(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two gloo ranks has found; that they have come to the end at all is the point."""
    return fork_ranks(nursery, PROGRAM, tmp_path_factory.mktemp("ranks"), ranks=2)


CASES = [f"{device} {mode} {workers}" for device in ("cpu", "simulated") for mode in TAKEN for workers in (0, 1)]


@pytest.mark.parametrize("case", CASES)
def test_steps_are_equal_and_in_order(ranks: list[dict[str, Any]], case: str) -> None:
    """By `for` and `async for`, and each step reads its batch, which the device may come to much later."""
    expected = TAKEN[case.split()[1]]
    assert [own[case] for own in ranks] == expected
    assert [own[f"{case} async"] for own in ranks] == expected
    assert all(own[f"{case} most"] <= 4 for own in ranks)


@pytest.mark.parametrize("case", CASES)
def test_states_are_those_of_what_was_given(ranks: list[dict[str, Any]], case: str) -> None:
    """A repeated batch counts when its last repetition was given; a run that is resumed goes on with the rest."""
    for own, whole, expected in zip(ranks, WHOLE, TAKEN[case.split()[1]], strict=True):
        repeated = len(expected) - len(whole)
        steps = [*range(1, min(len(whole), len(expected)) + 1)]
        if repeated > 0:
            steps = [*steps[:-1], *[len(whole) - 1] * repeated, len(whole)]
        assert own[f"{case} positions"] == steps
        assert own[f"{case} resumed after 3"] == expected
        after = own[f"{case} resumed after 5"]
        assert after == (expected if len(expected) > 5 else [*expected, *expected][: len(after)])
        assert own[f"{case} after 3, and the next epoch"] == expected


@pytest.mark.parametrize("device", ["cpu", "simulated"])
def test_a_transform_draws_what_it_draws_on_a_rank_alone(ranks: list[dict[str, Any]], device: str) -> None:
    """By the number of the batch, whatever the ranks agree on."""
    for own in ranks:
        alone, dropping, padding = own[f"{device} noise"]
        assert alone == dropping == padding
        assert len({number[0] % 1 for number in alone}) == len(alone) == 4
    assert ranks[0][f"{device} noise"] != ranks[1][f"{device} noise"]
