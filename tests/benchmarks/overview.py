"""overview: all loaders on all kinds of load, in one run, in turns.

Sides: torch's DataLoader (in order, unordered, persistent workers), torchdata's StatefulDataLoader, SPDL (its drop-in,
and its pipeline of threads), Grain, and ours (`for`, `async for`, persistent workers); each with 2 workers, batches in
order but for one. Loads:

- dispatch: batches of one int; what a batch costs that has nothing in it.
- large batches: 64 x 3 x 224 x 224 float32, 38.5 MB, of one tensor; the trainer reads one number of each page.
- waiting: samples that sleep 5 ms, as a request over a network does; batches of 16. Beside it what each has for that:
  SPDL's pipeline with 128 threads, Grain with 16 threads in each of 2 workers (which fetch whole batches), our async
  dataset with 64 samples at a time in each of 2 workers.
- skew: samples that sleep 0.5 ms, every 200th 200 ms; batches of 16, 4 workers.
- photographs: JPEG, decoded with Pillow (see decode); beside it two processes that do nothing else.
- the next epoch, a new loader: time until the first batch, ints, with persistent workers and without.
- memory: a list of dicts (see memory), the most during an epoch, each in a fresh process.

Rates are over whole epochs from the second batch of each worker on, so starting is not in them. A loader that fails is
named with its error. With --quick short epochs, three rounds in place of five.

No targets: each load has a script of its own that has them. docs/draw_benchmarks.py makes page and picture of the JSON.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from tests.benchmarks import peers
from tests.benchmarks.bench import Bench, main
from tests.benchmarks.decode import Photographs, bound
from tests.benchmarks.dispatch import Ints
from tests.benchmarks.measure import Memory, Run, drain, drain_async, settle
from tests.benchmarks.memory import Dicts, count
from tests.benchmarks.skew import Sleeps
from tests.benchmarks.transport import read_pages

WORKERS = 2


class SameImage(Dataset[Tensor]):
    """One tensor, again and again."""

    def __init__(self, length: int) -> None:
        self.image = torch.ones(3, 224, 224)
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        return self.image


class Waits(Ints):
    """Samples that come over a network, so to speak."""

    def __getitem__(self, index: int) -> int:
        time.sleep(0.005)
        return index


class AsyncWaits(Ints):
    """The same for a dataset that is awaited."""

    async def __getitem__(self, index: int) -> int:  # type: ignore[override]
        await asyncio.sleep(0.005)
        return index


def read(batch: Any) -> None:
    """Read one number of each page; Grain gives arrays."""
    read_pages(torch.as_tensor(batch))


def whole(
    make: peers.Make, dataset: Any, batch_size: int, use: Any, per_batch: float, workers: int, **options: Any
) -> Run:
    """Run through one epoch."""
    return drain(make(dataset, batch_size, workers, **options), use, per_batch, warm_up=2 * workers - 1)


def whole_async(dataset: Any, batch_size: int, use: Any, per_batch: float, workers: int) -> Run:
    """Do so with our `async for`."""
    loader = peers.ours(dataset, batch_size, workers)
    return asyncio.run(drain_async(loader, use, per_batch, warm_up=2 * workers - 1))


def until_first(make: Callable[[], Any]) -> Run:
    """Time the first batch of a new loader, in milliseconds; then end it."""
    began = time.perf_counter()
    iterator = iter(make())
    next(iterator)
    took_s = time.perf_counter() - began
    for _ in iterator:
        pass
    return Run(took_s * 1e3)


def until_next(loader: Any) -> Run:
    """Time the first batch of a later epoch, in milliseconds."""
    return until_first(lambda: loader)


def safely(bench: Bench, title: str, sides: Mapping[str, Callable[[], Run]], failed: dict[str, str]) -> dict[str, Any]:
    """Leave out others' loaders that fail when they are tried once, and say why."""
    sound = {}
    for name, side in sides.items():
        if bench.quick or name.startswith(("torch", "asyncloader", "two processes")):
            sound[name] = side
            continue
        try:
            side()
            settle()
            sound[name] = side
        except Exception as error:
            failed[f"{title}: {name}"] = f"{type(error).__name__}: {error}"
            print(f"  {title}: {name} fails: {type(error).__name__}: {error}", flush=True)
        gc.collect()
    return sound


