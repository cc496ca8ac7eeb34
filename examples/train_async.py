"""Train the digits inside an asyncio program that does other things meanwhile: what `async for` is for.

    python examples/train_async.py [--epochs 15] [--workers 2]

One event loop trains, serves the run's status as JSON over HTTP on a loopback port, asks for it twenty times a second
as a dashboard would, and writes checkpoints to disk. While `async for` waits, the loop goes on with the rest.
Ends with what the dashboard saw: how many answers, and how long the slowest took.
"""

import argparse
import asyncio
import io
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import aiofiles
import aiohttp
import torch
from aiohttp import web

from asyncloader import DataLoader
from digits import Sample, Trainer, train_and_test_sets, training_arguments, write_digits


@dataclass
class Status:
    """Where the run is; what the endpoint answers."""

    epoch: int = 0
    step: int = 0
    loss: float | None = None
    test_accuracy: float | None = None
    checkpoints: int = 0


@dataclass
class Dashboard:
    """Polls the endpoint for as long as training runs, and keeps what it saw."""

    url: str
    response_s: list[float] = field(default_factory=list)
    steps_seen: set[int] = field(default_factory=set)

    async def poll(self) -> None:
        async with aiohttp.ClientSession() as client:
            while True:
                asked = time.perf_counter()
                async with client.get(self.url) as response:
                    answer = await response.json()
                self.response_s.append(time.perf_counter() - asked)
                self.steps_seen.add(answer["step"])
                await asyncio.sleep(0.05)


@asynccontextmanager
async def serving(status: Status) -> AsyncIterator[str]:
    """Serve the status on a free port of the loopback interface; yields the url."""

    async def answer(_: web.Request) -> web.Response:
        return web.json_response(asdict(status))

    app = web.Application()
    app.router.add_get("/status", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0]
        yield f"http://{host}:{port}/status"
    finally:
        await runner.cleanup()


async def write_checkpoint(path: Path, content: bytes, status: Status) -> None:
    """Write a checkpoint beside its place and move it there, so that a file at `path` is always whole."""
    unfinished = path.with_suffix(".part")
    async with aiofiles.open(unfinished, "wb") as file:
        await file.write(content)
    os.replace(unfinished, path)
    status.checkpoints += 1


async def train(
    trainer: Trainer,
    train_loader: DataLoader[Sample],
    test_loader: DataLoader[Sample],
    epochs: int,
    status: Status,
    checkpoints: Path,
) -> None:
    """Train for some epochs; a checkpoint after each is written while the next one trains."""
    async with asyncio.TaskGroup() as writers:
        for status.epoch in range(1, epochs + 1):
            async for images, labels in train_loader:
                # On a thread: a step takes milliseconds in which the loop could not answer. torch releases the GIL.
                status.loss = await asyncio.to_thread(trainer.step, images, labels)
                status.step += 1
            status.test_accuracy = await accuracy(trainer, test_loader)
            print(f"epoch {status.epoch:2}: loss {status.loss:.3f}, test accuracy {status.test_accuracy:.1%}")
            snapshot = io.BytesIO()
            torch.save(trainer.model.state_dict(), snapshot)  # taken here: the next step changes the weights
            path = checkpoints / f"epoch-{status.epoch:02}.pt"
            writers.create_task(write_checkpoint(path, snapshot.getvalue(), status))


async def accuracy(trainer: Trainer, loader: DataLoader[Sample]) -> float:
    """Measure the share of images that are classified rightly."""
    right = images_seen = 0
    async for images, labels in loader:
        right += await asyncio.to_thread(trainer.count_right, images, labels)
        images_seen += len(labels)
    return right / images_seen


async def run(args: argparse.Namespace, checkpoints: Path) -> float:
    """Train beside a status endpoint and its dashboard, and return the test accuracy."""
    train_set, test_set = train_and_test_sets(args.data)
    train_loader = DataLoader(train_set, batch_size=32, shuffle=True, num_workers=args.workers)
    test_loader = DataLoader(test_set, batch_size=128, num_workers=args.workers)
    trainer = Trainer(steps=args.epochs * len(train_loader))
    status = Status()

    async with serving(status) as url:
        print(f"status at {url}")
        dashboard = Dashboard(url)
        polling = asyncio.create_task(dashboard.poll())
        try:
            await train(trainer, train_loader, test_loader, args.epochs, status, checkpoints)
        finally:
            polling.cancel()
            await asyncio.wait([polling])
    if not polling.cancelled():
        polling.result()  # the dashboard failed: say how

    last = torch.load(checkpoints / f"epoch-{args.epochs:02}.pt", weights_only=True)
    trainer.model.load_state_dict(last)
    reached = await accuracy(trainer, test_loader)
    times_ms = [seconds * 1000 for seconds in dashboard.response_s]
    print(f"test accuracy {reached:.1%} with the weights from the last of {status.checkpoints} checkpoints")
    print(
        f"{len(times_ms)} requests answered during training, at {len(dashboard.steps_seen)} different steps: "
        f"median {statistics.median(times_ms):.1f} ms, slowest {max(times_ms):.0f} ms"
    )
    return reached


def main() -> None:
    args = training_arguments(__doc__).parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)  # the network is too small for more, and the workers want the other cores
    write_digits(args.data)
    with tempfile.TemporaryDirectory(prefix="checkpoints-") as checkpoints:
        reached = asyncio.run(run(args, Path(checkpoints)))
    if reached < args.min_accuracy:
        sys.exit(f"test accuracy is below {args.min_accuracy:.0%}")


if __name__ == "__main__":
    main()
