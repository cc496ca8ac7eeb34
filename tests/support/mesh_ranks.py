"""A program, run once per rank: data-parallel by tensor-parallel ranks, over a gloo process group.

Without arguments two by two of them read by everything that divides data. With arguments they go on with an epoch.

python tests/support/mesh_ranks.py
python tests/support/mesh_ranks.py DP TP STEPS LOAD_FROM_OR_NOTHING SAVE_TO_OR_NOTHING
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data import BatchSampler, Dataset, DistributedSampler, IterableDataset
from torch.utils.data.datapipes.iter import IterableWrapper

from asyncloader import DataLoader, sample_rng
from asyncloader.run.data_rank import data_rank
from asyncloader.samplers import ElasticSampler, LengthBatchSampler
from tests.support import inside
from tests.support.ranks import tell

LENGTH = 24


def draw(index: int) -> Tensor:
    """Return a sample: its index, and a number of each generator that an augmentation may draw from."""
    drawn = (random.random(), np.random.rand(), torch.rand(()).item(), sample_rng().random())
    return torch.tensor([index, *drawn], dtype=torch.float64)


class Noisy(Dataset[Tensor]):
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Tensor:
        return draw(index)


class Stream(IterableDataset[Tensor]):
    """Says nothing of ranks: all of them read all of it."""

    def __iter__(self) -> Iterator[Tensor]:
        return map(draw, range(LENGTH))


class Part(IterableDataset[Tensor]):
    """Gives each rank a part of its own, and says so."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def __iter__(self) -> Iterator[Tensor]:
        return map(draw, range(self.rank, LENGTH, self.world_size))


def read(dataset: Any = None, **options: Any) -> list[list[list[float]]]:
    """Return the batches of two epochs: their samples, with what was drawn for each."""
    torch.manual_seed(7)
    options = {"batch_size": 4, "num_workers": 2, **options}
    if "batch_sampler" in options:
        del options["batch_size"]
    loader: DataLoader[Any] = DataLoader(Noisy() if dataset is None else dataset, **options)
    return [batch.tolist() for _ in range(2) for batch in loader]


def draw_all(mesh: DeviceMesh) -> dict[str, Any]:
    """Read by each kind of division; the names of those that the ranks of the data divide begin with "divided"."""
    rank, ranks = mesh["dp"].get_local_rank(), mesh["dp"].size()
    part = {"num_replicas": ranks, "rank": rank}
    by_torch: DistributedSampler[Any] = DistributedSampler(Noisy(), **part)
    lengths = LengthBatchSampler(range(1, 1 + LENGTH), max_tokens=64, **part)  # type: ignore[arg-type]
    return {
        "divided by torch": read(sampler=by_torch),
        "divided by torch, by sample": read(sampler=by_torch, seeding="sample"),
        "divided by torch, by sample, no workers": read(sampler=by_torch, seeding="sample", num_workers=0),
        "divided in batches": read(batch_sampler=BatchSampler(by_torch, 4, False)),
        "divided by ours": read(sampler=ElasticSampler(LENGTH, **part)),
        "divided by length": read(batch_sampler=lengths),
        "divided stream": read(Part(rank, ranks)),
        "divided as told": read(shuffle=True, seeding_rank=rank),
        "whole": read(shuffle=True),
        "whole, by sample": read(shuffle=True, seeding="sample"),
        "whole stream": read(Stream()),
    }


def go_on(mesh: DeviceMesh, steps: int, load_from: str, save_to: str) -> list[list[list[float]]]:
    """Return a few batches of an epoch, or all that are left of it. The last rank of all saves for everybody."""
    torch.manual_seed(7)
    sampler = ElasticSampler(LENGTH, num_replicas=mesh["dp"].size(), rank=mesh["dp"].get_local_rank())
    loader: DataLoader[Any] = DataLoader(Noisy(), batch_size=2, num_workers=1, sampler=sampler)
    if load_from:
        loader.load_state_dict(torch.load(load_from))
    with iter(loader) as iterator:
        batches = [batch.tolist() for batch in itertools.islice(iterator, steps)]
        if save_to and dist.get_rank() == dist.get_world_size() - 1:
            torch.save(loader.state_dict(), save_to)
    return batches


def main() -> None:
    dist.init_process_group("gloo")
    dp, tp, *rest = sys.argv[1:] or ("2", "2")
    mesh = init_device_mesh("cpu", (int(dp), int(tp)), mesh_dim_names=("dp", "tp"))
    if not rest:
        pipe: Any = IterableWrapper(range(8)).sharding_filter().map(draw)
        assert data_rank(inside.options(DataLoader(pipe))) == dist.get_rank()
    tell(dist.get_rank(), go_on(mesh, int(rest[0]), *rest[1:]) if rest else draw_all(mesh))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
