"""shards: tar files as a stream and by number.

8 shards of 400 samples (an object of 20 kB and a label), read once with one worker, batches of 50. webdataset's stream
with shuffled shards and a buffer of 500, in torch's loader and ours; TarShards by a BlockShuffleSampler with blocks
that are kept, and by an ElasticSampler, each sample by itself. On a disk (in the page cache), and from an HTTP server
on this machine that holds back each answer for 20 ms, where the stream is left out: it would read through curl.
"""

from __future__ import annotations

import io
import os
import random
import tarfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from webdataset import WebDataset

from asyncloader.datasets import TarShards
from asyncloader.samplers import BlockShuffleSampler, ElasticSampler
from tests.benchmarks.bench import Bench, main
from tests.benchmarks.measure import Run, cpu_seconds
from tests.services.fault_server import FaultServer

BATCH = 50
SAMPLES = 400
LATENCY_S = 0.02


def label(sample: dict[str, Any]) -> int:
    return int(sample["cls"])


def shard_bytes(number: int) -> bytes:
    rng, file = random.Random(number), io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as shard:
        for sample in range(SAMPLES):
            for extension, data in (("jpg", rng.randbytes(20_000)), ("cls", b"7")):
                info = tarfile.TarInfo(f"{number:04}-{sample:05}.{extension}")
                info.size = len(data)
                shard.addfile(info, io.BytesIO(data))
    return file.getvalue()


def run(make: Callable[[], Any]) -> Run:
    """Read an epoch from its first batch on."""
    batches = iter(make())
    next(batches)
    began, cpu = time.perf_counter(), cpu_seconds()
    samples = sum(map(len, batches))
    took_s = time.perf_counter() - began
    return Run(samples / took_s, {"cpu us/sample": (cpu_seconds() - cpu) / samples * 1e6})


def stream(loader: Callable[..., Any], urls: Sequence[str]) -> Any:
    """Read webdataset's stream."""
    dataset = WebDataset(list(urls), shardshuffle=100).shuffle(500).map(label)
    return loader(dataset, batch_size=BATCH, num_workers=1)


def compare(bench: Bench, where: str, urls: Sequence[str], index: str) -> None:
    single = TarShards(urls, label, index=index)
    blocks = TarShards(urls, label, index=index, cache_bytes=1 << 27)
    by_blocks = BlockShuffleSampler(blocks.block_sizes)
    options: dict[str, Any] = {"batch_size": BATCH, "num_workers": 1}
    options |= {"multiprocessing_context": "forkserver"} if "://" in urls[0] else {}
    loader = partial(bench.loaders["ours"], **options)
    sides: dict[str, Callable[[], Run]] = {
        "TarShards, block shuffle": partial(run, partial(loader, blocks, sampler=by_blocks)),
        "TarShards, shuffle": partial(run, partial(loader, single, sampler=ElasticSampler(single))),
    }
    if "://" not in urls[0]:
        streams = {
            f"webdataset, {side}": partial(run, partial(stream, bench.loaders[side], urls)) for side in bench.loaders
        }
        sides = {**streams, **sides}
    bench.compare(where, "samples/s", sides, rounds=2 if bench.quick else 5)


def measure(bench: Bench) -> None:
    shards = {f"{number}.tar": shard_bytes(number) for number in range(4 if bench.quick else 8)}
    with TemporaryDirectory() as folder, FaultServer(shards, latency_s=LATENCY_S) as server:
        os.environ["XDG_CACHE_HOME"] = folder
        for name, data in shards.items():
            Path(folder, name).write_bytes(data)
        compare(bench, "on a disk", [f"{folder}/{name}" for name in shards], folder)
        compare(bench, "over HTTP", [server.url(name) for name in shards], folder)


if __name__ == "__main__":
    main(__doc__ or "", measure)
