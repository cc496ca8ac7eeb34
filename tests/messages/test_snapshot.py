"""When the state of a dataset is taken in a worker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from asyncloader.messages import snapshot as module
from asyncloader.messages.snapshot import Frozen, Keeper, Untold, WorkerStart, as_plain


class Counts:
    """A dataset with a state, which may be lost."""

    def __init__(self) -> None:
        self.asked = 0
        self.is_lost = False

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        if self.is_lost:
            raise RuntimeError("lost")
        return {"asked": self.asked}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def __iter__(self) -> Iterator[Any]:
        return iter(())


@pytest.mark.parametrize("every", [1, 300, 1000, 1001, 10**6])
@pytest.mark.parametrize("is_slow", [False, True])
def test_keys_of_a_thousand_batches_are_kept_at_most(
    every: int, is_slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However seldom states are asked for, and however long they take."""
    monkeypatch.setattr(module.Pace, "is_due", lambda pace: not is_slow)
    keeper, kept, most = Keeper(Counts(), every, WorkerStart()), 0, 0
    for _ in range(5_000):
        kept = 0 if isinstance(keeper.take(), Frozen) else kept + 1
        most = max(most, kept)
    assert most == (999 if is_slow or every > 1000 else every - 1)


def test_a_state_that_cannot_be_taken_is_not_asked_for_with_every_batch() -> None:
    """After a thousand as well as before."""
    dataset = Counts()
    dataset.is_lost = True
    keeper = Keeper(dataset, 10**6, WorkerStart())
    found = [keeper.take() for _ in range(5_001)]
    assert dataset.asked == sum(isinstance(each, Untold) for each in found) == 6


def test_states_of_streams_are_taken_as_seldom_as_the_user_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is kept of their batches but a number."""
    monkeypatch.setattr(module.Pace, "is_due", lambda pace: True)
    dataset = Counts()
    keeper = Keeper(dataset, 2_500, WorkerStart())
    keeper.attach(iter(dataset))
    found = [number for number in range(1, 6_000) if keeper.take() is not None]
    assert found == [1, 2501, 5001]


def test_places_are_written_down_by_the_workers_numbers() -> None:
    """Whichever worker came last."""
    starts = {1: WorkerStart(5), 0: WorkerStart(3)}
    assert [start[0] for start in json.loads(as_plain(starts))] == [3, 5]
