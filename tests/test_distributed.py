"""Ranks with a real process group (gloo) on the CPU."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from tests.support.nursery import Nursery
from tests.support.ranks import fork_ranks, run_ranks

PROGRAM = Path(__file__).parent / "support" / "ddp_ranks.py"
ELASTIC = Path(__file__).parent / "support" / "elastic_ranks.py"
MESH = Path(__file__).parent / "support" / "mesh_ranks.py"


@pytest.mark.parametrize("averaged", ["by hand", pytest.param("by DistributedDataParallel", marks=pytest.mark.slow)])
def test_two_ranks_train_together(nursery: Nursery, tmp_path: Path, averaged: str) -> None:
    """Each epoch the ranks share the dataset, shuffled anew; gradients agree; each draws augmentations of its own."""
    by_hand = averaged == "by hand"
    first, second = fork_ranks(nursery, PROGRAM, tmp_path, "by-hand") if by_hand else run_ranks(PROGRAM, tmp_path)
    for ours, theirs in zip(first["epochs"], second["epochs"], strict=True):
        assert len(ours) == len(theirs) == 23
        assert set(ours + theirs) == set(range(45))
    assert first["epochs"][0] != first["epochs"][1] != first["epochs"][2]
    assert first["weights"] == second["weights"]
    assert first["losses"][-1] < first["losses"][0] / 2
    # Same seeds in both main processes: that the streams differ comes from the rank in the seed of each batch.
    drawn = first["drawn"] + second["drawn"]
    assert len(set(drawn)) == len(drawn)
    # Once recorded: under a DistributedSampler seeds stay what they were.
    assert [first["drawn"][0], second["drawn"][0]] == [0.7462854981422424, 0.2578784227371216]


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


@pytest.mark.slow
def test_ranks_that_read_the_same_samples_draw_the_same_numbers(tmp_path: Path) -> None:
    """Of 2 x 2 ranks, data by tensor: those of one half of the data get one batch, augmentation included."""
    ranks = run_ranks(MESH, tmp_path, ranks=4)
    for name in ranks[0]:
        here, beside, there, beside_there = ([torch.tensor(batch) for batch in rank[name]] for rank in ranks)
        assert all(map(torch.equal, here, beside)), name
        assert all(map(torch.equal, there, beside_there)), name
        ours, theirs = torch.cat(here), torch.cat(there)
        if "stream" in name:  # global generators of a worker are seeded as torch does it: alike on all ranks
            ours, theirs = ours[:, [0, -1]], theirs[:, [0, -1]]
        if name.startswith("divided"):
            assert not set(ours[:, 1:].flatten().tolist()) & set(theirs[:, 1:].flatten().tolist()), name
        else:
            assert torch.equal(ours, theirs), name


@pytest.mark.slow
def test_an_epoch_goes_on_with_another_mesh(tmp_path: Path) -> None:
    """2 x 2 ranks, then 4 x 1, then 1 x 2, on the state of the last rank: each sample once, peers always alike."""
    samples: list[float] = []
    before = ""
    for dp, tp, steps in ((2, 2, 2), (4, 1, 1), (1, 2, 99)):
        to = str(tmp_path / f"after {dp} x {tp}") if steps < 99 else ""
        ranks = run_ranks(MESH, tmp_path, str(dp), str(tp), str(steps), before, to, ranks=dp * tp)
        before = to
        assert all(rank == ranks[number // tp * tp] for number, rank in enumerate(ranks))
        parts = [list(itertools.chain.from_iterable(rank)) for rank in ranks[::tp]]
        drawn = [number for part in parts for sample in part for number in sample[1:]]
        assert len(set(drawn)) == len(drawn)
        samples += [sample[0] for part in parts for sample in part]
    assert sorted(samples) == list(range(24))
