"""A model that remembers which batches it was given."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from torch import Tensor, nn

from tests.frameworks.witness import Sample


class LineModel(lightning.LightningModule):
    """Fits a line; keeps the batches it was trained on and validated with, and predicts by handing them back."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.trained: list[Sample] = []
        self.validated: list[Sample] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.trained.append(batch)
        return self.loss(batch)

    def validation_step(self, batch: Sample, batch_idx: int) -> None:
        self.validated.append(batch)
        self.log("loss", self.loss(batch))

    def predict_step(self, batch: Sample, batch_idx: int) -> Sample:
        return batch

    def loss(self, batch: Sample) -> Tensor:
        return nn.functional.mse_loss(self.layer(batch["x"]), batch["y"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)
