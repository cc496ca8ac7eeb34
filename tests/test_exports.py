"""What can be imported: pinned, so that nothing becomes public, or vanishes, by accident."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import asyncloader
import asyncloader.datasets
import asyncloader.online
import asyncloader.samplers
import asyncloader.typing
import asyncloader.wrap
from tests.support.nursery import Program


def test_public_names() -> None:
    """The names in `__all__`, sorted, each of which exists."""
    assert asyncloader.__all__ == [
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
    assert all(hasattr(asyncloader, name) for name in asyncloader.__all__)


def test_public_names_of_the_datasets(run: Callable[..., Program]) -> None:
    """What `asyncloader.datasets` offers; it can be imported without any of the clients that its extras bring."""
    assert asyncloader.datasets.__all__ == [
        "CachedDataset",
        "FetchError",
        "ParallelMap",
        "RemoteDataset",
        "SharedList",
    ]
    assert all(hasattr(asyncloader.datasets, name) for name in asyncloader.datasets.__all__)
    script = """
import sys
for client in ("obstore", "pyarrow"):
    sys.modules[client] = None
import asyncloader.datasets
"""
    done = run(script)
    assert (done.returncode, done.err) == (0, "")


def test_public_names_of_feeds() -> None:
    """What `asyncloader.online` offers."""
    assert asyncloader.online.__all__ == [
        "Feed",
        "FeedClosedError",
        "FeedFullError",
        "FeedHandle",
        "FeedStats",
        "Lease",
        "LeaseLostError",
        "Sample",
    ]
    assert all(hasattr(asyncloader.online, name) for name in asyncloader.online.__all__)


def test_public_names_of_the_samplers() -> None:
    """What `asyncloader.samplers` offers."""
    assert asyncloader.samplers.__all__ == [
        "BalancedBatchSampler",
        "ElasticSampler",
        "LengthBatchSampler",
        "MixtureSampler",
        "Order",
        "OrderedSampler",
        "PackingBatchSampler",
        "WeightedSampler",
        "pack_collate",
        "packed",
    ]
    assert all(hasattr(asyncloader.samplers, name) for name in asyncloader.samplers.__all__)


def test_public_names_of_wrappers() -> None:
    """What `asyncloader.wrap` offers, beside `asyncloader.to_device`."""
    assert asyncloader.wrap.__all__ == ["IteratorWrapper", "LoaderWrapper", "equal_steps", "move"]
    assert all(hasattr(asyncloader.wrap, name) for name in asyncloader.wrap.__all__)
    assert asyncloader.to_device.__module__ == "asyncloader.wrap.device_iterator"


def test_public_names_of_types() -> None:
    """What `asyncloader.typing` offers; a module that names a protocol imports nothing of the loader."""
    assert asyncloader.typing.__all__ == [
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
    assert all(hasattr(asyncloader.typing, name) for name in asyncloader.typing.__all__)
    with pytest.raises(AttributeError, match=r"module 'asyncloader.typing' has no attribute 'Dataset'"):
        asyncloader.typing.Dataset  # noqa: B018


def test_other_names_do_not_exist() -> None:
    """Names are imported when they are asked for; what is not there is an AttributeError, as ever."""
    assert set(asyncloader.__all__) <= set(dir(asyncloader))
    assert asyncloader.testing.assert_resumable.__module__ == "asyncloader.testing"  # modules too
    with pytest.raises(AttributeError, match="module 'asyncloader' has no attribute 'Dataloader'"):
        asyncloader.Dataloader  # noqa: B018


def test_workers_import_little(run: Callable[..., Program]) -> None:
    """Imports go one way; a spawned worker imports nothing of the engine, nor does a main module with our names."""
    script = """
import sys
for name in [name for name in sys.modules if name.partition(".")[0] in ("asyncloader", "uvloop")]:
    del sys.modules[name]  # as in a process that has torch alone
engine = ("asyncloader.run.worker_iterator", "asyncloader.engine.engine", "asyncloader.engine.portal", "uvloop")
import asyncloader.worker.serve
from asyncloader.typing import AsyncDataset
print([name for name in engine if name in sys.modules], "asyncloader.loader" in sys.modules)
from asyncloader import DataLoader, WorkerDiedError
print([name for name in engine if name in sys.modules], "asyncloader.loader" in sys.modules)
"""
    assert run(script).out == "[] False\n[] True\n"
