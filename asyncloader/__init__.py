"""A data loader for training: torch's DataLoader, for `for` and for `async for`.

from asyncloader import DataLoader

for batch in loader: ...
async for batch in loader: ...
"""

import importlib.util
import logging
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


class _NamedLastResort(logging.Handler):
    """Shows warnings of a program that has no handlers for them, under the name of this library.

    Python's own last resort, whose place this one takes, shows the message alone.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record to where Python would, unless the program has a handler for it."""
        logger: logging.Logger | None = logging.getLogger(record.name)
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return
            logger = logger.parent if logger.propagate else None
        if logging.lastResort is not None and record.levelno >= logging.lastResort.level:
            named = logging.makeLogRecord({**vars(record), "msg": f"asyncloader: {record.getMessage()}", "args": None})
            logging.lastResort.handle(named)


logging.getLogger(__name__).addHandler(_NamedLastResort())


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
