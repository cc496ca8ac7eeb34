"""fastai's Learner over our loaders, put into its DataLoaders as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from torch import Tensor, nn
from torch.utils.data import Dataset

from asyncloader import DataLoader
from tests.frameworks.witness import assert_made_by_us, sample


class Pairs(Dataset[tuple[Tensor, Tensor, Tensor, Tensor]]):
    """What fastai wants: a tuple, whose last member is the target. Index and witness travel as inputs."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        made = sample(index)
        return made["x"], torch.tensor(index), made["witness"], made["y"]


class FirstOnly(nn.Module):
    """Fits the line; takes index and witness and leaves them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x: Tensor, index: Tensor, witness: Tensor) -> Any:
        return self.layer(x)


class Notes(Callback):
    """Notes which batches the learner is given, in training and in validation."""

    def before_fit(self) -> None:
        self.trained: list[dict[str, Tensor]] = []
        self.validated: list[dict[str, Tensor]] = []

    def before_batch(self) -> None:
        _, index, witness = self.xb
        (self.trained if self.training else self.validated).append({"index": index, "witness": witness})


def make_learner(folder: Path) -> Learner:
    loaders = DataLoaders(
        DataLoader(Pairs(24), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True),
        DataLoader(Pairs(12), batch_size=4, num_workers=2),
    )
    return Learner(loaders, FirstOnly(), loss_func=nn.MSELoss(), cbs=[Notes()], path=folder)


def test_learner_fits_and_validates_over_our_loaders(tmp_path: Path) -> None:
    """Two epochs train on every sample once each, and validate; all of it made by our workers."""
    learner = make_learner(tmp_path)
    with learner.no_logging():
        learner.fit(2, 0.05)
    notes = learner.notes
    trained = [int(index) for batch in notes.trained for index in batch["index"]]
    assert sorted(trained[:24]) == sorted(trained[24:]) == list(range(24))
    assert trained[:24] != trained[24:]
    assert [int(index) for batch in notes.validated for index in batch["index"]] == list(range(12)) * 2
    assert_made_by_us(notes.trained, num_workers=2)
    assert_made_by_us(notes.validated, num_workers=2)
    assert type(learner.dls.train) is DataLoader


def test_learner_predicts_over_our_loader(tmp_path: Path) -> None:
    """Predictions come in the order of the dataset."""
    learner = make_learner(tmp_path)
    with learner.no_logging():
        predictions, targets = learner.get_preds(dl=learner.dls.valid)
    assert predictions.shape == targets.shape == (12, 1)
    assert torch.equal(targets, torch.stack([sample(index)["y"] for index in range(12)]))
