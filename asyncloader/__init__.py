"""A data loader for training: torch's DataLoader with an asyncio heart.

from asyncloader import DataLoader

for batch in loader: ...
async for batch in loader: ...
"""

from asyncloader.errors import (
    AsyncLoaderError,
    BatchTimeoutError,
    ConfigurationError,
    LoaderClosedError,
    StateMismatchError,
    WorkerDiedError,
    WorkerError,
    WorkerStartError,
)
from asyncloader.loader import DataLoader
from asyncloader.protocols import AsyncBatchDataset, AsyncDataset, AsyncIterableDataset, AsyncResource
from asyncloader.samplers import ElasticSampler
from asyncloader.stats import LoaderStats
from asyncloader.trace import tracing
from asyncloader.workers.place import sample_rng

__version__ = "0.1.0"

__all__ = [
    "AsyncBatchDataset",
    "AsyncDataset",
    "AsyncIterableDataset",
    "AsyncLoaderError",
    "AsyncResource",
    "BatchTimeoutError",
    "ConfigurationError",
    "DataLoader",
    "ElasticSampler",
    "LoaderClosedError",
    "LoaderStats",
    "StateMismatchError",
    "WorkerDiedError",
    "WorkerError",
    "WorkerStartError",
    "sample_rng",
    "tracing",
]
