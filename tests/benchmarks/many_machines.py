"""many_machines: what bounds a trainer that 16 to 4,096 workers on other machines feed, over 1 to 400 Gbit/s.

Nobody has that cluster at hand, so it is played: the real scheduler, and queues for what costs time (see
tests/benchmarks/cluster_model.py). Measured here, before, is what the trainer's process pays for a batch of 8 ints of
an agent on this machine (CPU time of the thread of the loop, and of the thread that takes), and how many bytes a second
the thread of the loop receives, over the loopback, in batches of 38.5 MB. What a batch takes a worker is given.

- grows: for photographs (64 of 3 x 224 x 224 as bytes, 0.25 s a batch for one core) and features (64 KB, 20 ms),
  batches a second by workers and link; the letter says what was at work for more than 0.9 of its time: w(orkers),
  n(etwork), t(hread of the trainer), or o(rder): workers stood idle behind slow batches.
- tails: 1,024 workers at 100 Gbit/s, whose batches take log-normal times; how much of their time they are at work.
  Batches are held back until those before them are here, so the window is what tails cost.
- nodes that end: likewise, of the time that workers are there; nodes of 16 stay for so long on average, half of them
  end without notice, and another takes their place after 5 s.
- memory: a training that is the bound, at 0.9 of what data could be had: what waits in the trainer's memory.

Seen on 2 cores with nobody beside it: 83 us of the loop and 24 us of the consumer a batch, 3.2 GB/s. Some 320 batches
of photographs a second, or 7,700 small ones, are what one trainer takes, however many workers there are; 64 workers do
not come to that, 256 do. With 1,024 workers what may be run ahead decides: of batches of 64 KB the window alone is
131 MB, so the default of 64 MiB is none, and a heavy tail (sigma 0.8) leaves 0.23 of workers' time, with 4 GiB 1.0.
Likewise where nodes come and go, after which the window is one batch a worker where that limit is reached: 0.995, 0.69
and 0.59 with nodes that stay for 600, 60 and 20 s; with 4 GiB 0.99 throughout; where num_workers is named, which keeps
the window, 0.995, 0.99 and 0.93. Memory is what the window comes to: photographs for 4,096 workers take 76 GB if the
training is the bound, half of that with prefetch_factor=1.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any

from asyncloader.engine.portal import get_portal
from tests.benchmarks.bench import Bench, main, number
from tests.benchmarks.cluster_model import Cluster, Costs, Play, Played, Work, bounds
from tests.benchmarks.dispatch import Ints
from tests.benchmarks.remote import COUNT, Images
from tests.ray.local_agents import LocalAgents

GBIT = 1e9 / 8
PHOTOGRAPHS = Work(nbytes=64 * 3 * 224 * 224, batch_s=0.25)
FEATURES = Work(nbytes=64_000, batch_s=0.02)
IMAGE_BYTES = 4 * 64 * 3 * 224 * 224


def loop_cpu_s() -> float:
    """Return the CPU seconds of the loop's thread."""

    async def ask() -> float:
        return time.thread_time()

    return asyncio.run_coroutine_threadsafe(ask(), get_portal().loop).result()


def cpu_of(loader: Any) -> tuple[float, float, int]:
    """Run through an epoch; return CPU seconds of the loop's thread and of this one, and the number of batches."""
    loop_s, own_s, count = loop_cpu_s(), time.thread_time(), 0
    for _ in loader:
        count += 1
    return loop_cpu_s() - loop_s, time.thread_time() - own_s, count


def measure_costs(bench: Bench) -> Costs:
    """Measure what the trainer pays for batches of agents on this machine: medians of some epochs."""
    make, epochs = bench.loaders["ours"], 3 if bench.quick else 7
    options: dict[str, Any] = {"scheduling": "dynamic", "persistent_workers": True}
    per_batch: list[tuple[float, float]] = []
    with_images: list[float] = []
    small = make(Ints(16_000), batch_size=8, worker_backend=LocalAgents(2), **options)
    large = make(Images(), batch_size=None, worker_backend=LocalAgents(2), **options)
    for loader in (small, large):
        for epoch in range(1 + epochs):
            loop_s, own_s, count = cpu_of(loader)
            if epoch and loader is small:
                per_batch.append((loop_s / count, own_s / count))
            elif epoch:
                with_images.append(loop_s)
        loader.close()
    loop_s, take_s = map(statistics.median, zip(*per_batch, strict=True))
    receiving_s = max(statistics.median(with_images) - COUNT * loop_s, 1e-9)
    return Costs(loop_s, take_s, COUNT * IMAGE_BYTES / receiving_s)


def show(played: Played) -> str:
    """Return a rate with what bounds it."""
    return f"{number(played.batches_s)} {played.limit[0]}"


