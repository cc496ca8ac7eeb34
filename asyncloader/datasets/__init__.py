"""Datasets for data that lies elsewhere, ready to use: each opens its client in the worker and awaits its samples.

    FileDataset, ImageFolder      files under a folder
    HTTPDataset                   urls, or byte ranges of them                      asyncloader[http]
    ObjectStoreDataset            objects in S3, GCS, Azure or a folder             asyncloader[objects]
    FsspecDataset                 what else fsspec has a file system for            asyncloader[fsspec]
    SQLDataset                    rows of PostgreSQL by key                         asyncloader[sql]
    TarShards                     tar files in WebDataset's layout, one by one
    IndexedTarShards              the same by number, in any order
    TokenBlocks                   blocks of tokens: nanoGPT's .bin, Megatron's .bin and .idx
    ParquetDataset                rows of Parquet files                             asyncloader[parquet]
    SharedList, SharedDict        rows in memory once for all workers
    ArrayDataset                  rows of arrays, in memory or mapped
    CachedDataset                 samples of a slow dataset, made once and kept
    ParallelMap                   the items of a stream, read once and worked on by all workers

A :class:`~asyncloader.DataLoader` opens and closes them; without one, ``async with dataset: await dataset[0]``. All can
be pickled, whether open or not.
"""

from asyncloader.datasets.arrays import ArrayDataset
from asyncloader.datasets.cached import CachedDataset
from asyncloader.datasets.files import FileDataset, ImageFolder
from asyncloader.datasets.filesystems import FsspecDataset
from asyncloader.datasets.http import HTTPDataset
from asyncloader.datasets.indexed_shards import IndexedTarShards
from asyncloader.datasets.objects import ObjectStoreDataset
from asyncloader.datasets.parallel_map import ParallelMap
from asyncloader.datasets.parquet import ParquetDataset
from asyncloader.datasets.remote import ByteRange
from asyncloader.datasets.retry import FetchError, Retries
from asyncloader.datasets.shards import TarShards
from asyncloader.datasets.shared import SharedList
from asyncloader.datasets.shared_dict import SharedDict
from asyncloader.datasets.sql import SQLDataset
from asyncloader.datasets.tokens import TokenBlocks

__all__ = [
    "ArrayDataset",
    "ByteRange",
    "CachedDataset",
    "FetchError",
    "FileDataset",
    "FsspecDataset",
    "HTTPDataset",
    "ImageFolder",
    "IndexedTarShards",
    "ObjectStoreDataset",
    "ParallelMap",
    "ParquetDataset",
    "Retries",
    "SQLDataset",
    "SharedDict",
    "SharedList",
    "TarShards",
    "TokenBlocks",
]
