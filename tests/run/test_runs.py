"""What a loader knows of its runs."""

from __future__ import annotations

import pytest

from asyncloader import DataLoader


@pytest.mark.parametrize("num_workers", [0, 2])
def test_states_of_a_run_are_made_without_freezing_the_settings_anew(
    num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That takes as long as all the rest of a state, which some take after every batch."""
    loader = DataLoader(range(8), batch_size=2, num_workers=num_workers)  # type: ignore[arg-type]
    iterator = iter(loader)
    next(iterator)
    monkeypatch.setattr(DataLoader, "_loader_options", lambda self: pytest.fail("the settings were made anew"))
    assert loader.state_dict()["position"] == 1
    assert len(list(iterator)) == 3
    assert loader.state_dict()["finished"]