def grows(bench: Bench, costs: Costs, title: str, work: Work, workers: list[int], links: list[int]) -> None:
    """Play each number of workers with each link."""
    rows, found = [], {}
    for count in workers:
        row = [f"{count:,} workers"]
        for gbit in links:
            cluster = Cluster(count, gbit * GBIT)
            played = Play(costs, work, cluster, rounds(bench) * count).run()
            row.append(show(played))
            found[f"{count}, {gbit}"] = {
                "batches/s": played.batches_s,
                "limit": played.limit,
                "shares": played.shares,
                "bound": min(bounds(costs, work, cluster).values()),
                "peak MB": played.peak_bytes / 1e6,
            }
        rows.append(row)
    bench.table(f"{title}: batches a second", ["", *(f"{gbit} Gbit/s" for gbit in links)], rows)
    bench.found[title] = found


def rounds(bench: Bench) -> int:
    """How many batches there are for each worker."""
    return 6 if bench.quick else 8


def tails(bench: Bench, costs: Costs, count: int) -> None:
    """Batches that take very unlike times."""
    batches, rows, found = rounds(bench) * count, [], {}
    sides: dict[str, dict[str, Any]] = {
        "defaults (64 MiB ahead)": {},
        "max_buffered_bytes=4 GiB": {"max_buffered_bytes": 4 << 30},
        'scheduling="static"': {"scheduling": "static"},
    }
    sigmas = (0.2, 0.8, 1.5)
    for name, options in sides.items():
        row = [name]
        for sigma in sigmas:
            work = FEATURES._replace(batch_s=0.25, sigma=sigma)
            played = Play(costs, work, Cluster(count, 100 * GBIT), batches, **options).run()
            share = played.shares["workers"]
            row.append(f"{share:.2f} ({played.peak_bytes / 1e6:.0f} MB)")
            found[f"{name}, {sigma}"] = {"share": share, "peak MB": played.peak_bytes / 1e6}
        rows.append(row)
    headers = ["", *(f"sigma {sigma}" for sigma in sigmas)]
    bench.table(f"tails, {count:,} workers: share of their time that workers are at work", headers, rows)
    bench.found["tails"] = found


def endings(bench: Bench, costs: Costs, count: int) -> None:
    """Nodes that are taken away."""
    rows, found = [], {}
    work = FEATURES._replace(batch_s=0.25)
    batches = 2 * rounds(bench) * count
    sides: dict[str, dict[str, Any]] = {
        "64 MiB ahead": {},
        "num_workers named, 64 MiB": {"num_expected": count},
        "4 GiB ahead": {"max_buffered_bytes": 4 << 30},
    }
    for life_s in (600.0, 60.0, 20.0):
        there = life_s / (life_s + 5.0)
        shares = {}
        for name, options in sides.items():
            played = Play(costs, work, Cluster(count, 100 * GBIT, life_s=life_s), batches, **options).run()
            shares[name] = played.shares["workers"] / played.there
        rows.append([f"{life_s:.0f} s", f"{there:.3f}", *(f"{share:.3f}" for share in shares.values())])
        found[str(life_s)] = {"there": there, **shares}
    bench.table(
        f"nodes that end, {count:,} workers: share of the time that they are there, that they are at work",
        ["a node stays for", "there in the long run", *sides],
        rows,
    )
    bench.found["nodes that end"] = found


def memory(bench: Bench, costs: Costs, workers: list[int]) -> None:
    """A training that is the bound: batches wait for it."""
    rows, found = [], {}
    for count in workers:
        cluster = Cluster(count, 400 * GBIT)
        row = [f"{count:,} workers"]
        for factor in (1, 2):
            step_s = 1 / (0.9 * min(bounds(costs, PHOTOGRAPHS, cluster).values()))
            work = PHOTOGRAPHS._replace(step_s=step_s)
            played = Play(costs, work, cluster, rounds(bench) * count, prefetch=factor).run()
            row.append(f"{played.peak_bytes / 1e9:.1f} GB")
            found[f"{count}, {factor}"] = {"peak GB": played.peak_bytes / 1e9, "batches/s": played.batches_s}
        rows.append(row)
    headers = ["", *(f"prefetch_factor={factor}" for factor in (1, 2))]
    bench.table("memory for photographs, where training is the bound: at most", headers, rows)
    bench.found["memory"] = found


def measure(bench: Bench) -> None:
    costs = measure_costs(bench)
    figures = {"loop us": costs.loop_s * 1e6, "take us": costs.take_s * 1e6, "GB/s": costs.receive_bytes_s / 1e9}
    bench.note("the trainer's costs of a batch", **figures)
    workers = [16, 256] if bench.quick else [16, 64, 256, 1024, 4096]
    links = [1, 25, 400] if bench.quick else [1, 10, 25, 100, 400]
    grows(bench, costs, "photographs", PHOTOGRAPHS, workers, links)
    grows(bench, costs, "features", FEATURES, workers, links)
    tails(bench, costs, 64 if bench.quick else 1024)
    endings(bench, costs, 64 if bench.quick else 1024)
    memory(bench, costs, workers)


if __name__ == "__main__":
    main(__doc__ or "", measure)
