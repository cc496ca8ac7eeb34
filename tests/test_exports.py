"""What can be imported: pinned, so that nothing becomes public, or vanishes, by accident."""

from __future__ import annotations

import subprocess
import sys

import asyncloader
import asyncloader.datasets


def test_public_names() -> None:
    """The names in `__all__`, sorted, each of which exists."""
    assert asyncloader.__all__ == [
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
    assert all(hasattr(asyncloader, name) for name in asyncloader.__all__)


def test_public_names_of_the_datasets() -> None:
    """What `asyncloader.datasets` offers; it can be imported without any of the clients that its extras bring."""
    assert asyncloader.datasets.__all__ == [
        "ByteRange",
        "FetchError",
        "FileDataset",
        "FsspecDataset",
        "HTTPDataset",
        "ImageFolder",
        "ObjectStoreDataset",
        "Retries",
        "SQLDataset",
        "TarShards",
    ]
    assert all(hasattr(asyncloader.datasets, name) for name in asyncloader.datasets.__all__)
    script = """
import sys
for client in ("aiohttp", "obstore", "fsspec", "asyncpg", "PIL"):
    sys.modules[client] = None
import asyncloader.datasets
"""
    subprocess.run([sys.executable, "-c", script], timeout=60, check=True)


def test_nothing_of_the_engine_is_imported_in_what_workers_run() -> None:
    """Imports go one way; a spawned worker does not import more than it needs."""
    script = """
import importlib.util, sys, types
package = types.ModuleType("asyncloader")  # without its __init__, which imports everything
package.__path__ = importlib.util.find_spec("asyncloader").submodule_search_locations
sys.modules["asyncloader"] = package
import asyncloader.workers.serve
print(sorted(name for name in sys.modules if name.startswith("asyncloader.engine")))
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout == "[]\n"
