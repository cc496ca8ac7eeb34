"""Types for annotations: protocols of datasets, and what loaders return.

AsyncDataset, AsyncBatchDataset, AsyncIterableDataset,       what a dataset may be; none needs to be a base class
AsyncResource, TwoFacedDataset
BaseIterator                                                 of ``iter(loader)`` and ``aiter(loader)``
Faults, Stages, Timing, Verdict, Waiting, Workers,
WorkerStats                                                  parts of :class:`asyncloader.LoaderStats`
"""

import importlib
from typing import TYPE_CHECKING, Any

from asyncloader.protocols import (
    AsyncBatchDataset,
    AsyncDataset,
    AsyncIterableDataset,
    AsyncResource,
    TwoFacedDataset,
)

if TYPE_CHECKING:
    from asyncloader.observe.faults import Faults
    from asyncloader.observe.figures import Stages, Waiting, Workers, WorkerStats
    from asyncloader.observe.timing import Timing
    from asyncloader.observe.verdict import Verdict
    from asyncloader.run.base_iterator import BaseIterator
else:

    def __getattr__(name: str) -> Any:
        """Import what is asked for (PEP 562): a dataset's module that names a protocol needs nothing of the loader."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"asyncloader.{_MODULES[name]}"), name)


__all__ = [
    "AsyncBatchDataset",
    "AsyncDataset",
    "AsyncIterableDataset",
    "AsyncResource",
    "BaseIterator",
    "Faults",
    "Stages",
    "Timing",
    "TwoFacedDataset",
    "Verdict",
    "Waiting",
    "WorkerStats",
    "Workers",
]

_MODULES = {
    "BaseIterator": "run.base_iterator",
    "Faults": "observe.faults",
    "Stages": "observe.figures",
    "Timing": "observe.timing",
    "Verdict": "observe.verdict",
    "Waiting": "observe.figures",
    "WorkerStats": "observe.figures",
    "Workers": "observe.figures",
}
