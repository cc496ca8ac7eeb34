"""A program, run once per rank: DistributedSampler and DistributedDataParallel over a gloo process group.

python tests/ddp_ranks.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, DistributedSampler

from asyncloader import DataLoader
from tests.ranks import tell

LENGTH = 45  # the last batches are short, and the sampler has to fill up


class Noisy(Dataset[tuple[int, Tensor, Tensor, Tensor]]):
    """Points of a line, each with an augmentation that is drawn in the worker."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor, Tensor]:
        x = torch.tensor([index / LENGTH])
        return index, x, 3 * x + 1, torch.rand(())


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(7)  # the same on both: what differs between ranks has to come from the loader
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    dataset = Noisy()
    sampler: DistributedSampler[object] = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler, num_workers=2, persistent_workers=True)
    epochs, drawn, losses = [], [], []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        epochs.append([])
        for index, x, y, noise in loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            epochs[-1] += index.tolist()
            drawn += noise.tolist()
            losses.append(loss.item())
    loader.close()
    weights = [parameter.item() for parameter in model.parameters()]
    tell(rank, {"epochs": epochs, "drawn": drawn, "losses": losses, "weights": weights})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
