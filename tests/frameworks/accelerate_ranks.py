"""A program, run once per rank: Accelerate shards or dispatches what our workers make.

python tests/frameworks/accelerate_ranks.py map|stream
"""

from __future__ import annotations

import os
import sys

import torch
from accelerate import Accelerator, skip_first_batches
from torch import nn

from asyncloader import DataLoader
from asyncloader.accelerate import use_asyncloader
from tests.frameworks.witness import Line, Stream, assert_made_by_us, indices
from tests.support.ranks import tell

use_asyncloader()


def main(kind: str) -> None:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(accelerator.process_index)  # the same weights must come from Accelerate
    layer = nn.Linear(1, 1)
    dataset = Line(48) if kind == "map" else Stream(48)
    given = DataLoader(dataset, batch_size=4, num_workers=2)
    model, optimizer, loader = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), 0.1), given)
    batches, gathered = [], []
    for batch in loader:
        accelerator.backward(nn.functional.mse_loss(model(batch["x"]), batch["y"]))
        optimizer.step()
        optimizer.zero_grad()
        batches.append(batch)
        gathered += accelerator.gather_for_metrics(batch["index"]).tolist()

    assert type(loader.base_dataloader) is DataLoader
    skipped = list(skip_first_batches(loader, 2))
    pids = accelerator.gather(torch.tensor([os.getpid()])).tolist()
    # Each process reads its shard of a map-style dataset; a stream is read by the first alone, and dispatched.
    makers = set(pids if kind == "map" else pids[:1])
    for taken in (batches, skipped):
        everybodys = accelerator.gather(torch.cat([batch["witness"] for batch in taken]))
        assert_made_by_us([{"witness": everybodys}], num_workers=2, parents=makers)
    found = {"seen": indices(batches), "gathered": gathered, "skipped": indices(skipped), "weight": layer.weight.item()}
    tell(accelerator.process_index, found)
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1])
