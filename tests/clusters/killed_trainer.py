"""A trainer that says who makes its batches, and goes on for ever.

python tests/clusters/killed_trainer.py ADDRESS
"""

import os
import sys

import ray
from torch.utils.data import Dataset

from asyncloader import DataLoader
from asyncloader.ray import RayWorkers


class Endless(Dataset[int]):
    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, index: int) -> int:
        return os.getpid()


def main() -> None:
    ray.init(sys.argv[1], log_to_driver=False, logging_level="ERROR")
    loader = DataLoader(Endless(), 1, worker_backend=RayWorkers(2))
    iterator = iter(loader)
    pids = {int(next(iterator))}
    while len(pids) < 2:
        pids.add(int(next(iterator)))
    print(*pids, flush=True)
    for _ in iterator:
        pass


if __name__ == "__main__":
    main()
