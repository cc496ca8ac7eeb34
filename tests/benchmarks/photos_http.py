"""Photographs over HTTP: 2,000 JPEG objects, each answered after 20 ms or at once, decoded, by RemoteDataset.

What is asked for: with 20 ms of latency at least 80 % of the rate that there is without, because decoding is what takes
the time. Beside it torch's DataLoader with as many workers and a blocking client that keeps its connection (the first
samples only: each costs it 20 ms). Client, workers and server share the machine.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Sequence
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor
from torch.utils.data import Dataset

from asyncloader.datasets import RemoteDataset
from tests.benchmarks.bench import Bench, Target, main
from tests.benchmarks.measure import Run, cpu_seconds
from tests.benchmarks.photos import decode, jpegs
from tests.services.fault_server import FaultServer

BATCH = 32
LATENCY_S = 0.02


class Blocking(Dataset[Tensor]):
    """What one writes for torch's DataLoader: a connection that is kept, a request at a time."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.urls = urls
        self.connection: http.client.HTTPConnection | None = None

    def __len__(self) -> int:
        return len(self.urls)

    def __getitem__(self, index: int) -> Tensor:
        return decode(self.read(index))

    def read(self, index: int) -> bytes:
        parts = urlsplit(self.urls[index])
        if self.connection is None:
            self.connection = http.client.HTTPConnection(parts.netloc)
        self.connection.request("GET", parts.path)
        return self.connection.getresponse().read()


def run(loader_class: Any, dataset: Any, num_workers: int, **options: Any) -> Run:
    """One pass over the data, from the first batch on: how long workers take to start is not the question here."""
    cpu = cpu_seconds()
    batches = iter(loader_class(dataset, batch_size=BATCH, num_workers=num_workers, **options))
    first = len(next(batches))
    began = time.perf_counter()
    samples = sum(map(len, batches))
    took_s = time.perf_counter() - began
    if first + samples != len(dataset):
        raise RuntimeError("samples are missing")
    return Run(samples / took_s, {"ms CPU a sample": (cpu_seconds() - cpu) / len(dataset) * 1e3})


def measure(bench: Bench) -> None:
    torch.set_num_threads(1)
    count, few, rounds = (500, 100, 1) if bench.quick else (2000, 300, 3)
    objects = {f"{number}.jpg": data for number, data in enumerate(jpegs(count, 224))}
    bench.note("objects", count=count, mean_bytes=sum(map(len, objects.values())) / count)
    with FaultServer(objects) as prompt, FaultServer(objects, LATENCY_S) as late:
        after_20_ms = list(map(late.url, objects))
        sets = [RemoteDataset(server.store(), objects, decode) for server in (prompt, late)]
        ours = bench.loaders["ours"]
        for workers in (2,):
            sides = {
                "ours, no latency": partial(run, ours, sets[0], workers, concurrency=64),
                "ours, 20 ms": partial(run, ours, sets[1], workers, concurrency=64),
                "torch, 20 ms": partial(run, bench.loaders["torch"], Blocking(after_20_ms[:few]), workers),
            }
            targets = {"ours, 20 ms": Target(">=", 0.8)}
            bench.compare(f"{workers} workers", "samples/s", sides, rounds=rounds, targets=targets)


if __name__ == "__main__":
    main(__doc__ or "", measure)
