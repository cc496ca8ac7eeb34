"""Ranks with a real process group (gloo) on the CPU."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.ranks import run_ranks

PROGRAM = Path(__file__).with_name("ddp_ranks.py")
ELASTIC = Path(__file__).with_name("elastic_ranks.py")


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


@pytest.mark.slow
def test_an_epoch_goes_on_with_other_numbers_of_ranks(tmp_path: Path) -> None:
    """4 ranks, then 2, then 3, with torch.distributed.checkpoint in between: each sample once, one twice at the end."""
    drawn: list[int] = []
    checkpoint = ""
    for ranks, steps in ((4, "5"), (2, "5"), (3, "1000")):
        to = "" if ranks == 3 else str(tmp_path / f"after {ranks}")
        told = run_ranks(ELASTIC, tmp_path, checkpoint, to, steps, ranks=ranks)
        samples = [[index for batch in rank[0] for index in batch] for rank in told]
        drawn += itertools.chain.from_iterable(zip(*samples, strict=True))
        checkpoint = to
    assert sorted(drawn[:203]) == list(range(203))
    assert drawn[203:] == drawn[:1]  # 83 were left for 3 ranks
    following = [index for rank in told for batch in rank[1] for index in batch]
    assert set(following) == set(range(203))
    assert len(following) == 204
