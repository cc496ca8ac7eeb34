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
    WorkerDiedError,
    WorkerError,
    WorkerStartError,
)
from asyncloader.loader import DataLoader

__version__ = "0.1.0"

__all__ = [
    "AsyncLoaderError",
    "BatchTimeoutError",
    "ConfigurationError",
    "DataLoader",
    "LoaderClosedError",
    "WorkerDiedError",
    "WorkerError",
    "WorkerStartError",
]
