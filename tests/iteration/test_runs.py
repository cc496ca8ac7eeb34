"""What a loader knows of its runs: how much of one is done."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import IterableDataset

from asyncloader import DataLoader


@pytest.mark.parametrize("options", [{"num_workers": 0}, {"num_workers": 2}, {"num_workers": 2, "in_order": False}])
def test_what_remains(options: dict[str, Any]) -> None:
    """It goes down with each batch, and belongs to the run that a state goes on with."""
    loader = DataLoader(range(10), batch_size=2, **options)  # type: ignore[arg-type]
    assert loader.remaining() == 5
    iterator = iter(loader)
    for left in (4, 3, 2):
        next(iterator)
        assert loader.remaining() == left
    state = loader.state_dict()
    assert len(list(iterator)) == 2
    assert loader.remaining() == 5
    loader.load_state_dict(state)
    assert (loader.remaining(), len(loader)) == (2, 5)
    assert len(list(loader)) == 2
    assert loader.remaining() == 5
    loader.load_state_dict(loader.state_dict())
    assert loader.remaining() == 5


@pytest.mark.parametrize("num_workers", [0, 2])
def test_states_of_a_run_are_made_without_freezing_the_settings_anew(
    num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That takes as long as all the rest of a state, which some take after every batch."""
    loader = DataLoader(range(8), batch_size=2, num_workers=num_workers)  # type: ignore[arg-type]
    iterator = iter(loader)
    next(iterator)
    monkeypatch.setattr(DataLoader, "_settings", lambda self: pytest.fail("the settings were made anew"))
    assert loader.state_dict()["position"] == 1
    assert len(list(iterator)) == 3
    assert loader.state_dict()["finished"]


class Endless(IterableDataset[int]):
    """Says nothing of its length."""


def test_what_has_no_length() -> None:
    """As `len` says it."""
    with pytest.raises(TypeError):
        DataLoader(Endless()).remaining()
