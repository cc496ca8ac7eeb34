"""A data loader for training: torch's DataLoader, for `for` and for `async for`.

from asyncloader import DataLoader

for batch in loader: ...
async for batch in loader: ...
"""

import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncloader.errors import (
        AsyncLoaderError,
        BatchTimeoutError,
        ConfigurationError,
        StateMismatchError,
        WorkerDiedError,
        WorkerError,
    )
    from asyncloader.loader import DataLoader
    from asyncloader.observe.stats import LoaderStats
    from asyncloader.seeding.sample_context import sample_rng
    from asyncloader.seeding.turns import sample_seed
    from asyncloader.wrap.device_iterator import to_device
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
    "AsyncLoaderError",
    "BatchTimeoutError",
    "ConfigurationError",
    "DataLoader",
    "LoaderStats",
    "StateMismatchError",
    "WorkerDiedError",
    "WorkerError",
    "sample_rng",
    "sample_seed",
    "to_device",
]

_MODULES = {
    "DataLoader": "loader",
    "LoaderStats": "observe.stats",
    "sample_rng": "seeding.sample_context",
    "sample_seed": "seeding.turns",
    "to_device": "wrap.device_iterator",
}
