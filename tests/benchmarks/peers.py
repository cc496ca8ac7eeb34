"""Other loaders behind one call: over the same dataset, with the same number of workers, batches in order.

What each needs: torchdata for StatefulDataLoader, spdl-core for SPDL, grain for Grain; the extra `bench` has them.
Grain works on NumPy arrays and makes them of tensors; its workers are spawned, which is its only way.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, default_collate

from asyncloader import DataLoader

Make = Callable[..., Any]


def torch_ordered(dataset: Dataset[Any], batch_size: int, workers: int, **options: Any) -> Any:
    return TorchLoader(dataset, batch_size, num_workers=workers, **options)


def torch_unordered(dataset: Dataset[Any], batch_size: int, workers: int) -> Any:
    return TorchLoader(dataset, batch_size, num_workers=workers, in_order=False)


def stateful(dataset: Dataset[Any], batch_size: int, workers: int, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(dataset, batch_size, num_workers=workers, **options)


def spdl_drop_in(dataset: Dataset[Any], batch_size: int, workers: int) -> Any:
    from spdl.dataloader import get_pytorch_dataloader

    return get_pytorch_dataloader(dataset, batch_size, num_workers=workers, in_order=True)


def spdl_threads(dataset: Any, batch_size: int, workers: int, *, threads: int | None = None) -> Any:
    """SPDL's own way: a pipeline of threads; as many as there are workers, unless it is said."""
    from spdl.dataloader import DataLoader as Pipeline

    return Pipeline(
        range(len(dataset)),
        preprocessor=dataset.__getitem__,
        batch_size=batch_size,
        aggregator=default_collate,
        num_threads=threads or workers,
        buffer_size=2 * workers,
        output_order="input",
    )


def grain(dataset: Any, batch_size: int, workers: int, *, threads: int = 1) -> Any:
    """Grain, with two batches in advance in each worker; by default it reads 500 ahead, with 16 threads."""
    import grain
    from absl import flags

    flags.FLAGS.mark_as_parsed()
    reading = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=max(2, threads))
    options = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=2)
    return grain.MapDataset.source(dataset).batch(batch_size).to_iter_dataset(reading).mp_prefetch(options)


def ours(dataset: Dataset[Any], batch_size: int, workers: int, **options: Any) -> Any:
    return DataLoader(dataset, batch_size, num_workers=workers, **options)


PEERS: dict[str, Make] = {
    "torch": torch_ordered,
    "torch, unordered": torch_unordered,
    "StatefulDataLoader": stateful,
    "SPDL, drop-in": spdl_drop_in,
    "SPDL, threads": spdl_threads,
    "Grain": grain,
    "asyncloader": ours,
}

_PACKAGES = {"StatefulDataLoader": "torchdata", "SPDL, drop-in": "spdl", "SPDL, threads": "spdl", "Grain": "grain"}


def missing() -> list[str]:
    """Return the packages that are not there."""
    absent = []
    for package in sorted(set(_PACKAGES.values())):
        try:
            importlib.import_module(package)
        except ImportError:
            absent.append(package)
    return absent
