"""overview: all loaders on all kinds of load, in one run, in turns.

Sides: torch's DataLoader (in order, unordered, persistent workers), torchdata's StatefulDataLoader, SPDL (its drop-in,
and its pipeline of threads), Grain, and ours (`for`, `async for`, persistent workers); each with 2 workers, batches in
order but for one. Loads:

- dispatch: batches of one int; what a batch costs that has nothing in it.
- large batches: 64 x 3 x 224 x 224 float32, 38.5 MB, of one tensor; the trainer reads one number of each page.
- skew: samples that sleep 0.5 ms, every 200th 200 ms; batches of 16, 4 workers.
- photographs: JPEG, decoded with Pillow and resized (see decode); beside it two processes that do nothing else.
- samples that wait: 20 ms each, as a request over a network does, with 2, 16, 128 and 1,024 of them in flight in all,
  for each loader that can have so many: by processes, threads or coroutines. Whole epochs of 100 times as many samples,
  so that the bound, so many every 20 ms, takes 2 s.
- the next epoch, a new loader: time until the first batch, ints, with persistent workers and without.
- memory: a list of dicts (see memory), the most during an epoch, each in a fresh process.

A clock begins before the iterator is made and ends with the last batch, so that nothing is made before it starts: that
is the whole epoch. "Steady" is the rate of its last two thirds, so that starting and warming up are not in it; what is
ready when these begin was made before, which is a window at most, and so it is with every loader. Both are compared to
torch's in the same round, and the median of these ratios is what counts. A loader that fails is named with its error.
With --quick short epochs, three rounds in place of five, and no Grain, whose start alone takes seconds.

No targets: each load has a script of its own that has them. docs/draw_benchmarks.py makes the page and the pictures.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from tests.benchmarks import peers
from tests.benchmarks.bench import Bench, main, number, summary
from tests.benchmarks.decode import Photographs, bound
from tests.benchmarks.dispatch import Ints
from tests.benchmarks.measure import Memory, Run, cpu_seconds, settle
from tests.benchmarks.memory import Dicts, count
from tests.benchmarks.skew import Sleeps
from tests.benchmarks.transport import read_pages

WORKERS = 2
WAIT_S = 0.02
IN_FLIGHT = (2, 16, 128, 1024)
MOST_PROCESSES = 32


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
        time.sleep(WAIT_S)
        return index


class AsyncWaits(Ints):
    """The same for a dataset that is awaited."""

    async def __getitem__(self, index: int) -> int:  # type: ignore[override]
        await asyncio.sleep(WAIT_S)
        return index


def read(batch: Any) -> None:
    """Read one number of each page; Grain gives arrays."""
    read_pages(torch.as_tensor(batch))


class Epoch:
    """The clock of one epoch: to be made before its iterator, and told of each batch."""

    def __init__(self, per_batch: float) -> None:
        self._per_batch = per_batch
        self._cpu = cpu_seconds()
        self._began = time.perf_counter()
        self._came: list[float] = []

    def lap(self) -> None:
        self._came.append(time.perf_counter())

    def run(self) -> Run:
        """Return the rate of the whole epoch, from the beginning on, and beside it that of its last two thirds."""
        came, count = self._came, len(self._came)
        cpu = cpu_seconds() - self._cpu
        third = count // 3
        extras = {
            "steady": (count - 1 - third) * self._per_batch / (came[-1] - came[third]),
            "first ms": (came[0] - self._began) * 1e3,
            "cpu us/batch": cpu / count * 1e6,
        }
        return Run(count * self._per_batch / (came[-1] - self._began), extras)


def whole(
    make: peers.Make, dataset: Any, batch_size: int, use: Any, per_batch: float, workers: int, **options: Any
) -> Run:
    """Run through one epoch."""
    loader = make(dataset, batch_size, workers, **options)
    watch = Epoch(per_batch)
    for batch in loader:
        if use is not None:
            use(batch)
        watch.lap()
    return watch.run()


def whole_async(dataset: Any, batch_size: int, use: Any, per_batch: float, workers: int) -> Run:
    """Do so with our `async for`."""

    async def go() -> Run:
        loader = peers.ours(dataset, batch_size, workers)
        watch = Epoch(per_batch)
        async for batch in loader:
            if use is not None:
                use(batch)
            watch.lap()
        return watch.run()

    return asyncio.run(go())


def waiting(in_flight: int, short: bool) -> dict[str, Callable[[], Run]]:
    """Return the loaders that can have so many samples in flight, each in the way that it has for it."""
    batch, turns = min(16, max(1, in_flight // 8)), 15 if short else 100
    count = -(-in_flight * turns // batch) * batch
    blocking, awaited = Waits(count), AsyncWaits(count)
    each = max(1, in_flight // WORKERS)
    sides: dict[str, Callable[[], Run]] = {}
    if in_flight <= MOST_PROCESSES:  # one sample in each process
        sides["torch"] = partial(whole, peers.torch_ordered, blocking, batch, None, batch, in_flight)
        sides["asyncloader, processes"] = partial(whole, peers.ours, blocking, batch, None, batch, in_flight)
    given = blocking, batch, None, batch, WORKERS
    sides["SPDL, threads"] = partial(whole, peers.spdl_threads, *given, threads=in_flight)
    if not short and 2 * WORKERS <= in_flight <= 128:  # each thread fetches a whole batch, so batches are of one sample
        sides["Grain, threads"] = partial(whole, peers.grain, blocking, 1, None, 1, WORKERS, threads=each)
    options: dict[str, Any] = {"concurrency": each}
    sides["asyncloader, threads"] = partial(whole, peers.ours, *given, **options)
    sides["asyncloader, async"] = partial(whole, peers.ours, awaited, batch, None, batch, WORKERS, **options)
    return sides


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


def others(bench: Bench) -> dict[str, peers.Make]:
    """Return the loaders that take part."""
    return {name: make for name, make in peers.PEERS.items() if name != "Grain" or not bench.quick}


def loads(bench: Bench) -> dict[str, tuple[str, Mapping[str, Callable[[], Run]], int]]:
    """Return title: (unit, sides, rounds)."""
    short, rivals = bench.quick, others(bench)
    rounds = 3 if short else 5
    skewed = Sleeps([0.2 if index % 200 == 100 else 0.0005 for index in range(800 if short else 2400)])
    photographs = Photographs((500, 375), 768 if short else 2048, (224, 224))
    images = SameImage(64 * (48 if short else 120))

    def sides(
        dataset: Any, batch_size: int, use: Any = None, per_batch: float = 1.0, workers: int = WORKERS
    ) -> dict[str, Any]:
        given = dataset, batch_size, use, per_batch, workers
        found: dict[str, Any] = {name: partial(whole, make, *given) for name, make in rivals.items()}
        return {**found, "asyncloader, async for": partial(whole_async, *given)}

    decoding = sides(photographs, 32, None, 32)
    decoding["two processes alone"] = partial(bound, photographs, 32)
    fresh = {
        name: partial(until_first, partial(make, Ints(1600), 8, WORKERS))
        for name, make in rivals.items()
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
        "dispatch": ("batches/s", sides(Ints(3000 if short else 9000), 1), rounds),
        "large batches": ("GB/s", sides(images, 64, read, 64 * 3 * 224 * 224 * 4 / 1e9), rounds),
        "skew": ("samples/s", sides(skewed, 16, None, 16, 4), rounds),
        "photographs": ("images/s", decoding, rounds),
        "a new loader": ("ms", fresh, rounds),
        "the next epoch": ("ms", lasting, 2 * rounds),
    }


def steady(bench: Bench, title: str, unit: str, runs: Mapping[str, list[Run]]) -> None:
    """Remember the rates without start and warm-up, and their ratios to torch's in the same round."""
    found, rows = {}, []
    baseline = [run.extras["steady"] for run in next(iter(runs.values()))]
    for name, own in runs.items():
        if "steady" not in own[0].extras:  # two processes alone
            continue
        rates = [run.extras["steady"] for run in own]
        ratios = [mine / theirs for mine, theirs in zip(rates, baseline, strict=True)]
        found[name] = {unit: summary(rates), "ratio": summary(ratios), "extras": {}, "target": ""}
        rows.append([name, number(statistics.median(rates)), number(statistics.median(ratios))])
    bench.table(f"{title}, steady", ["", unit, "ratio"], rows)
    bench.found[f"{title}, steady"] = found


