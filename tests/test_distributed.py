"""Two ranks with a real process group (gloo), DistributedSampler and DistributedDataParallel on the CPU."""

from __future__ import annotations

from pathlib import Path

from tests.ranks import run_ranks

PROGRAM = Path(__file__).with_name("ddp_ranks.py")


def test_two_ranks_train_together(tmp_path: Path) -> None:
    """Each epoch the ranks share the dataset, shuffled anew; gradients agree; each draws augmentations of its own."""
    first, second = run_ranks(PROGRAM, tmp_path)
    for ours, theirs in zip(first["epochs"], second["epochs"], strict=True):
        assert len(ours) == len(theirs) == 23
        assert set(ours + theirs) == set(range(45))
    assert first["epochs"][0] != first["epochs"][1] != first["epochs"][2]
    assert first["weights"] == second["weights"]
    assert first["losses"][-1] < first["losses"][0] / 2
    # Same seeds in both main processes: that the streams differ comes from the rank in the seed of each batch.
    drawn = first["drawn"] + second["drawn"]
    assert len(set(drawn)) == len(drawn)
