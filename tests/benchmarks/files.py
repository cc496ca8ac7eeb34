"""Local files: three ways to read them in asyncio, then the loader.

Files of some kB in the page cache, where concurrency gains nothing: what is left is what a way costs by itself. 1. In
one loop, batches of 32 one after the other: aiofiles (three jobs of an executor for each file), one job for each file,
one job for each batch (what FileDataset does), beside a plain loop. First bytes only, then decoded (JPEG, 160 x 160).
2. The same files through the loader: a plain dataset, read one by one and with concurrency=16 on threads, and
FileDataset. Asked for is that neither loses more than 10 %.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import aiofiles
import torch
import uvloop
from torch.utils.data import Dataset

from asyncloader.datasets import FileDataset
from tests.benchmarks.bench import Bench, Target, main
from tests.benchmarks.measure import Run, cpu_seconds
from tests.benchmarks.photos import decode, write_jpegs

BATCH = 32
Work: TypeAlias = Callable[[bytes], Any]


def read(path: Path, work: Work) -> Any:
    with open(path, "rb", buffering=0) as file:
        return work(file.read())


async def plainly(paths: Sequence[Path], work: Work, pool: ThreadPoolExecutor) -> list[Any]:
    return [read(path, work) for path in paths]


async def with_aiofiles(paths: Sequence[Path], work: Work, pool: ThreadPoolExecutor) -> list[Any]:
    async def one(path: Path) -> Any:
        async with aiofiles.open(path, "rb", executor=pool) as file:
            data = await file.read()
        return await asyncio.get_running_loop().run_in_executor(pool, work, data)

    return await asyncio.gather(*map(one, paths))


async def by_file(paths: Sequence[Path], work: Work, pool: ThreadPoolExecutor) -> list[Any]:
    loop = asyncio.get_running_loop()
    return await asyncio.gather(*(loop.run_in_executor(pool, read, path, work) for path in paths))


async def by_batch(paths: Sequence[Path], work: Work, pool: ThreadPoolExecutor) -> list[Any]:
    def whole() -> list[Any]:
        return [read(path, work) for path in paths]

    return await asyncio.get_running_loop().run_in_executor(pool, whole)


Way: TypeAlias = Callable[[Sequence[Path], Work, ThreadPoolExecutor], Awaitable[list[Any]]]


def run(way: Way, paths: Sequence[Path], work: Work, threads: int) -> Run:
    """Read all files once, batch by batch."""

    async def all_batches() -> Run:
        began, cpu = time.perf_counter(), cpu_seconds()
        for start in range(0, len(paths), BATCH):
            await way(paths[start : start + BATCH], work, pool)
        took_s = time.perf_counter() - began
        return Run(len(paths) / took_s, {"cpu us/file": (cpu_seconds() - cpu) / len(paths) * 1e6})

    with ThreadPoolExecutor(threads) as pool:
        return uvloop.run(all_batches())


def compare_ways(bench: Bench, paths: Sequence[Path], rounds: int) -> None:
    for title, work in (("bytes", bytes), ("decoded", decode)):
        ways: dict[str, tuple[Way, int]] = {
            "plain loop": (plainly, 1),
            "aiofiles, 1 thread": (with_aiofiles, 1),
            "aiofiles, 4 threads": (with_aiofiles, 4),
            "a job a file, 1 thread": (by_file, 1),
            "a job a file, 4 threads": (by_file, 4),
            "a job a batch": (by_batch, 1),
        }
        sides = {name: partial(run, way, paths, work, threads) for name, (way, threads) in ways.items()}
        bench.compare(f"reading files, {title}", "files/s", sides, rounds=rounds)


class Plain(Dataset[Any]):
    """A dataset that reads a file when it is asked to."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        return read(self.paths[index], decode)


def load(make_loader: Callable[[], Any]) -> Run:
    """One pass from the first batch on."""
    cpu = cpu_seconds()
    batches = iter(make_loader())
    next(batches)
    began = time.perf_counter()
    files = sum(map(len, batches))
    took_s = time.perf_counter() - began
    return Run(files / took_s, {"cpu us/file": (cpu_seconds() - cpu) / files * 1e6})


def compare_in_loader(bench: Bench, paths: Sequence[Path], rounds: int) -> None:
    ours = bench.loaders["ours"]
    for workers in (0, 1, 2):
        loader = partial(ours, batch_size=BATCH, num_workers=workers)
        sides = {
            "plain": partial(load, partial(loader, Plain(paths))),
            "plain, concurrency=16": partial(load, partial(loader, Plain(paths), concurrency=16)),
            "FileDataset": partial(load, partial(loader, FileDataset(paths, decode))),
        }
        if not workers:
            del sides["plain, concurrency=16"]  # without workers a plain dataset is read by the caller
        targets = {name: Target(">=", 0.9) for name in sides if name != "plain"}
        bench.compare(f"the loader, {workers} workers", "files/s", sides, rounds=rounds, targets=targets)


def measure(bench: Bench) -> None:
    torch.set_num_threads(1)
    count, rounds = (1600, 3) if bench.quick else (3200, 7)
    with tempfile.TemporaryDirectory() as folder:
        paths = write_jpegs(Path(folder), count)
        compare_ways(bench, paths, rounds)
        compare_in_loader(bench, paths, rounds)


if __name__ == "__main__":
    main(__doc__ or "", measure)