def measure_loads(bench: Bench, failed: dict[str, str]) -> None:
    """Let all loaders run through each load; what they keep is gone afterwards."""
    for title, (unit, sides, rounds) in loads(bench).items():
        stay = title == "the next epoch"
        sound = sides if stay else safely(bench, title, sides, failed)
        if stay:
            for side in sides.values():
                side()
        runs = bench.compare(title, unit, sound, rounds=rounds, workers_stay=stay)
        if "steady" in runs["torch"][0].extras:
            steady(bench, title, unit, runs)


def measure_waiting(bench: Bench, failed: dict[str, str]) -> None:
    """Let those loaders that can have so many samples in flight wait for them."""
    for in_flight in IN_FLIGHT:
        title = f"samples that wait, {in_flight} in flight"
        bench.compare(title, "samples/s", safely(bench, title, waiting(in_flight, bench.quick), failed), rounds=3)


def measure_memory(bench: Bench, failed: dict[str, str]) -> None:
    """Run each loader over a list in a fresh process."""
    most = {}
    for name in others(bench):
        try:
            most[name] = bench.alone("memory", name, watch=False)[0]["most MB"]
        except RuntimeError as error:
            failed[f"memory: {name}"] = str(error)
    bench.note(f"memory, {count(bench):,} dicts, MB", **most)


def measure(bench: Bench) -> None:
    if absent := peers.missing():
        raise SystemExit(f"not installed: {', '.join(absent)}; `make bench` installs them")
    failed: dict[str, str] = {}
    for part in (measure_loads, measure_waiting, measure_memory):
        part(bench, failed)
    bench.found["failed"] = failed


def memory(bench: Bench, name: str) -> dict[str, float]:
    """Run through one epoch over a list of dicts in this process; what the tree took at the most."""
    dataset = Dicts(count(bench))
    watch, most = Memory(), 0
    for seen, _ in enumerate(peers.PEERS[name](dataset, 1000, WORKERS)):
        if seen % 50 == 0 or seen >= len(dataset) // 1000 - 3:
            most = max(most, watch.bytes())
    return {"most MB": most / 1e6}


if __name__ == "__main__":
    main(__doc__ or "", measure, memory=memory)
