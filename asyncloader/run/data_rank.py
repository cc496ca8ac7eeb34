"""Which part of the data this process reads: the rank in seeds.

    rank of the process group    0    1    2    3         mesh of 2 (data) x 2 (tensor)
    rank of the data             0    0    1    1         rank of the DistributedSampler
    batches and their seeds      a    a    b    b

Ranks that share the work on one sample (tensor, context and pipeline parallelism) have to draw the same augmentation
for it. The number of a process among all processes says nothing about that; whatever divides the data does.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import IterDataPipe, MapDataPipe

from asyncloader.epochs import as_number
from asyncloader.options import Options
from asyncloader.protocols import SuppliesKeys, members, probe
from asyncloader.run.plan import samplers_within
from asyncloader.samplers.ordered import place_in_group

_OF_SAMPLERS = ("rank", "process_index", "data_parallel_rank", "dp_rank", "_rank")
"""Attributes by which samplers say which part they give: those of torch, Lightning, timm, mmengine, lhotse and ours; of
Accelerate and Transformers; of Megatron, NeMo and DeepSpeed; of detectron2."""

_OF_STREAMS = (("rank", "world_size"), ("dp_rank", "dp_world_size"))
"""Attributes of iterable datasets that read a part. Both have to be there: a rank alone may serve something else."""


def data_rank(options: Options) -> int:
    """Return the rank of the data: as the user says, or what divides the data; 0 where nothing does.

    The outermost sampler that has a rank counts: it divides what samplers within it yield. Accelerate's and
    Transformers' `IterableDatasetShard` is not asked: each rank reads the whole stream within and keeps a part of it,
    so the streams have to draw alike on all ranks. Data pipes are divided by torch, among all ranks of the group.
    """
    if options.seeding_rank is not None:
        return options.seeding_rank
    dataset = options.dataset
    if isinstance(dataset, (IterDataPipe, MapDataPipe)):
        return place_in_group(None, None)[1]
    if options.is_iterable:
        return _of_stream(dataset)
    ranks = (_stated(sampler, name) for sampler in samplers_within(options.index_sampler) for name in _OF_SAMPLERS)
    if (rank := next((rank for rank in ranks if rank is not None), None)) is not None:
        return rank
    return _of_stream(probe(dataset, "stream")) if isinstance(dataset, SuppliesKeys) else 0


def _of_stream(dataset: Any) -> int:
    """Return the rank of the first stream that says which part it reads. Hugging Face's keep it in a record."""
    for member in members(dataset):
        for thing in (member, probe(member, "_distributed")):
            for rank, ranks in _OF_STREAMS:
                if _stated(thing, ranks) is not None and (stated := _stated(thing, rank)) is not None:
                    return stated
    return 0


def _stated(thing: Any, name: str) -> int | None:
    """Return an attribute that is a number from 0 on; None if there is none."""
    value = probe(thing, name)
    number = None if value is None or isinstance(value, bool) else as_number(value)
    return number if number is not None and number >= 0 else None
