"""remote: what workers behind a connection cost, beside local ones and a bare TCP connection.

Measured on one machine over the loopback: agents are processes here, launched as tests do it, with everything else as
it is with Ray. 2 workers each, in one agent, or local ones (fork); persistent, after an epoch that is not counted.

- tiny batches: of 8 ints each, 4,000 an epoch.
- large batches: 38.5 MB of float32 (64 images of 3 x 224 x 224), 40 an epoch, each copied by the worker from its own
  memory, and dropped by the trainer. The bare connection is one process that sends as many bytes from its memory, and
  a buffered protocol on a loop of uvloop that receives them into one place; "fed", another process copies into shared
  memory what the first one sends: no less than that is to be done by whoever makes batches.
- beside Ray (where it is installed): from one raylet to another on this machine, actors that return objects of Ray,
  Ray Data, and `RayWorkers`, two at a time each. All are there all the while.

Seen on 2 cores with nobody beside it (--quick): tiny batches 6,300 a second local, 5,000 by an agent (0.83); large ones
2.5 GB/s over the bare connection, 1.7 where that is fed, 1.6 by an agent (0.64 of the first, 0.96 of the second), 7.1
by local workers, who send nothing. Beside Ray, tiny batches 4,600 a second (Ray objects 1,400, Ray Data 1,300), large
ones 1.85 GB/s (0.60, 0.36).

Targets: tiny batches at half the rate of local workers or more; large ones at 0.9 of the bare connection or more. On
a machine with few cores sender, receiver and workers share them: bare TCP has two busy processes, the loader four, so
what is fed is the bound there. Large batches at 5 times the rate of Ray's objects: here bare TCP itself has 4.2 times.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import mmap
import multiprocessing
import socket
import statistics
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import uvloop
from torch.utils.data import Dataset

from tests.benchmarks import ray_sides
from tests.benchmarks.bench import Bench, Target, main
from tests.benchmarks.dispatch import Ints
from tests.benchmarks.measure import Run, cpu_seconds
from tests.ray.local_agents import LocalAgents

FIVE_TIMES = Target(">=", 5)
HALF = Target(">=", 0.5)
NINE_TENTHS = Target(">=", 0.9)
SHAPE = (64, 3, 224, 224)
COUNT = 40
TINY = 4000
SLOTS = 4


class Images(Dataset[torch.Tensor]):
    """Batches of images that are in memory."""

    def __init__(self) -> None:
        self.images: torch.Tensor | None = None

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.images is None:
            self.images = torch.rand(SHAPE)
        return self.images


def epoch(loader: Any) -> Run:
    """Run through one epoch; return batches a second."""
    cpu, began, count = cpu_seconds(), time.perf_counter(), 0
    for _ in loader:
        count += 1
    return Run(count / (time.perf_counter() - began), {"cpu s": cpu_seconds() - cpu})


def gigabytes(loader: Any) -> Run:
    """Run through one epoch; return GB a second."""
    run = epoch(loader)
    return run._replace(value=run.value * 4 * torch.Size(SHAPE).numel() / 1e9)


def send(port: int, count: int, batches: Iterator[memoryview]) -> None:
    """Send batches over a connection."""
    with socket.create_connection(("127.0.0.1", port)) as sock:
        for batch in itertools.islice(batches, count):
            sock.sendall(batch)


class Receiver(asyncio.BufferedProtocol):
    """Receives batches into one place; the clock runs from the end of the first one to that of the last one."""

    def __init__(self, nbytes: int, ended: asyncio.Future[float]) -> None:
        self.place = memoryview(bytearray(nbytes))
        self.at = 0
        self.began = 0.0
        self.ended = ended

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.place[self.at :]

    def buffer_updated(self, nbytes: int) -> None:
        self.at = (self.at + nbytes) % len(self.place)
        if not self.at and not self.began:
            self.began = time.perf_counter()

    def connection_lost(self, error: Exception | None) -> None:
        self.ended.set_result(time.perf_counter() - self.began)


class Shared:
    """Memory for some batches, that one process fills and another one sends: our slabs, with nothing around them."""

    def __init__(self, nbytes: int) -> None:
        context = multiprocessing.get_context("fork")
        self.places = [memoryview(mmap.mmap(-1, nbytes)) for _ in range(SLOTS)]
        self.free, self.full = context.Semaphore(SLOTS), context.Semaphore(0)

    def fill(self, count: int) -> None:
        """Make batches, by a copy from this process's own memory each."""
        images = np.ones(len(self.places[0]), np.uint8)
        for place in itertools.islice(itertools.cycle(self.places), count):
            self.free.acquire()
            np.copyto(np.frombuffer(place, np.uint8), images)
            self.full.release()

    def filled(self) -> Iterator[memoryview]:
        """Give what has been filled; it is free again when the next one is asked for."""
        for place in itertools.cycle(self.places):
            self.full.acquire()
            yield place
            self.free.release()


