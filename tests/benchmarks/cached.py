"""cached: the second epoch over an HTTP source that takes 20 ms, with CachedDataset.

Measured: 1,000 objects of 20 kB behind an HTTP server that holds back each answer for 20 ms, decoded to an array; 2
forked workers that stay, batches of 50. An epoch that fills the cache, then three that read from it; beside them the
same source without a cache. Once with one sample in flight in each worker, as with a plain dataset, and once with the
64 of an async one. With --quick 400 objects.

Target: the second epoch at least 20 times as fast as the first, with one sample in flight. With 64 in flight they wait
together, so what is left of the first epoch is the CPU time of obstore and of the server.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from asyncloader import DataLoader
from asyncloader.datasets import CachedDataset, RemoteDataset
from tests.benchmarks.bench import Bench, Target, main
from tests.services.fault_server import FaultServer

BYTES = 20_000
LATENCY_S = 0.02


def decode(data: bytes, key: Any) -> Any:
    return np.frombuffer(data, np.uint8).copy()


def epochs(dataset: Any, concurrency: int, times: int) -> list[float]:
    """Run through some epochs; return how long each took."""
    loader = DataLoader(dataset, 50, num_workers=2, concurrency=concurrency, persistent_workers=True)
    took = []
    for _ in range(times):
        began = time.perf_counter()
        for _ in loader:
            pass
        took.append(time.perf_counter() - began)
    loader.close()
    return took


def measure(bench: Bench) -> None:
    count = 400 if bench.quick else 1000
    objects = {f"object/{number}": os.urandom(BYTES) for number in range(count)}
    with FaultServer(objects, latency_s=LATENCY_S) as server, TemporaryDirectory() as folder:
        source = RemoteDataset(server.store(), objects, decode)
        for concurrency in (1, 64):
            title = f"{count:,} objects, {concurrency} in flight"
            (uncached, again) = epochs(source, concurrency, 2)
            bench.note(f"{title}: no cache", first_s=uncached, second_s=again)
            cached = CachedDataset(source, Path(folder, str(concurrency)), fingerprint="v1")
            first, *later = epochs(cached, concurrency, 4)
            bench.note(f"{title}: cached", first_s=first, second_s=later[0], least_later_s=min(later))
            if concurrency == 1:
                bench.check(f"{title}, first / second", first / later[0], Target(">=", 20))


if __name__ == "__main__":
    main(__doc__ or "", measure)
