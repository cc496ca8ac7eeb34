"""growth: what becomes of a loader as work grows.

Four things grow, one at a time, torch's DataLoader and ours in turns:

- workers, 1 to 64: samples that sleep 10 ms, batches of 8; samples a second from `iter` on, for 40 batches a worker and
  40 more. So starting them counts.
- bytes of a batch, 1 kB to 1 GB: one worker stacks 16 tensors that are there; GB a second from `iter` on, for 0.5 to 8
  GB. The trainer reads a number of each page of 4 kB.
- samples of the dataset, 10^3 to 10^9, shuffled: seconds from `iter` to the first batch, no workers, each in a fresh
  process, and the memory that this took. torch's sampler makes a list of its permutation, so it ends at 10^8; ours
  goes on with `shuffle=True` to 10^8, and with `ElasticSampler`, which computes its order, to 10^9.
- samples in flight, 16 to 8,192: each waits 20 ms; samples a second and CPU time a sample, from the first batch on.
  torch has as many in flight as it has workers, so it is not in there; the bound is all of them every 20 ms.

Two rounds; with --quick one, and each thing grows less far. No targets. docs/draw_growth.py makes the pictures.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from asyncloader.samplers import ElasticSampler
from tests.benchmarks.bench import Bench, main
from tests.benchmarks.dispatch import Ints
from tests.benchmarks.latency import WAIT_S, bound, ours, with_extras
from tests.benchmarks.measure import Memory, Run, cpu_seconds
from tests.benchmarks.transport import read_pages

SLEEP_S = 0.01
BATCH = 8
STACKED = 16


class Sleeps(Dataset[int]):
    """Samples that sleep."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        time.sleep(SLEEP_S)
        return index


class Rows(Dataset[Tensor]):
    """One tensor, again and again."""

    def __init__(self, nbytes: int, count: int) -> None:
        self.row = torch.ones(max(1, nbytes // 4))
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return self.row


def whole(make: Callable[[], Any], units: float, use: Callable[[Any], object] | None = None) -> Run:
    """Run through an epoch, its beginning included; return units a second."""
    cpu, began, first = cpu_seconds(), time.perf_counter(), 0.0
    for batch in make():
        first = first or time.perf_counter() - began
        if use is not None:
            use(batch)
    took = time.perf_counter() - began
    return Run(units / took, {"first ms": first * 1e3, "cpu s": cpu_seconds() - cpu})


def measure_workers(bench: Bench, rounds: int) -> None:
    for workers in (1, 4, 16) if bench.quick else (1, 2, 4, 8, 16, 32, 64):
        dataset = Sleeps(BATCH * 40 * (workers + 1) // (4 if bench.quick else 1))
        sides: dict[str, Callable[[], Run]] = {
            name: partial(whole, partial(loader, dataset, BATCH, num_workers=workers), len(dataset))
            for name, loader in bench.loaders.items()
        }
        sides["the bound"] = partial(lambda workers: Run(workers / SLEEP_S), workers)
        bench.compare(f"workers, {workers}", "samples/s", sides, rounds=rounds)


def measure_bytes(bench: Bench, rounds: int) -> None:
    for power in range(3, 9 if bench.quick else 10):
        nbytes = 10**power
        batches = min(20_000, max(8, 500_000_000 // nbytes)) // (4 if bench.quick else 1)
        dataset = Rows(nbytes // STACKED, STACKED * batches)
        sides = {
            name: partial(whole, partial(loader, dataset, STACKED, num_workers=1), batches * nbytes / 1e9, read_pages)
            for name, loader in bench.loaders.items()
        }
        bench.compare(f"bytes a batch, {nbytes}", "GB/s", sides, rounds=rounds)


def begin(bench: Bench, side: str, power: str) -> dict[str, float]:
    """Take the first batch of a shuffled dataset; return the seconds, and the MB that it took."""
    dataset = Ints(10 ** int(power))
    memory = Memory()
    before, began = memory.private_bytes(), time.perf_counter()
    if side == "ours, ElasticSampler":
        iterator = iter(bench.loaders["ours"](dataset, 32, sampler=ElasticSampler(dataset)))
    else:
        iterator = iter(bench.loaders[side](dataset, 32, shuffle=True))
    next(iterator)
    return {"s": time.perf_counter() - began, "MB": (memory.private_bytes() - before) / 1e6}


def measure_samples(bench: Bench, rounds: int) -> None:
    def side(name: str, power: int) -> Run:
        found, most = bench.alone("begin", name, str(power))
        return Run(found["s"], {"MB": found["MB"], "most MB": most / 1e6})

    for power in range(3, 8 if bench.quick else 10):
        names = ["ours, ElasticSampler"] if power > 8 else ["torch", "ours", "ours, ElasticSampler"]
        sides = {name: partial(side, name, power) for name in names}
        bench.compare(f"samples, {10**power}", "s", sides, rounds=rounds)


def measure_in_flight(bench: Bench, rounds: int) -> None:
    for in_flight in (16, 128, 1024) if bench.quick else (16, 64, 256, 1024, 4096, 8192):
        sides: dict[str, Callable[[], Run]] = {
            f"ours, {workers} workers": partial(with_extras, partial(ours, bench, in_flight, workers, 25 * in_flight))
            for workers in (0, 2)
        }
        bench.compare(
            f"in flight, {in_flight}", "samples/s", {"the bound": partial(bound, in_flight), **sides}, rounds=rounds
        )


def measure(bench: Bench) -> None:
    torch.set_num_threads(1)
    bench.note("samples in flight wait", s=WAIT_S)
    rounds = 1 if bench.quick else 2
    for one_thing in (measure_workers, measure_bytes, measure_samples, measure_in_flight):
        one_thing(bench, rounds)


if __name__ == "__main__":
    main(__doc__ or "", measure, begin=begin)