def bare(*, fed: bool) -> Run:
    """Receive as many bytes over a bare connection; return GB a second.

    Args:
        fed: The sender has a process that makes what it sends; otherwise it sends the same memory again and again.
    """
    context, nbytes, count = multiprocessing.get_context("fork"), 4 * torch.Size(SHAPE).numel(), COUNT + 1
    if fed:
        shared = Shared(nbytes)
        makers, batches = [context.Process(target=shared.fill, args=(count,))], shared.filled()
    else:
        makers, batches = [], itertools.repeat(memoryview(bytearray(nbytes)))

    async def receive() -> float:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[float] = loop.create_future()
        server = await loop.create_server(lambda: Receiver(nbytes, ended), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        processes = [*makers, context.Process(target=send, args=(port, count, batches))]
        for process in processes:
            process.start()
        seconds = await ended
        for process in processes:
            process.join()
        server.close()
        return seconds

    cpu = cpu_seconds()
    rate = COUNT * nbytes / uvloop.run(receive()) / 1e9
    return Run(rate, {"cpu s": cpu_seconds() - cpu})


def measure(bench: Bench) -> None:
    beside_local(bench)
    if importlib.util.find_spec("ray") is None:
        print("\nNot beside Ray: it is not installed (make test-ray installs it)")
        return
    with ray_sides.cluster():
        beside_ray(bench)


def beside_local(bench: Bench) -> None:
    """Local workers, and a bare connection."""
    make = bench.loaders["ours"]
    local: dict[str, Any] = {"num_workers": 2, "persistent_workers": True}
    both: dict[str, Any] = {"num_workers": 1, "persistent_workers": True, "worker_backend": LocalAgents(1)}
    remote: dict[str, Any] = {"persistent_workers": True, "worker_backend": LocalAgents(2)}
    rounds = 3 if bench.quick else 7
    for title, unit, dataset, options, run in (
        ("tiny batches", "batches/s", Ints(8 * TINY), {"batch_size": 8, "scheduling": "dynamic"}, epoch),
        ("large batches", "GB/s", Images(), {"batch_size": None, "scheduling": "dynamic"}, gigabytes),
    ):
        loaders = {
            name: make(dataset, **options, **where)
            for name, where in (("local", local), ("local and agent", both), ("agent", remote))
        }
        sides: dict[str, Any] = {name: partial(run, loader) for name, loader in loaders.items()}
        targets = {"agent": HALF}
        if unit == "GB/s":
            tcp = {"bare TCP": partial(bare, fed=False), "bare TCP, fed": partial(bare, fed=True)}
            sides, targets = tcp | sides, {"agent": NINE_TENTHS}
        for side in sides.values():
            side()
        runs = bench.compare(title, unit, sides, rounds=rounds, targets=targets, workers_stay=True)
        if fed := runs.get("bare TCP, fed"):
            shares = [mine.value / other.value for mine, other in zip(runs["agent"], fed, strict=True)]
            bench.note("agent, of bare TCP that is fed", ratio=statistics.median(shares))
        for loader in loaders.values():
            loader.close()


def beside_ray(bench: Bench) -> None:
    """The same from one node to another by way of Ray's object store. Ray's own processes are there all the while."""
    from asyncloader.ray import RayWorkers

    tiny, large = Ints(8 * TINY), 4 * torch.Size(SHAPE).numel() / 1e9
    for title, unit, dataset, batch_size, run, make, count, scale in (
        ("tiny batches, beside Ray", "batches/s", tiny, 8, epoch, ray_sides.ints, TINY, 1.0),
        ("large batches, beside Ray", "GB/s", Images(), None, gigabytes, ray_sides.Images(SHAPE), COUNT, large),
    ):
        options: dict[str, Any] = {"scheduling": "dynamic", "persistent_workers": True, "num_workers": 0}
        loader = bench.loaders["ours"](dataset, batch_size, worker_backend=RayWorkers(num_workers=2), **options)
        rows = (None, 8) if batch_size else (make, SHAPE[0])
        sides: dict[str, Any] = {
            "Ray objects": ray_sides.Objects(make, count, scale).run,
            "Ray Data": ray_sides.Data(rows[0], count, rows[1], scale).run,
            "RayWorkers": partial(run, loader),
        }
        for side in sides.values():
            side()
        targets = {"RayWorkers": FIVE_TIMES} if unit == "GB/s" else {}
        bench.compare(title, unit, sides, rounds=2 if bench.quick else 5, targets=targets, workers_stay=True)
        loader.close()


if __name__ == "__main__":
    main(__doc__ or "", measure)
