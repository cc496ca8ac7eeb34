"""streams: one stream that all workers work on.

Items of 100 bytes, of which a sample is the length, in batches of 1 and of 32: `ParallelMap` beside torch's loader over
an `IterableDataset` that divides itself among its workers by hand. Items of 64 kB, in batches of 32: the bytes a second
that come into workers. Photographs, of one tar file: `ParallelMap` over webdataset's stream of it, decoded by the
workers, beside the same by number. 2 workers each; sides take turns.

Targets: 5 times torch's rate with small items; 1 GB/s; 0.95 of the rate by number.

Found on 25 November 2026 (two cores, torch 2.13, 7 rounds): 16.8 times torch's rate in batches of 1 (13.5 to 17.5), 6.3
in batches of 32 (5.5 to 7.4; 298,000 items a second); 1.5 GB/s; 1.02 of the rate by number (0.95 to 1.09). Earlier that
day, before keys went through slabs and the reading thread counted alone: 14.8, 4.4 and 1.04, and 0.5 GB/s.

What profiling found: an item of 100 bytes cost the trainer's process 4 us in batches of 32: 1.5 in the thread that
reads, 1.1 in the one that takes, 1.1 in the loop's. As a class of our own in place of a plain tuple it cost 0.5 us
more. Of the reader's 1.5 us, 0.7 went where whether there is room, who waits, and what the bytes of taken items were
was looked up anew for each item, and of the taker's part 0.15; two clocks were read for each batch to find out whether
a state is cheap that is taken with each batch anyway. Large items were copied nine times on their way, at 0.5 GB/s in
the same hour: into the pickle, into the message, into what the socket had not taken, by the kernel in and out, into the
frame, out of it, and twice by unpickling. In a slab they were copied twice, and are four times in messages that are
sent in parts, for the same time of the trainer's CPU.
"""

from __future__ import annotations

import io
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from webdataset import WebDataset

from asyncloader import DataLoader
from asyncloader.datasets import ParallelMap
from tests.benchmarks.bench import Bench, Target, main
from tests.benchmarks.measure import Run, cpu_seconds


class ByHand(IterableDataset[int]):
    """Lengths of items, divided among workers."""

    def __init__(self, count: int, nbytes: int) -> None:
        self.count, self.nbytes = count, nbytes

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        for _ in range(info.id, self.count, info.num_workers) if info else range(self.count):
            yield len(bytes(self.nbytes))


def items(count: int, nbytes: int) -> Iterator[bytes]:
    """Yield items."""
    for _ in range(count):
        yield bytes(nbytes)


class ByNumber(Dataset[Any]):
    """The photographs of a tar file, read where its headers say."""

    def __init__(self, path: Path) -> None:
        with tarfile.open(path) as file:
            self.path, self.places = path, [(member.offset_data, member.size) for member in file]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, number: int) -> Any:
        begin, nbytes = self.places[number]
        with self.path.open("rb") as file:
            file.seek(begin)
            return decode({"jpg": file.read(nbytes)})


def epoch(loader: Any, per_batch: float) -> Run:
    """Run through an epoch; from its first batch on, so much a batch."""
    cpu, iterator = cpu_seconds(), iter(loader)
    next(iterator)
    began, count = time.perf_counter(), 0
    for _ in iterator:
        count += 1
    return Run(count * per_batch / (time.perf_counter() - began), {"cpu s": cpu_seconds() - cpu})


def write_photos(path: Path, count: int) -> None:
    """Write a tar file of photographs with noise."""
    noise = np.random.default_rng(0)
    with tarfile.open(path, "w") as file:
        for number in range(count):
            content = io.BytesIO()
            coarse = Image.fromarray(noise.integers(0, 255, (24, 32, 3), dtype=np.uint8))
            coarse.resize((640, 480)).save(content, "JPEG", quality=90)
            info = tarfile.TarInfo(f"{number:05}.jpg")
            info.size = content.tell()
            content.seek(0)
            file.addfile(info, content)


def decode(sample: dict[str, Any]) -> Any:
    """Make an array of a photograph."""
    return np.asarray(Image.open(io.BytesIO(sample["jpg"])).resize((224, 224)))


def measure(bench: Bench) -> None:
    rounds = 3 if bench.quick else 7
    for batch_size, count in ((1, 6_000), (32, 100_000)):
        ours = DataLoader(ParallelMap(partial(items, count, 100), len), batch_size, num_workers=2)
        torchs: Any = TorchLoader(ByHand(count, 100), batch_size, num_workers=2)
        sides: dict[str, Callable[[], Run]] = {
            "torch": partial(epoch, torchs, batch_size),
            "ours": partial(epoch, ours, batch_size),
        }
        title = f"100 bytes, batches of {batch_size}"
        bench.compare(title, "items/s", sides, rounds=rounds, targets={"ours": Target(">=", 5)})
    nbytes = 65_536
    large = DataLoader(ParallelMap(partial(items, 10_000, nbytes), len), 32, num_workers=2)
    runs = [epoch(large, 32 * nbytes / 1e9).value for _ in range(rounds)]
    bench.check("items of 64 kB into workers, GB/s", sorted(runs)[rounds // 2], Target(">=", 1))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "photos.tar"
        write_photos(path, 1_000)
        by_number = DataLoader(ByNumber(path), 32, num_workers=2)
        stream = DataLoader(ParallelMap(WebDataset(str(path), shardshuffle=False), decode), 32, num_workers=2)
        sides = {"torch": partial(epoch, by_number, 32), "ours": partial(epoch, stream, 32)}
        title = "photographs of one tar file (torch: ours by number)"
        bench.compare(title, "photos/s", sides, rounds=rounds, targets={"ours": Target(">=", 0.95)})


if __name__ == "__main__":
    main(__doc__ or "", measure)
