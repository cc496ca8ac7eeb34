"""remote: what workers behind a connection cost, beside local ones and a bare TCP connection.

Measured on one machine over the loopback: agents are processes here, launched as tests do it, with everything else as
it is with Ray. 2 workers each, in one agent, or local ones (fork); persistent, after an epoch that is not counted.

- tiny batches: of 8 ints each, 4,000 an epoch.
- large batches: 38.5 MB of float32 (64 images of 3 x 224 x 224), 40 an epoch, each copied by the worker from its own
  memory, and dropped by the trainer. The bare connection is one process that sends as many bytes from its memory, and
  a buffered protocol on a loop of uvloop that receives them into one place.

Seen on 2 cores that others used as well (--quick): tiny batches 5,500 a second local, 4,700 by an agent (0.59); large
ones 2.0 GB/s over the bare connection, 1.35 by an agent (0.67), 3.9 by local workers, who send nothing.

Targets: tiny batches at half the rate of local workers or more; large ones at 0.9 of the bare connection or more. On
a machine with few cores sender, receiver and workers share them: bare TCP has two busy processes, the loader four.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import time
from functools import partial
from typing import Any

import torch
from torch.utils.data import Dataset

from tests.benchmarks.bench import Bench, Target, main
from tests.benchmarks.dispatch import Ints
from tests.benchmarks.measure import Run, cpu_seconds
from tests.workers.remote.local_agents import LocalAgents

HALF = Target(">=", 0.5)
NINE_TENTHS = Target(">=", 0.9)
SHAPE = (64, 3, 224, 224)
COUNT = 40


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


def send(port: int, nbytes: int, count: int) -> None:
    """Send memory over a connection, again and again."""
    data = memoryview(bytearray(nbytes))
    with socket.create_connection(("127.0.0.1", port)) as sock:
        for _ in range(count):
            sock.sendall(data)


class Receiver(asyncio.BufferedProtocol):
    """Receives into one place."""

    def __init__(self, nbytes: int, ended: asyncio.Future[None]) -> None:
        self.place = memoryview(bytearray(nbytes))
        self.at = 0
        self.ended = ended

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.place[self.at :]

    def buffer_updated(self, nbytes: int) -> None:
        self.at = (self.at + nbytes) % len(self.place)

    def connection_lost(self, error: Exception | None) -> None:
        self.ended.set_result(None)


def bare() -> Run:
    """Receive as many bytes over a bare connection; return GB a second, the sender's start left aside."""
    import uvloop

    nbytes = 4 * torch.Size(SHAPE).numel()

    async def receive() -> float:
        loop = asyncio.get_running_loop()
        ended = loop.create_future()
        server = await loop.create_server(lambda: Receiver(nbytes, ended), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        sender = multiprocessing.get_context("fork").Process(target=send, args=(port, nbytes, COUNT))
        sender.start()
        began = time.perf_counter()
        await ended
        seconds = time.perf_counter() - began
        sender.join()
        server.close()
        return seconds

    return Run(COUNT * nbytes / uvloop.run(receive()) / 1e9, {})


def measure(bench: Bench) -> None:
    make = bench.loaders["ours"]
    local: dict[str, Any] = {"num_workers": 2, "persistent_workers": True}
    both: dict[str, Any] = {"num_workers": 1, "persistent_workers": True, "worker_backend": LocalAgents(1)}
    remote: dict[str, Any] = {"persistent_workers": True, "worker_backend": LocalAgents(2)}
    rounds = 3 if bench.quick else 7
    for title, unit, dataset, options, run in (
        ("tiny batches", "batches/s", Ints(32_000), {"batch_size": 8, "scheduling": "dynamic"}, epoch),
        ("large batches", "GB/s", Images(), {"batch_size": None, "scheduling": "dynamic"}, gigabytes),
    ):
        loaders = {
            name: make(dataset, **options, **where)
            for name, where in (("local", local), ("local and agent", both), ("agent", remote))
        }
        sides: dict[str, Any] = {name: partial(run, loader) for name, loader in loaders.items()}
        targets = {"agent": HALF}
        if unit == "GB/s":
            sides, targets = {"bare TCP": bare, **sides}, {"agent": NINE_TENTHS}
        for side in sides.values():
            side()
        bench.compare(title, unit, sides, rounds=rounds, targets=targets, workers_stay=True)
        for loader in loaders.values():
            loader.close()


if __name__ == "__main__":
    main(__doc__ or "", measure)
