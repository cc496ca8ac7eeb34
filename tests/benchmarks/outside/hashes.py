"""dataloader-rs' benchmark of workers: each sample is the SHA-256 of a mebibyte.

The interpreter's lock is free while that is computed.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from functools import partial
from typing import Any

from torch.utils.data import Dataset

from tests.benchmarks.measure import Run
from tests.benchmarks.outside.benchmark import Benchmark, Setting, loader_class

SAMPLES, BATCH, AHEAD = 256, 16, 16
MEBIBYTE = bytes(range(256)) * 4096


def digest(index: int) -> bytes:
    hashed = hashlib.sha256(index.to_bytes(4, "little"))
    hashed.update(MEBIBYTE)
    return hashed.digest()


class Hashes(Dataset[bytes]):
    """About a millisecond each."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> bytes:
        return digest(index)


class Numbers(Dataset[int]):
    """Samples that cost nothing."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> int:
        return index


def threads_of_rust(dataset: Any, batch: int, collate: Any, workers: int) -> Any:
    from dataloader_rs import PyDataloader, PyDataset

    class Wrapped(PyDataset):
        def __len__(self) -> int:
            return len(dataset)

        def __getitem__(self, index: int) -> Any:
            return dataset[index]

    return PyDataloader(Wrapped(), batch_size=batch, collate_fn=collate, num_workers=workers, prefetch_depth=AHEAD)


def epochs(name: str, dataset: Any, batch: int, collate: Any, workers: int, setting: Setting) -> Run:
    """Two epochs that do not count, ten that do: thousands of samples a second in the median one."""
    if name == "dataloader-rs":
        loader = threads_of_rust(dataset, batch, collate, workers)
    else:
        ahead = {"persistent_workers": True, "prefetch_factor": max(1, AHEAD // workers)} if workers else {}
        loader = loader_class(name)(dataset, batch, collate_fn=collate, num_workers=workers, **ahead)
    seconds = []
    for _ in range(4 if setting.quick else 12):
        began = time.perf_counter()
        for _ in loader:
            pass
        seconds.append(time.perf_counter() - began)
    return Run(len(dataset) / statistics.median(seconds[2:]) / 1e3)


def benchmark(what: str, dataset: Any, batch: int, collate: Any, workers: int) -> Benchmark:
    return Benchmark(
        title=f"{what}, {workers} workers",
        unit="k samples/s",
        whose="dataloader-rs' samples",
        link="https://github.com/AzHicham/dataloader-rs/tree/dev/bench",
        rules=f"256 samples in batches of 16, or 4,096 in batches of 32; {AHEAD} batches in advance, workers that "
        "stay, the median of ten epochs after two. dataloader-rs has threads, and Python its lock.",
        sides={
            name: partial(epochs, name, dataset, batch, collate, workers)
            for name in ("torch", "dataloader-rs", "asyncloader")
        },
        needs={"dataloader-rs": "dataloader_rs"},
    )


BENCHMARKS = [
    benchmark("SHA-256 of a MiB", Hashes(), BATCH, b"".join, 2),
    benchmark("numbers", Numbers(), 32, sum, 0),
]
