"""The rank in seeds is that of the samplers and streams that frameworks make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
from accelerate.data_loader import BatchSamplerShard, SkipBatchSampler
from accelerate.data_loader import IterableDatasetShard as ShardOfAccelerate
from datasets.distributed import split_dataset_by_node
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.overrides.distributed import (
    UnrepeatedDistributedSampler,
    UnrepeatedDistributedSamplerWrapper,
    _IndexBatchSamplerWrapper,
)
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler
from transformers.trainer_pt_utils import (
    BatchRebalanceSampler,
    DistributedLengthGroupedSampler,
    DistributedSamplerWithLoop,
    ShardSampler,
)
from transformers.trainer_pt_utils import IterableDatasetShard as ShardOfTransformers

from asyncloader import DataLoader
from asyncloader.run.data_rank import data_rank
from tests.frameworks.witness import Stream
from tests.support import inside
from tests.support.ranks import run_launcher, run_ranks

PROGRAM = Path(__file__).with_name("mesh_ranks.py")
DATA: Any = range(24)
THIRD: Any = {"num_replicas": 4, "rank": 2}
BATCHES: Any = BatchSampler(SequentialSampler(DATA), 4, False)

SAMPLERS = {
    "DistributedSamplerWrapper": DistributedSamplerWrapper(RandomSampler(DATA), **THIRD),
    "UnrepeatedDistributedSampler": UnrepeatedDistributedSampler(DATA, **THIRD),
    "UnrepeatedDistributedSamplerWrapper": UnrepeatedDistributedSamplerWrapper(SequentialSampler(DATA), **THIRD),
    "DistributedLengthGroupedSampler": DistributedLengthGroupedSampler(4, lengths=[1] * 24, **THIRD),
    "DistributedSamplerWithLoop": DistributedSamplerWithLoop(DATA, batch_size=4, **THIRD),
    "ShardSampler": ShardSampler(DATA, 4, num_processes=4, process_index=2),
}
BATCH_SAMPLERS = {
    "BatchSamplerShard": BatchSamplerShard(BATCHES, 4, 2),
    "BatchSamplerShard, split": BatchSamplerShard(BATCHES, 4, 2, split_batches=True),
    "SkipBatchSampler": SkipBatchSampler(BatchSamplerShard(BATCHES, 4, 2), 1),
    "_IndexBatchSamplerWrapper": _IndexBatchSamplerWrapper(BatchSampler(DistributedSampler(DATA, **THIRD), 4, False)),
    "BatchRebalanceSampler": BatchRebalanceSampler([1] * 24, effective_batch_size=8, dp_size=4, grad_accum=1, rank=2),
}


def rank_of(dataset: Any = DATA, **options: Any) -> int:
    loader: DataLoader[Any] = DataLoader(dataset, **options)
    return data_rank(inside.options(loader))


@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers(name: str) -> None:
    """Of Lightning and Transformers."""
    assert rank_of(sampler=SAMPLERS[name]) == 2


@pytest.mark.parametrize("name", BATCH_SAMPLERS)
def test_batch_samplers(name: str) -> None:
    """Of Accelerate, Lightning and Transformers."""
    assert rank_of(batch_sampler=BATCH_SAMPLERS[name]) == 2


def test_streams_of_hugging_face() -> None:
    """One that is split by node says which part it is."""
    stream: Any = datasets.Dataset.from_dict({"number": range(24)}).to_iterable_dataset(num_shards=4)
    assert rank_of(split_dataset_by_node(stream, rank=2, world_size=4)) == 2
    assert rank_of(stream) == 0


def test_streams_that_each_rank_reads_whole() -> None:
    """All ranks read the stream within and keep a part: it has to be the same on all, so they draw alike."""
    assert rank_of(ShardOfAccelerate(Stream(24), num_processes=4, process_index=2)) == 0
    assert rank_of(ShardOfTransformers(Stream(24), num_processes=4, process_index=2)) == 0


@pytest.mark.parametrize(("framework", "run"), [("accelerate", run_ranks), ("fabric", run_launcher)])
def test_a_mesh(framework: str, run: Any, tmp_path: Path) -> None:
    """On 2 x 2 ranks the framework divides the data by two; the ranks of one half draw the same numbers."""
    ranks = run(PROGRAM, tmp_path, framework, ranks=4)
    assert [each["rank"] for each in ranks] == [0, 0, 1, 1]
    assert ranks[0] == ranks[1]
    assert ranks[2] == ranks[3]
    samples = [sample for rank in ranks[::2] for batch in rank["batches"] for sample in batch]
    assert sorted(index for index, _ in samples) == list(range(16))
    assert len({drawn for _, drawn in samples}) == 16


def test_one_state_for_all_ranks(tmp_path: Path) -> None:
    """Accelerate saves the state of the first rank alone: each rank goes on from it with numbers of its own."""
    ranks = run_ranks(PROGRAM, tmp_path, "checkpoint", str(tmp_path / "checkpoint"))
    for whole, resumed in ranks:
        assert whole
        assert whole == resumed
    assert ranks[0] != ranks[1]
