"""A program: Lightning on two processes, which it starts itself. Each tells what it trained on.

python tests/frameworks/lightning_ddp.py trainer|fabric
"""

from __future__ import annotations

import sys
from typing import Any

import lightning
from lightning.fabric import Fabric
from torch.utils.data import DistributedSampler

from asyncloader import DataLoader
from tests.frameworks.lightning_model import LineModel
from tests.frameworks.witness import Line, assert_made_by_us, indices
from tests.support.ranks import tell

LENGTH = 40


def make_loader(shuffle: bool) -> DataLoader[Any]:
    return DataLoader(Line(LENGTH), batch_size=4, shuffle=shuffle, num_workers=2, scheduling="dynamic", max_retries=5)


def check_loader(loader: Any) -> None:
    """See that the loader that Lightning made for this rank is ours, has our options, and a part of the indices."""
    assert isinstance(loader, DataLoader)
    assert isinstance(loader.sampler, DistributedSampler)
    assert (loader.scheduling, loader.max_retries) == ("dynamic", 5)


def train_with_trainer() -> None:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, enable_checkpointing=False, **quiet
    )
    model = LineModel()
    trainer.fit(model, make_loader(shuffle=True), make_loader(shuffle=False))
    check_loader(trainer.train_dataloader)
    assert_made_by_us(model.trained, num_workers=2)
    assert_made_by_us(model.validated, num_workers=2)
    tell(
        trainer.global_rank,
        {
            "epochs": [indices(model.trained[:5]), indices(model.trained[5:])],
            "validated": indices(model.validated[-5:]),
            "weight": model.layer.weight.item(),
        },
    )


def train_with_fabric() -> None:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    model = LineModel()
    module, optimizer = fabric.setup(model, model.configure_optimizers())
    module.mark_forward_method("loss")
    loader = fabric.setup_dataloaders(make_loader(shuffle=True))
    epochs = []
    for epoch in range(2):
        batches = []
        loader.sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            fabric.backward(module.loss(batch))
            optimizer.step()
            batches.append(batch)
        assert_made_by_us(batches, num_workers=2)
        epochs.append(indices(batches))
    check_loader(loader._dataloader)  # the rest is a wrapper that moves batches to the device
    tell(fabric.global_rank, {"epochs": epochs, "weight": model.layer.weight.item()})


if __name__ == "__main__":
    {"trainer": train_with_trainer, "fabric": train_with_fabric}[sys.argv[1]]()
