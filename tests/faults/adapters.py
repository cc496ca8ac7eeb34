"""Adapters of loaders for `asyncloader.testing.suite`: how each is made, and where its state is."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from typing import Any

import torch.utils.data
from torch.utils.data import Dataset, DistributedSampler

from asyncloader.testing.suite import BATCH_SIZE, Adapter


class Ours(Adapter):
    """asyncloader's, with the option for the case where there is one."""

    def make(
        self, dataset: Dataset[float], case: str, *, num_workers: int = 2, shuffle: bool = False, **ranks: int
    ) -> Any:
        from asyncloader import DataLoader

        options: dict[str, dict[str, Any]] = {
            "hang": {"timeout": 1, "on_timeout": "retry"},
            "skip": {"on_error": "skip"},
            "leak": {"max_worker_memory": 100_000_000},
        }
        if ranks:
            from asyncloader.samplers import ElasticSampler

            sampler = ElasticSampler(dataset, ranks["num_ranks"], ranks["rank"])  # type: ignore[arg-type]
            return DataLoader(dataset, BATCH_SIZE, sampler=sampler, num_workers=num_workers)
        return DataLoader(dataset, BATCH_SIZE, shuffle, num_workers=num_workers, **options.get(case, {}))


class Torch(Adapter):
    """torch's own. It has no states."""

    loader_class: Any = torch.utils.data.DataLoader
    sampler_class: Any = DistributedSampler

    def make(
        self, dataset: Dataset[float], case: str, *, num_workers: int = 2, shuffle: bool = False, **ranks: int
    ) -> Any:
        sampler = None
        if ranks:
            shuffle, sampler = False, self.sampler_class(dataset, ranks["num_ranks"], ranks["rank"])
        options = {"num_workers": num_workers, "timeout": case == "hang"}
        return self.loader_class(dataset, BATCH_SIZE, shuffle, sampler, **options)


class Stateful(Torch):
    """torchdata's StatefulDataLoader."""

    def make(
        self, dataset: Dataset[float], case: str, *, num_workers: int = 2, shuffle: bool = False, **ranks: int
    ) -> Any:
        from torchdata.stateful_dataloader import StatefulDataLoader
        from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

        self.loader_class, self.sampler_class = StatefulDataLoader, StatefulDistributedSampler
        return super().make(dataset, case, num_workers=num_workers, shuffle=shuffle, **ranks)


class Spdl(Adapter):
    """SPDL's loader with torch's interface. It has no states."""

    def make(
        self, dataset: Dataset[float], case: str, *, num_workers: int = 2, shuffle: bool = False, **ranks: int
    ) -> Any:
        from spdl.dataloader import get_pytorch_dataloader

        timeout = 1 if case == "hang" else None
        sampler = None
        if ranks:
            shuffle, sampler = False, DistributedSampler(dataset, ranks["num_ranks"], ranks["rank"])
        return get_pytorch_dataloader(
            dataset, BATCH_SIZE, shuffle, sampler, num_workers=num_workers, timeout=timeout, in_order=True
        )


class Nodes(Adapter):
    """torchdata.nodes: forked workers make whole batches."""

    def make(
        self, dataset: Dataset[float], case: str, *, num_workers: int = 2, shuffle: bool = False, **ranks: int
    ) -> Any:
        import torchdata.nodes as tn

        seeded = torch.Generator().manual_seed(0)  # a sampler of torch's has no state, and is drawn again
        sampler: torch.utils.data.Sampler[int] = torch.utils.data.SequentialSampler(dataset)  # type: ignore[arg-type]
        if shuffle:
            sampler = torch.utils.data.RandomSampler(dataset, generator=seeded)  # type: ignore[arg-type]
        if ranks:
            sampler = DistributedSampler(dataset, ranks["num_ranks"], ranks["rank"])
        keys = tn.Batcher(tn.SamplerWrapper(sampler), BATCH_SIZE)
        made = tn.ParallelMapper(keys, _Fetch(dataset), num_workers, method="process", multiprocessing_context="fork")
        return tn.Loader(made)


class _Fetch:
    def __init__(self, dataset: Dataset[float]) -> None:
        self.dataset = dataset

    def __call__(self, keys: list[int]) -> torch.Tensor:
        return torch.tensor([self.dataset[key] for key in keys], dtype=torch.float64)


class Grain(Adapter):
    """Grain's DataLoader. Its workers are spawned, and its iterators have the states."""

    def make(
        self, dataset: Dataset[float], case: str, *, num_workers: int = 2, shuffle: bool = False, **ranks: int
    ) -> Any:
        import grain

        if case.startswith("resume "):  # on other workers and ranks, for which Grain has this
            shard = grain.sharding.ShardOptions(ranks.get("rank", 0), ranks.get("num_ranks", 1))
            workers = grain.multiprocessing.MultiprocessingOptions(num_workers)
            samples = grain.MapDataset.source(dataset).shuffle(seed=0)
            return grain.experimental.ElasticIterator(
                samples, BATCH_SIZE * shard.shard_count, shard, multiprocessing_options=workers
            )
        sampler = grain.samplers.IndexSampler(len(dataset), shuffle=shuffle, num_epochs=1, seed=0)  # type: ignore[arg-type]
        batch = grain.transforms.Batch(BATCH_SIZE)
        return grain.DataLoader(data_source=dataset, sampler=sampler, operations=[batch], worker_count=num_workers)

    def state(self, loader: Any, iterator: Any) -> Any:
        return iterator.get_state()

    def load(self, loader: Any, state: Any) -> Iterator[Any]:
        iterator: Iterator[Any] = iter(loader)
        iterator.set_state(state)  # type: ignore[attr-defined]
        return iterator


class Litdata(Adapter):
    """litdata's StreamingDataLoader. Its chunks have the indices, of which the dataset makes samples in the workers."""

    folder: tempfile.TemporaryDirectory[str] | None = None

    def make(
        self, dataset: Dataset[float], case: str, *, num_workers: int = 2, shuffle: bool = False, **ranks: int
    ) -> Any:
        from litdata import StreamingDataLoader, StreamingDataset
        from litdata.streaming import Cache

        if self.folder is None:
            self.folder = tempfile.TemporaryDirectory()
            chunks: Any = Cache(self.folder.name, chunk_size=2 * BATCH_SIZE)
            for index in range(len(dataset)):  # type: ignore[arg-type]
                chunks[index] = index
            chunks.done()
            chunks.merge()
        if ranks:
            os.environ.update(WORLD_SIZE=str(ranks["num_ranks"]), GLOBAL_RANK=str(ranks["rank"]))
        samples: Any = StreamingDataset(
            self.folder.name, shuffle=shuffle, drop_last=False, transform=dataset.__getitem__
        )
        return StreamingDataLoader(samples, batch_size=BATCH_SIZE, num_workers=num_workers, timeout=case == "hang")
