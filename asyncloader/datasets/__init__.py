"""Datasets that are ready to use: each is an ordinary dataset, and awaited by our loader where its data lie elsewhere.

    RemoteDataset                 objects over HTTP, in S3, GCS, Azure                       asyncloader[remote]
    SharedList                    rows in memory once for all workers
    CachedDataset                 samples of a slow dataset, made once and kept
    ParallelMap                   the items of a stream, read once and worked on by all workers

``dataset[0]`` is a sample, ``for sample in dataset`` ends, and torch's DataLoader, Subset and random_split take them;
see :class:`asyncloader.typing.TwoFacedDataset`. All can be pickled.
"""

from asyncloader.datasets.cached import CachedDataset
from asyncloader.datasets.parallel_map import ParallelMap
from asyncloader.datasets.remote import FetchError, RemoteDataset
from asyncloader.datasets.shared import SharedList

__all__ = [
    "CachedDataset",
    "FetchError",
    "ParallelMap",
    "RemoteDataset",
    "SharedList",
]