def loads(bench: Bench) -> dict[str, tuple[str, Mapping[str, Callable[[], Run]], int]]:
    """Return title: (unit, sides, rounds)."""
    short = bench.quick
    rounds = 3 if short else 5
    skewed = Sleeps([0.2 if index % 200 == 100 else 0.0005 for index in range(800 if short else 3200)])
    photographs = Photographs(512 if short else 2048)
    images = SameImage(64 * (16 if short else 60))

    def sides(
        dataset: Any, batch_size: int, use: Any = None, per_batch: float = 1.0, workers: int = WORKERS
    ) -> dict[str, Any]:
        given = dataset, batch_size, use, per_batch, workers
        found: dict[str, Any] = {name: partial(whole, make, *given) for name, make in peers.PEERS.items()}
        return {**found, "asyncloader, async for": partial(whole_async, *given)}

    waiting = sides(Waits(640 if short else 1600), 16, None, 16)
    many = Waits(3200 if short else 12_800), AsyncWaits(3200 if short else 12_800)
    waiting["SPDL, 128 threads"] = partial(whole, peers.spdl_threads, many[0], 16, None, 16, WORKERS, threads=128)
    waiting["Grain, 2 x 16 threads"] = partial(whole, peers.grain, many[0], 16, None, 16, WORKERS, threads=16)
    waiting["asyncloader, async dataset"] = partial(whole, peers.ours, many[1], 16, None, 16, WORKERS)
    decoding = sides(photographs, 32, None, 32)
    decoding["two processes alone"] = partial(bound, photographs)
    fresh = {
        name: partial(until_first, partial(make, Ints(1600), 8, WORKERS))
        for name, make in peers.PEERS.items()
        if name != "torch, unordered"
    }
    lasting = {
        name: partial(until_next, make(Ints(1600), 8, WORKERS, persistent_workers=True))
        for name, make in (
            ("torch", peers.torch_ordered),
            ("StatefulDataLoader", peers.stateful),
            ("asyncloader", peers.ours),
        )
    }
    return {
        "dispatch": ("batches/s", sides(Ints(1500 if short else 10_000), 1), rounds),
        "large batches": ("GB/s", sides(images, 64, read, 64 * 3 * 224 * 224 * 4 / 1e9), rounds),
        "waiting": ("samples/s", waiting, rounds),
        "skew": ("samples/s", sides(skewed, 16, None, 16, 4), rounds),
        "photographs": ("images/s", decoding, rounds),
        "a new loader": ("ms", fresh, rounds),
        "the next epoch": ("ms", lasting, 2 * rounds),
    }


def measure(bench: Bench) -> None:
    if absent := peers.missing():
        raise SystemExit(f"not installed: {', '.join(absent)}; `make bench` installs them")
    failed: dict[str, str] = {}
    for title, (unit, sides, rounds) in loads(bench).items():
        stay = title == "the next epoch"
        sound = sides if stay else safely(bench, title, sides, failed)
        if stay:
            for side in sides.values():
                side()
        bench.compare(title, unit, sound, rounds=rounds, workers_stay=stay)
    most = {}
    for name in peers.PEERS:
        try:
            most[name] = bench.alone("memory", name, watch=False)[0]["most MB"]
        except RuntimeError as error:
            failed[f"memory: {name}"] = str(error)
    bench.note(f"memory, {count(bench):,} dicts, MB", **most)
    bench.found["failed"] = failed


def memory(bench: Bench, name: str) -> dict[str, float]:
    """Run through one epoch over a list of dicts in this process; what the tree took at the most."""
    dataset = Dicts(count(bench))
    watch, most = Memory(), 0
    for number, _ in enumerate(peers.PEERS[name](dataset, 1000, WORKERS)):
        if number % 50 == 0 or number >= len(dataset) // 1000 - 3:
            most = max(most, watch.bytes())
    return {"most MB": most / 1e6}


if __name__ == "__main__":
    main(__doc__ or "", measure, memory=memory)
