"""tensors: data that are in memory already, indexed once per batch.

Measured: batches/s of 1,024 samples in random order, by default collated and dropped, without workers and with 1 and 2,
torch's DataLoader and ours taking turns, after a warm-up that is not counted. "rows" is a TensorDataset of 100,000 rows
of 32 float32 with a label; then half of it by random_split. "images" is 20,000 pictures of
(3, 32, 32) uint8 with a label, as a TensorDataset over memory and over a mapped file.

Then slices of a tensor in shared memory (`share_memory_()`, batch_size=None): GB/s of batches of 16 MB with 1 worker
that was forked, dropped as they come and summed by the consumer. torch sends a reference to the dataset's own memory,
ours a copy.

Seen with rows of a TensorDataset and 2 workers, on 2 cores with much other work on them, in three rounds: 6.4, 15.5 and
7.6 times torch's rate; in CPU time of all processes, which depends less on that, 0.9 to 1.4 ms a batch for 11 to 14 of
torch's. Without workers 29 times. Profiled: keys as lists of ints, pickled, unpickled, checked and converted, took 140
us of CPU time a batch more than as an array; slabs that a worker had to ask for came by a round trip each, where
batches of 128 kB were lent three at a time, and are sixteen now.

Targets: at least 15 times torch's rate with rows of a TensorDataset. (For the slices there is none: why ours are
copies is told in docs/decisions.)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, RandomSampler, TensorDataset, random_split

from tests.benchmarks.bench import Bench, Target, main
from tests.benchmarks.measure import Run, drain

BATCH = 1024
ROWS, IMAGES = 100_000, 20_000
SLICE_BYTES = 16 << 20


class Slices(Dataset[torch.Tensor]):
    """Contiguous parts of one tensor in shared memory."""

    def __init__(self, count: int) -> None:
        self.data = torch.ones(count, SLICE_BYTES // 4).share_memory_()

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.data[index % len(self.data)]


def rate(loader: Callable[..., Any], dataset: Any, workers: int, seconds: float) -> Run:
    """Take batches in random order for some seconds; the data are gone through as often as that takes."""
    sampler = RandomSampler(dataset, num_samples=len(dataset) * 1000)
    made = loader(dataset, BATCH, sampler=sampler, num_workers=workers)
    return drain(made, None, warm_up=50, seconds=seconds)


def slices(loader: Callable[..., Any], dataset: Any, use: Callable[[Any], object] | None, seconds: float) -> Run:
    """Take slices for some seconds."""
    made = loader(dataset, batch_size=None, num_workers=1, multiprocessing_context="fork")
    return drain(made, use, SLICE_BYTES / 1e9, warm_up=20, seconds=seconds)


def measure(bench: Bench) -> None:
    torch.set_num_threads(1)
    seconds, rounds = (0.5, 2) if bench.quick else (1.0, 5)
    rows = TensorDataset(torch.randn(ROWS, 32), torch.arange(ROWS))
    generator = torch.Generator().manual_seed(1)
    half, _ = random_split(rows, [ROWS // 2, ROWS - ROWS // 2], generator)
    for workers in (0, 2) if bench.quick else (0, 1, 2):
        for name, dataset in (("rows", rows), ("half of them", half)):
            sides = {side: partial(rate, loader, dataset, workers, seconds) for side, loader in bench.loaders.items()}
            targets = {"ours": Target(">=", 15)} if name == "rows" else {}
            bench.compare(f"{name}, {workers} workers", "batches/s", sides, rounds=rounds, targets=targets)
        bench.save()
    with TemporaryDirectory() as folder:
        pixels = np.random.default_rng(1).integers(0, 255, (IMAGES, 3, 32, 32), np.uint8)
        np.save(Path(folder, "pixels.npy"), pixels)
        labels = np.arange(IMAGES)
        images = TensorDataset(torch.from_numpy(pixels), torch.from_numpy(labels))
        of_file = np.load(Path(folder, "pixels.npy"), mmap_mode="c")
        mapped = TensorDataset(torch.from_numpy(of_file), torch.from_numpy(labels))
        for workers in (0, 2):
            sides = {side: partial(rate, loader, images, workers, seconds) for side, loader in bench.loaders.items()}
            sides["ours, mapped"] = partial(rate, bench.loaders["ours"], mapped, workers, seconds)
            bench.compare(f"images, {workers} workers", "batches/s", sides, rounds=rounds)
    parts = Slices(32)
    for title, use in (("dropped", None), ("summed", torch.sum)):
        sides = {side: partial(slices, loader, parts, use, seconds) for side, loader in bench.loaders.items()}
        bench.compare(f"slices of 16 MB, {title}", "GB/s", sides, rounds=rounds)


if __name__ == "__main__":
    main(__doc__ or "", measure)
