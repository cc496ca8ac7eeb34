"""Datasets that are ready to use: each is an ordinary dataset, and awaited by our loader where its data lie elsewhere.

    FileDataset                   files under a folder
    RemoteDataset, list_urls      objects over HTTP, in S3, GCS, Azure, or ranges of them    asyncloader[remote]
    TarShards                     tar files in WebDataset's layout, by number, in any order
    ParquetDataset                rows of Parquet files                                      asyncloader[parquet]
    TokenBlocks                   blocks of tokens: nanoGPT's .bin, Megatron's .bin and .idx
    SharedList, SharedDict        rows in memory once for all workers
    CachedDataset                 samples of a slow dataset, made once and kept
    ParallelMap                   the items of a stream, read once and worked on by all workers

``dataset[0]`` is a sample, ``for sample in dataset`` ends, and torch's DataLoader, Subset and random_split take them;
see :class:`asyncloader.typing.TwoFacedDataset`. All can be pickled.
"""

from asyncloader.datasets.cached import CachedDataset
from asyncloader.datasets.errors import FetchError
from asyncloader.datasets.files import FileDataset
from asyncloader.datasets.parallel_map import ParallelMap
from asyncloader.datasets.parquet import ParquetDataset
from asyncloader.datasets.remote import RemoteDataset, list_urls
from asyncloader.datasets.shared import SharedList
from asyncloader.datasets.shared_dict import SharedDict
from asyncloader.datasets.tar_shards import TarShards
from asyncloader.datasets.tokens import TokenBlocks

__all__ = [
    "CachedDataset",
    "FetchError",
    "FileDataset",
    "ParallelMap",
    "ParquetDataset",
    "RemoteDataset",
    "SharedDict",
    "SharedList",
    "TarShards",
    "TokenBlocks",
    "list_urls",
]
