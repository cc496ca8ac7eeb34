"""A program: Ray Train on two processes, which Ray starts. Each tells what it trained on, and what Ray made of loaders.

python tests/frameworks/ray_ranks.py
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from torch import nn
from torch.utils.data import DistributedSampler

from asyncloader import DataLoader
from asyncloader.samplers import ElasticSampler
from tests.frameworks.witness import Line, Stream, assert_made_by_torch, assert_made_by_us, indices
from tests.support.ranks import tell

LENGTH = 40
KEPT = {"add_dist_sampler": False}


def make_loader(dataset: Any = None, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset or Line(LENGTH), batch_size=4, num_workers=2, **options)


def prepare(loader: DataLoader[Any], **arguments: Any) -> tuple[Any, list[warnings.WarningMessage]]:
    """Let Ray prepare a loader; return what it made, and what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prepared = ray.train.torch.prepare_data_loader(loader, **arguments)
    return prepared, caught


def train_with_the_line() -> dict[str, Any]:
    """Train on what Ray makes of a loader that has its sampler and is to be given none."""
    torch.manual_seed(ray.train.get_context().get_world_rank())  # the same weights must come from DDP
    layer = nn.Linear(1, 1)
    model = ray.train.torch.prepare_model(layer)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sampler = DistributedSampler(Line(LENGTH))
    loader = make_loader(sampler=sampler, scheduling="dynamic")
    prepared, caught = prepare(loader, **KEPT)
    assert prepared._dataloader is loader  # the rest is a wrapper that moves batches to the device
    assert not caught
    epochs, states = [], []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        batches = []
        for batch in prepared:
            states.append(loader.state_dict())
            optimizer.zero_grad()
            nn.functional.mse_loss(model(batch["x"]), batch["y"]).backward()
            optimizer.step()
            batches.append(batch)
        assert_made_by_us(batches, num_workers=2)
        epochs.append(indices(batches))
    return {"epochs": epochs, "weight": layer.weight.item(), "rest": go_on(sampler, states[6])}


def go_on(sampler: Any, state: dict[str, Any]) -> list[int]:
    """Load what was left of an epoch when a state was taken."""
    loader = make_loader(sampler=sampler)
    loader.load_state_dict(state)
    return indices(loader)


def see_other_ways_to_keep_it() -> dict[str, Any]:
    """Look at the loaders that Ray leaves alone by itself, and at the one that is to stay where it is."""
    given = make_loader(sampler=DistributedSampler(Line(LENGTH)))
    untouched, caught = prepare(given, move_to_device=False, **KEPT)
    assert untouched is given
    kept = {
        "elastic": (make_loader(sampler=ElasticSampler(LENGTH)), KEPT),
        "by its sampler": (make_loader(sampler=DistributedSampler(Line(LENGTH))), {}),
        "stream": (make_loader(Stream(LENGTH)), {}),
    }
    found = {}
    for name, (loader, arguments) in kept.items():
        prepared, more = prepare(loader, **arguments)
        caught += more
        assert prepared._dataloader is loader
        batches = list(prepared)
        assert_made_by_us(batches, num_workers=2)
        found[name] = indices(batches)
    assert not caught
    return found


def see_what_happens_without() -> dict[str, Any]:
    """Let Ray put its sampler in: then torch loads."""
    prepared, _ = prepare(make_loader(shuffle=True))
    assert type(prepared._dataloader) is torch.utils.data.DataLoader
    batches = list(prepared)
    assert_made_by_torch(batches)
    return {"without": indices(batches)}


def train() -> None:
    found = train_with_the_line() | see_other_ways_to_keep_it() | see_what_happens_without()
    tell(ray.train.get_context().get_world_rank(), {**found, "session": os.getsid(0)})


def main() -> None:
    os.environ.update(RAY_worker_niceness="0")  # see tests/clusters/clusters.py
    ray.init("local", num_cpus=2, include_dashboard=False, object_store_memory=100 << 20)
    trainer = ray.train.torch.TorchTrainer(
        train,
        scaling_config=ray.train.ScalingConfig(num_workers=2, use_gpu=False, resources_per_worker={"CPU": 1}),
        run_config=ray.train.RunConfig(storage_path=os.environ["TOLD_IN"]),
    )
    trainer.fit()
    ray.shutdown()


if __name__ == "__main__":
    main()
