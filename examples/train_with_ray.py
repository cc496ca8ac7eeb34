"""Train with workers on the nodes of a Ray cluster, and lose a node on the way.

python examples/train_with_ray.py                 # a cluster of two nodes on this machine, one of which is killed
python examples/train_with_ray.py --address auto  # the cluster that this machine is a node of; nothing is killed

Needs the extra `ray`. The dataset says which process has made a sample, so that it can be told who did what.
"""

import argparse
import os
import time
from collections import Counter
from typing import Any

import ray
import torch
from ray.cluster_utils import Cluster
from torch.utils.data import Dataset

from asyncloader import DataLoader
from asyncloader.ray import RayWorkers

SAMPLES = 2048


class Waves(Dataset[tuple[torch.Tensor, torch.Tensor, int]]):
    """Noisy waves, each with its frequency, which a network is to find out."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        time.sleep(0.002)  # as if it were read from a disk
        frequency = 1.0 + 4.0 * index / SAMPLES
        at = torch.linspace(0.0, 1.0, 64)
        wave = torch.sin(frequency * at * 6.28) + 0.1 * torch.randn(64)
        return wave, torch.tensor([frequency]), os.getpid()


def start_cluster() -> tuple[Any, list[Any]]:
    """Start a cluster on this machine: a head without room for workers, and two nodes with some."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    nodes = [cluster.add_node(num_cpus=2, object_store_memory=80 << 20) for _ in range(2)]
    return cluster, nodes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--address", help="of a cluster; without, one is started here")
    parser.add_argument("--epochs", type=int, default=8)
    arguments = parser.parse_args()

    cluster: Any = None
    nodes: list[Any] = []
    if arguments.address is None:
        cluster, nodes = start_cluster()
    ray.init(arguments.address or cluster.address, log_to_driver=False, logging_level="ERROR")

    torch.manual_seed(0)
    loader = DataLoader(
        Waves(),
        batch_size=32,
        shuffle=True,
        worker_backend=RayWorkers(4),
        persistent_workers=True,
        scheduling="dynamic",
    )
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    seen: Counter[int] = Counter()
    makers: set[int] = set()
    loss = torch.zeros(())
    for epoch in range(arguments.epochs):
        for step, (waves, frequencies, pids) in enumerate(loader):
            loss = torch.nn.functional.mse_loss(model(waves), frequencies)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            seen[epoch] += len(waves)
            makers |= set(pids.tolist())
            if len(nodes) > 1 and step % 10 == 9 and loader.stats().num_workers == 4:  # all are there: lose some
                cluster.remove_node(nodes.pop(), allow_graceful=False)
                print("a node was killed")
        print(f"epoch {epoch}: loss {loss.item():.3f}, {loader.stats().num_workers} workers at its end")
    loader.close()
    ray.shutdown()
    if cluster is not None:
        cluster.shutdown()
    assert set(seen.values()) == {SAMPLES}
    print(f"{len(makers)} processes made {sum(seen.values())} samples: {SAMPLES} in each epoch, none lost or doubled")


if __name__ == "__main__":
    main()
