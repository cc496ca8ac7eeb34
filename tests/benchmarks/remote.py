"""remote: what comes from workers that are actors of Ray, in the trainer's raylet and in another one of this machine.

2 actors each, persistent, when both are there, after an epoch that is not counted; beside 2 local processes.

- tiny batches: of 8 ints each, 1,500 an epoch.
- large batches: 38.5 MB of float32 (64 images of 3 x 224 x 224), 24 an epoch, each from memory of the worker.

Seen on 2 cores with some twenty busy processes beside it: tiny batches 5,500 and 2,400 a second, large ones 1.6 to 1.9
GB/s in one raylet, and 0.3 to 0.4 between two (0.56 on a quiet machine, by a sketch of this).

To be held: 1.5 GB/s in one raylet, and 700 tiny batches a second.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
from torch.utils.data import Dataset

from tests.benchmarks.bench import Bench, main
from tests.benchmarks.dispatch import Ints
from tests.benchmarks.measure import Run, cpu_seconds
from tests.clusters.clusters import make_cluster

SHAPE = (64, 3, 224, 224)
COUNT = 24
TINY = 1500
STORE_BYTES = 1 << 30


class Images(Dataset[torch.Tensor]):
    """Batches of images that are in memory."""

    def __init__(self) -> None:
        self.images: torch.Tensor | None = None

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.images is None:
            self.images = torch.rand(SHAPE)
        return self.images


def epoch(loader: Any, scale: float) -> Run:
    """Run through one epoch; return batches a second, or so many times that."""
    cpu, began, count = cpu_seconds(), time.perf_counter(), 0
    for _ in loader:
        count += 1
    return Run(scale * count / (time.perf_counter() - began), {"cpu s": cpu_seconds() - cpu})


def measure(bench: Bench) -> None:
    from asyncloader.ray import RayWorkers

    rounds, large = 3 if bench.quick else 7, 4 * torch.Size(SHAPE).numel() / 1e9
    for place, head, others in (("one raylet", 2, 0), ("two raylets", 0, 2)):
        with make_cluster(num_cpus=head, object_store_memory=STORE_BYTES) as cluster:
            if others:
                cluster.add_node(num_cpus=others, object_store_memory=STORE_BYTES)
            for title, unit, dataset, batch_size, scale in (
                (f"tiny batches, {place}", "batches/s", Ints(8 * TINY), 8, 1.0),
                (f"large batches, {place}", "GB/s", Images(), None, large),
            ):
                make = partial(bench.loaders["ours"], dataset, batch_size, persistent_workers=True)
                loaders = {"local": make(num_workers=2), "Ray": make(worker_backend=RayWorkers(2))}
                sides: dict[str, Any] = {name: partial(epoch, each, scale) for name, each in loaders.items()}
                while loaders["Ray"].stats().num_workers < 2:
                    sides["Ray"]()
                sides["local"]()
                bench.compare(title, unit, sides, rounds=rounds, workers_stay=True)
                for each in loaders.values():
                    each.close()


if __name__ == "__main__":
    main(__doc__ or "", measure)
