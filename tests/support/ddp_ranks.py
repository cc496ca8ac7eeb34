"""A program, run once per rank: DistributedSampler and gradients that are averaged over a gloo process group.

python tests/support/ddp_ranks.py           # averaged by DistributedDataParallel and torch.optim, which import for 2 s
python tests/support/ddp_ranks.py by-hand   # by all_reduce
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset, DistributedSampler

from asyncloader import DataLoader
from tests.support.ranks import tell

RATE = 0.1
LENGTH = 45  # the last batches are short, and the sampler has to fill up


class Noisy(Dataset[tuple[int, Tensor, Tensor, Tensor]]):
    """Points of a line, each with an augmentation that is drawn in the worker."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor, Tensor]:
        x = torch.tensor([index / LENGTH])
        return index, x, 3 * x + 1, torch.rand(())


def by_hand(model: nn.Module) -> tuple[nn.Module, Callable[[], None]]:
    """Return the model, and a function that takes a step with it."""

    def step() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
                parameter -= RATE * parameter.grad / dist.get_world_size()
                parameter.grad = None

    return model, step


def by_torch(model: nn.Module) -> tuple[nn.Module, Callable[[], None]]:
    """Return the same as torch does it."""
    from torch.nn.parallel import DistributedDataParallel

    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), RATE)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return parallel, step


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(7)  # the same on both: what differs between ranks has to come from the loader
    model, step = (by_hand if "by-hand" in sys.argv else by_torch)(nn.Linear(1, 1))
    dataset = Noisy()
    sampler: DistributedSampler[object] = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler, num_workers=2, persistent_workers=True)
    epochs, drawn, losses = [], [], []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        epochs.append([])
        for index, x, y, noise in loader:
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            step()
            epochs[-1] += index.tolist()
            drawn += noise.tolist()
            losses.append(loss.item())
    loader.close()
    weights = [parameter.item() for parameter in model.parameters()]
    tell(rank, {"epochs": epochs, "drawn": drawn, "losses": losses, "weights": weights})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
