"""Lightning on two processes of the CPU: it makes our loader anew in each, with a DistributedSampler."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import run_launcher

PROGRAM = Path(__file__).with_name("lightning_ddp.py")


@pytest.mark.parametrize("tool", ["trainer", "fabric"])
def test_each_process_trains_on_its_half(tool: str, tmp_path: Path) -> None:
    """Each epoch the two halves are the dataset, shuffled anew; the weights agree; all of it made by our workers.

    That it was our workers, and that our options are there, each process asserts itself.
    """
    first, second = run_launcher(PROGRAM, tmp_path, tool)
    for ours, theirs in zip(first["epochs"], second["epochs"], strict=True):
        assert sorted(ours + theirs) == list(range(40))
    assert first["epochs"][0] != first["epochs"][1]
    assert first["weight"] == second["weight"]
    if tool == "trainer":
        assert first["validated"] == list(range(0, 40, 2))
        assert second["validated"] == list(range(1, 40, 2))
