"""A program, run once per rank: ranks that have read differently far change the weights of one sampler."""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch.distributed as dist

from asyncloader import ConfigurationError
from asyncloader.samplers import WeightedSampler
from tests.ranks import tell

COUNT = 40


def refused(sampler: WeightedSampler, weights: list[float], **options: Any) -> str:
    try:
        sampler.update([1, 2], weights, **options)
    except ConfigurationError as error:
        return str(error)
    return ""


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found: dict[str, Any] = {}

    sampler = WeightedSampler([1.0] * COUNT, 600)
    samples = iter(sampler)
    drawn = list(islice(samples, 5 + 3 * rank))
    sampler.update([3, 4], [50.0, 20.0])
    drawn += islice(samples, 20 - 3 * rank)
    sampler.update([4, 5], [1.0, 60.0], at=120)
    found["refused at"] = refused(sampler, [1.0, 2.0], at=74)
    found["refused weights"] = refused(sampler, [1.0, 2.0 + (rank == 1)])
    before = sampler.state_dict()
    found["drawn"] = drawn + list(samples)

    once = WeightedSampler([1.0] * COUNT, 30, replacement=False)
    once_samples = iter(once)
    drawn = list(islice(once_samples, 2 * rank))
    once.update([3, 4], [50.0, 20.0])
    found["once"] = drawn + list(once_samples) + list(once)

    found["refused initial"] = refused(WeightedSampler([1.0 + (rank == 2)] * COUNT), [1.0, 2.0])
    resumed = WeightedSampler([1.0] * COUNT, 600)
    if rank:
        resumed.load_state_dict(before)
    found["refused before"] = refused(resumed, [1.0, 2.0])

    group = dist.new_group([0, 2])
    if rank != 1:
        pair = WeightedSampler([1.0] * COUNT, 600, num_replicas=2, rank=rank // 2)
        pair_samples = iter(pair)
        drawn = list(islice(pair_samples, 4 + rank))
        pair.update([3, 4], [50.0, 20.0], group=group)
        found["pair"] = drawn + list(pair_samples)
        pair.set_epoch(5 + rank)
    else:
        pair = sampler
    found["refused in group"] = refused(pair, [1.0, 2.0], group=group)
    tell(rank, found)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
