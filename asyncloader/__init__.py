"""A data loader for training: torch's DataLoader with an asyncio heart.

from asyncloader import DataLoader

for batch in loader: ...
async for batch in loader: ...
"""

import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncloader.datasets.shared import SharedList
    from asyncloader.datasets.shared_dict import SharedDict
    from asyncloader.engine.portal import shutdown
    from asyncloader.errors import (
        AsyncLoaderError,
        BatchTimeoutError,
        ConfigurationError,
        InternalError,
        LoaderClosedError,
        StateMismatchError,
        WorkerDiedError,
        WorkerError,
        WorkerStartError,
    )
    from asyncloader.loader import DataLoader
    from asyncloader.observe.stats import LoaderStats
    from asyncloader.observe.trace import tracing
    from asyncloader.protocols import AsyncBatchDataset, AsyncDataset, AsyncIterableDataset, AsyncResource
    from asyncloader.samplers import ElasticSampler
    from asyncloader.seeding.sample_context import sample_rng
    from asyncloader.seeding.turns import sample_seed
else:

    def __getattr__(name: str) -> Any:
        """Import what is asked for (PEP 562): workers that are spawned import this package, and need little of it."""
        if name in __all__:
            value = getattr(importlib.import_module(f"{__name__}.{_MODULES.get(name, 'errors')}"), name)
        elif name.isidentifier() and importlib.util.find_spec(f"{__name__}.{name}"):
            value = importlib.import_module(f"{__name__}.{name}")
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


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
    "InternalError",
    "LoaderClosedError",
    "LoaderStats",
    "SharedDict",
    "SharedList",
    "StateMismatchError",
    "WorkerDiedError",
    "WorkerError",
    "WorkerStartError",
    "sample_rng",
    "sample_seed",
    "shutdown",
    "tracing",
]

_MODULES = {
    "AsyncBatchDataset": "protocols",
    "AsyncDataset": "protocols",
    "AsyncIterableDataset": "protocols",
    "AsyncResource": "protocols",
    "DataLoader": "loader",
    "ElasticSampler": "samplers",
    "LoaderStats": "observe.stats",
    "SharedDict": "datasets.shared_dict",
    "SharedList": "datasets.shared",
    "sample_rng": "seeding.sample_context",
    "sample_seed": "seeding.turns",
    "shutdown": "engine.portal",
    "tracing": "observe.trace",
}
