"""A program, run once per rank: goes on with an epoch, a few steps or to its end, on however many ranks there are.

python tests/support/elastic_ranks.py CHECKPOINT_TO_LOAD_OR_NOTHING CHECKPOINT_TO_SAVE_OR_NOTHING STEPS
"""

from __future__ import annotations

import sys
import warnings

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from asyncloader import DataLoader
from asyncloader.samplers import ElasticSampler
from tests.support.ranks import tell

LENGTH = 203


def main() -> None:
    load_from, save_to, steps = sys.argv[1:]
    warnings.simplefilter("ignore", FutureWarning)
    dist.init_process_group("gloo")
    sampler = ElasticSampler(LENGTH, seed=3)
    loader: DataLoader[int] = DataLoader(range(LENGTH), batch_size=4, sampler=sampler, num_workers=1)  # type: ignore[arg-type]
    sampler.set_epoch(1)
    if load_from:
        dcp.load({"loader": loader}, checkpoint_id=load_from)
    sampler.set_epoch(1)
    epochs: list[list[list[int]]] = [[]]
    iterator = iter(loader)
    while len(epochs[0]) < int(steps) and (batch := next(iterator, None)) is not None:
        epochs[0].append(batch.tolist())
    if save_to:
        dcp.save({"loader": loader}, checkpoint_id=save_to)
    else:
        sampler.set_epoch(2)
        epochs.append([batch.tolist() for batch in loader])
    iterator.close()
    tell(dist.get_rank(), epochs)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
