"""A program, run once per rank: how frameworks divide our loaders' data on a mesh of 2 (data) x 2 (tensor) ranks.

python tests/frameworks/mesh_ranks.py accelerate|fabric
python tests/frameworks/mesh_ranks.py checkpoint FOLDER     # on any ranks: Accelerate goes on in the middle of an epoch
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset

import asyncloader
from asyncloader import DataLoader
from asyncloader.run.data_rank import data_rank
from tests.support import inside
from tests.support.ranks import tell


class Noisy(Dataset[Tensor]):
    """Indices, each with a number that is drawn in the worker."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, torch.rand(())])


def make_loader(batch_size: int = 4) -> DataLoader[Tensor]:
    return DataLoader(Noisy(), batch_size, num_workers=1, generator=torch.Generator().manual_seed(1))


def prepare_with_accelerate() -> Any:
    """Have Accelerate shard the batches, as `Accelerator.prepare` does where there is a mesh."""
    import accelerate.data_loader
    from accelerate import PartialState
    from torch.distributed.device_mesh import init_device_mesh

    vars(accelerate.data_loader)["DataLoader"] = asyncloader.DataLoader
    PartialState(cpu=True)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    return accelerate.data_loader.prepare_data_loader(make_loader(), torch_device_mesh=mesh).base_dataloader


def prepare_with_fabric() -> Any:
    """Have Fabric put in the sampler of its data-parallel mesh."""
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    strategy = ModelParallelStrategy(lambda module, mesh: module, data_parallel_size=2, tensor_parallel_size=2)
    fabric = Fabric(accelerator="cpu", devices=4, strategy=strategy)
    fabric.launch()
    return fabric.setup_dataloaders(make_loader(), move_to_device=False)._dataloader


def go_on_with_accelerate(folder: str) -> tuple[list[Any], list[Any]]:
    """Return the rest of an epoch, without and with a checkpoint, of which Accelerate writes the first rank's state."""
    import accelerate.data_loader
    from accelerate import Accelerator

    vars(accelerate.data_loader)["DataLoader"] = asyncloader.DataLoader
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(make_loader(2))
    accelerator.register_for_checkpointing(loader)
    whole = []
    for number, batch in enumerate(loader):
        whole.append(batch.tolist())
        if number == 1:
            accelerator.save_state(folder)
    accelerator.wait_for_everyone()  # the first rank may still be writing
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(make_loader(2))
    accelerator.register_for_checkpointing(loader)
    accelerator.load_state(folder)
    return whole[2:], [batch.tolist() for batch in loader]


def divide(framework: str) -> dict[str, Any]:
    """Return the rank of the data of a loader that a framework has made, and its batches."""
    loader = {"accelerate": prepare_with_accelerate, "fabric": prepare_with_fabric}[framework]()
    assert type(loader) is DataLoader
    batches = [batch.tolist() for batch in loader]
    return {"rank": data_rank(inside.options(loader)), "batches": batches}


if __name__ == "__main__":
    found = go_on_with_accelerate(sys.argv[2]) if sys.argv[1] == "checkpoint" else divide(sys.argv[1])
    tell(dist.get_rank(), found)
    dist.barrier()
    dist.destroy_process_group()
