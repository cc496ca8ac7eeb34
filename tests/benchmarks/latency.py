"""latency: samples that cost nothing but waiting, and what many of them in flight at once gain.

Measured, in batches of 32, from the first batch to the last (the start of workers is the column "start ms"):

1. Samples that wait 20 ms: awaited, in our workers and without any, with F samples in flight in all (`concurrency` is F
   divided by the workers); in an SPDL pipeline with its own async fetch and F in flight; and the same wait blocking in
   torch's DataLoader with 2 workers. The baseline is the bound, F samples each 20 ms, so that ratios read as the share
   of it that is reached. N = 25 F samples; torch's is broken off after 3 s. SPDL delivers in order of completion, which
   is its default, ours in the order of the sampler.
2. F = 2,048: samples a second, and CPU microseconds for each of them.
3. `concurrency=16` threads on the blocking dataset beside torch's DataLoader, 2 workers each.
4. Local JPEG files in the page cache, read and decoded, where concurrency gains nothing: plain with `concurrency` 1 and
   16, async with 1 and 64.

Targets: at least 1/1.2 of the bound at F = 64, 128 and 512; 1.25 times SPDL's rate at F = 128; 40 times torch's at 128
and 100 times at 512; threads 10 times torch's; no more than 10 % lost on local files.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from tests.benchmarks.bench import Bench, Target, main
from tests.benchmarks.measure import Run, Stopwatch, drain
from tests.benchmarks.photos import decode, write_jpegs

WAIT_S = 0.02
BATCH = 32


class Awaits(Dataset[int]):
    """Sample i is i, after 20 ms."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    async def __getitem__(self, index: int) -> int:
        await asyncio.sleep(WAIT_S)
        return index


class Blocks(Awaits):
    """The same for those who cannot await."""

    def __getitem__(self, index: int) -> int:  # type: ignore[override]
        time.sleep(WAIT_S)
        return index


class Files(Dataset[Any]):
    """Reads and decodes a file."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        return decode(self.paths[index].read_bytes())


class AsyncFiles(Files):
    """The same, on the loop: there is nothing to wait for."""

    async def __getitem__(self, index: int) -> Any:
        return decode(self.paths[index].read_bytes())


def bound(in_flight: int) -> Run:
    return Run(in_flight / WAIT_S)


def ours(bench: Bench, in_flight: int, num_workers: int, length: int) -> Run:
    concurrency = in_flight // max(1, num_workers)
    loader = bench.loaders["ours"](Awaits(length), batch_size=BATCH, num_workers=num_workers, concurrency=concurrency)
    return drain(loader, None, per_batch=BATCH)


def torchs(bench: Bench, length: int, seconds: float) -> Run:
    return drain(bench.loaders["torch"](Blocks(length), batch_size=BATCH, num_workers=2), None, BATCH, seconds=seconds)


def spdls(in_flight: int, length: int) -> Run:
    from spdl.pipeline import PipelineBuilder

    async def fetch(index: int) -> int:
        await asyncio.sleep(WAIT_S)
        return index

    pipeline = (
        PipelineBuilder()
        .add_source(range(length))
        .pipe(fetch, concurrency=in_flight)
        .aggregate(BATCH)
        .pipe(torch.tensor)
        .add_sink(16)
        .build(num_threads=1)
    )
    watch = Stopwatch()
    with pipeline.auto_stop():
        for _ in pipeline.get_iterator(timeout=60):
            watch.lap()
        return watch.run(BATCH)


def sides(bench: Bench, in_flight: int, seconds: float) -> dict[str, Callable[[], Run]]:
    length = 25 * in_flight
    everyone: dict[str, Callable[[], Run]] = {"the bound": partial(bound, in_flight)}
    if not bench.null:
        everyone["ours, 0 workers"] = partial(with_extras, partial(ours, bench, in_flight, 0, length))
        everyone["ours, 2 workers"] = partial(with_extras, partial(ours, bench, in_flight, 2, length))
        everyone["SPDL"] = partial(with_extras, partial(spdls, in_flight, length))
    everyone["torch, 2 workers"] = partial(with_extras, partial(torchs, bench, 10_000, seconds))
    return everyone


def with_extras(side: Callable[[], Run]) -> Run:
    """Let CPU time be that of a sample."""
    run = side()
    return Run(run.value, {"cpu us/sample": run.extras["cpu us/batch"] / BATCH, "start ms": run.extras["start ms"]})


def rate(runs: dict[str, list[Run]], name: str) -> float:
    return statistics.median(run.value for run in runs[name])


def measure_waits(bench: Bench, rounds: int, seconds: float) -> None:
    beside_spdl = {128: 1.25}
    beside_torch = {128: 40.0, 512: 100.0}
    for in_flight in (64, 128, 512):
        compared = sides(bench, in_flight, seconds)
        targets = {name: Target(">=", 1 / 1.2) for name in compared if name.startswith("ours")}
        title = f"{in_flight} samples in flight"
        runs = bench.compare(title, "samples/s", compared, rounds=rounds, targets=targets)
        for name in targets:
            if in_flight in beside_spdl:
                check = Target(">=", beside_spdl[in_flight])
                bench.check(f"{title}, {name}: times SPDL's rate", rate(runs, name) / rate(runs, "SPDL"), check)
            if in_flight in beside_torch:
                check = Target(">=", beside_torch[in_flight])
                bench.check(
                    f"{title}, {name}: times torch's rate", rate(runs, name) / rate(runs, "torch, 2 workers"), check
                )
    compared = sides(bench, 2048, seconds)
    compared.pop("torch, 2 workers")
    bench.compare("2048 samples in flight", "samples/s", compared, rounds=rounds)


def measure_threads(bench: Bench, rounds: int, seconds: float) -> None:
    loader = bench.loaders["ours"]

    def threads() -> Run:
        made = loader(Blocks(10_000), batch_size=BATCH, num_workers=2, concurrency=16)
        return with_extras(partial(drain, made, None, BATCH, seconds=seconds))

    torch_side = partial(with_extras, partial(torchs, bench, 10_000, seconds))
    targets = {"ours, concurrency=16": Target(">=", 10)}
    compared = {"torch": torch_side, "ours, concurrency=16": threads}
    bench.compare("threads over calls that block", "samples/s", compared, rounds=rounds, targets=targets)


def measure_files(bench: Bench, rounds: int, count: int) -> None:
    def side(dataset: Files, concurrency: int) -> Run:
        loader = bench.loaders["ours"](dataset, batch_size=BATCH, num_workers=2, concurrency=concurrency)
        return with_extras(partial(drain, loader, None, BATCH))

    with tempfile.TemporaryDirectory() as folder:
        paths = write_jpegs(Path(folder), count)
        for title, dataset, many in (("plain", Files(paths), 16), ("async", AsyncFiles(paths), 64)):
            compared = {f"concurrency={number}": partial(side, dataset, number) for number in (1, many)}
            targets = {f"concurrency={many}": Target(">=", 0.9)}
            bench.compare(f"local files, {title}", "samples/s", compared, rounds=rounds, targets=targets)


def measure(bench: Bench) -> None:
    rounds, seconds = (1, 1.0) if bench.quick else (5, 3.0)
    measure_waits(bench, rounds, seconds)
    if not bench.null:
        measure_threads(bench, rounds, seconds)
        measure_files(bench, 2 * rounds + 1, 640 if bench.quick else 3200)


if __name__ == "__main__":
    main(__doc__ or "", measure)
