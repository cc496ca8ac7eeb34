"""The verdict on loads that are built to be limited in one known way, at random parameters: right, and worth following.

Benchmarks run a load, read the verdict, do what it says, run again, and compare the gain with what was promised.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from asyncloader import DataLoader
from asyncloader.datasets import ParallelMap
from asyncloader.engine.finisher import Finisher
from asyncloader.loops import GuardedLoop
from asyncloader.observe.stats import LoaderStats
from asyncloader.online import Feed
from asyncloader.run.worker_iterator import WorkerIterator
from tests.support import inside
from tests.support.loads import Load, SlowCollate, as_they_are
from tests.support.patience import TRIES
from tests.support.pins import pins

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # workers that sleep need no cores
]

BATCH = 8
SEEDS = range(6)


def best_of_three(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test as a benchmark: it compares times, so it may have three tries, and says nothing about a commit."""

    @pytest.mark.benchmark
    @functools.wraps(test)
    def tried(*args: Any, **kwargs: Any) -> None:
        for _ in range(TRIES - 1):
            try:
                return test(*args, **kwargs)
            except AssertionError:
                continue
        return test(*args, **kwargs)

    return tried


def train(batches: Iterable[Any], step_s: float) -> float:
    """Go through the batches with steps of this length; return the seconds a batch after the first."""
    arrivals = []
    for _ in batches:
        arrivals.append(time.perf_counter())
        if step_s:
            time.sleep(step_s)
    return (arrivals[-1] - arrivals[0]) / (len(arrivals) - 1)


def follow(loader: DataLoader[Any], advice: dict[str, Any]) -> DataLoader[Any]:
    """Make the loader anew, with the options that were advised."""
    names = (
        "batch_size",
        "num_workers",
        "prefetch_factor",
        "collate_fn",
        "max_buffered_bytes",
        "scheduling",
        "concurrency",
    )
    options = {name: getattr(loader, name) for name in names}
    return DataLoader(loader.dataset, **{**options, **advice})


def judged(loader: DataLoader[Any], step_s: float) -> tuple[float, LoaderStats]:
    return train(loader, step_s), loader.stats()


def assert_gain(before_s: float, after_s: float, promised: float) -> None:
    """What was gained is what was promised, roughly: the machine has other things to do as well."""
    assert 0.7 * promised <= before_s / after_s <= 1.4 * promised


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("stage", ["fetch", "collate"])
@best_of_three
def test_too_few_workers(stage: str, seed: int) -> None:
    """Training waits for workers that are all busy: as many as are advised make it as fast as promised."""
    rng = random.Random(f"{stage} {seed}")
    step_s = rng.uniform(0.008, 0.015)
    work_s = step_s * rng.uniform(2.2, 4.6)
    fetch_s = work_s * (rng.uniform(0.7, 0.95) if stage == "fetch" else rng.uniform(0.05, 0.3))
    workers = rng.choice([1, 2]) if work_s > 2.5 * step_s else 1
    loader = DataLoader(
        Load(BATCH * 60, fetch_s / BATCH),
        BATCH,
        num_workers=workers,
        collate_fn=SlowCollate(work_s - fetch_s),
    )
    before_s, stats = judged(loader, step_s)
    verdict = stats.verdict
    assert verdict.limit == stage, str(stats)
    assert "they mostly wait" in verdict.text or stage == "collate"
    assert stats.waited_share == pytest.approx(1 - step_s / (work_s / workers), abs=0.12)
    if stage == "collate":  # samples at once are fetched at once, and collated one batch after the other
        assert workers < verdict.advice["num_workers"] <= 7
        assert_gain(before_s, train(follow(loader, verdict.advice), step_s), verdict.gain)
    else:
        assert 2 <= verdict.advice["concurrency"] <= 7
        assert_gain(before_s, train(follow(loader, verdict.advice), step_s), work_s / workers / step_s)


class Awaits(Load):
    """Samples that come over a network, so to speak."""

    async def __getitem__(self, index: int) -> Any:
        await asyncio.sleep(self.fetch_s)
        return self.sample


@pytest.mark.parametrize("seed", SEEDS)
@best_of_three
def test_too_little_concurrency(seed: int) -> None:
    """Training waits for workers that wait themselves: as many samples at once as advised keep up with it."""
    rng = random.Random(seed)
    concurrency = rng.choice([4, 8])
    step_s = rng.uniform(0.008, 0.015)
    fetch_s = step_s * rng.uniform(2.0, 4.0) * concurrency / BATCH
    loader = DataLoader(Awaits(BATCH * 60, fetch_s), BATCH, num_workers=1, concurrency=concurrency)
    before_s, stats = judged(loader, step_s)
    verdict = stats.verdict
    assert verdict.limit == "fetch", str(stats)
    assert list(verdict.advice) == ["concurrency"]
    assert_gain(before_s, train(follow(loader, verdict.advice), step_s), fetch_s * BATCH / concurrency / step_s)


@pytest.mark.parametrize("seed", SEEDS)
@best_of_three
def test_batches_that_the_trainer_makes_itself(seed: int) -> None:
    """Without workers the verdict says how many would do, and what they would bring where it cannot be more."""
    rng = random.Random(seed)
    step_s = rng.uniform(0.01, 0.02)
    loader = DataLoader(Load(BATCH * 40, step_s * rng.uniform(0.8, 2.8) / BATCH), BATCH)
    before_s, stats = judged(loader, step_s)
    verdict = stats.verdict
    assert verdict.limit == "fetch", str(stats)
    after_s = train(follow(loader, verdict.advice), step_s)
    if "concurrency" in verdict.advice:
        assert (verdict.advice["num_workers"], verdict.gain) == (1, 1.0)
        assert before_s / after_s > 1.5
    else:
        assert 1 <= verdict.advice["num_workers"] <= 4
        assert_gain(before_s, after_s, verdict.gain)


@pytest.mark.parametrize("seed", SEEDS)
@best_of_three
def test_more_workers_than_training_needs(seed: int) -> None:
    """Training that never waits is told how many workers are idle, and does not wait without them either."""
    rng = random.Random(seed)
    step_s = rng.uniform(0.015, 0.03)
    workers = rng.choice([3, 4])
    loader = DataLoader(Load(BATCH * 40, step_s * rng.uniform(0.2, 0.7) / BATCH), BATCH, num_workers=workers)
    _, stats = judged(loader, step_s)
    verdict = stats.verdict
    assert verdict.limit == "training", str(stats)
    assert f"{workers - 1} of {workers} workers are idle" in verdict.text
    assert verdict.advice == {"num_workers": 1}
    _, after = judged(follow(loader, verdict.advice), step_s)
    assert after.waited_share < 0.1, str(after)


@pytest.mark.parametrize("seed", SEEDS)
@best_of_three
def test_workers_that_stand_behind_a_slow_sample(seed: int) -> None:
    """Samples of very different cost in a short window: the advice lets workers go on behind a slow one."""
    rng = random.Random(seed)
    fetch_s = rng.uniform(0.5, 1.0) * 1e-3
    every = BATCH * rng.choice([15, 20])
    loader = DataLoader(
        Load(BATCH * 240, fetch_s, slow_every=every, slow_s=BATCH * fetch_s * rng.uniform(25, 40)),
        BATCH,
        num_workers=4,
        prefetch_factor=1,
        max_buffered_bytes=0,
    )
    before_s, stats = judged(loader, 0.0)
    verdict = stats.verdict
    assert verdict.limit == "order", str(stats)
    assert verdict.advice["max_buffered_bytes"] > 0
    assert_gain(before_s, train(follow(loader, verdict.advice), 0.0), verdict.gain)


class Floats(Load):
    """Samples that are new lists of floats each time, or one tensor of the same."""

    as_tensors = False

    def __getitem__(self, index: int) -> Any:
        return self.sample if self.as_tensors else self.sample.tolist()


@pytest.mark.parametrize("seed", SEEDS)
@best_of_three
def test_batches_of_python_objects(seed: int) -> None:
    """Packing and unpacking is what takes the time; the same numbers as tensors need none, as promised or better."""
    count = random.Random(seed).randrange(20_000, 50_000)
    dataset = Floats(BATCH * 60, sample=torch.rand(count))
    loader = DataLoader(dataset, BATCH, num_workers=1, collate_fn=as_they_are)
    before_s, stats = judged(loader, 0.0)
    verdict = stats.verdict
    assert verdict.limit == "transfer", str(stats)
    assert "tensors or arrays in place of Python objects" in verdict.text
    dataset.as_tensors = True
    assert before_s / train(DataLoader(dataset, BATCH, num_workers=1), 0.0) > 0.8 * verdict.gain


class SlowlyPinned(WorkerIterator[Any]):
    """Batches that are pinned by a function that sleeps."""

    seconds: float

    def _make_finisher(self, loop: GuardedLoop) -> Finisher:
        def copy(batch: Any) -> Any:
            time.sleep(self.seconds)
            return batch

        return pins(loop, copy)


@pytest.mark.parametrize("seed", SEEDS)
@best_of_three
def test_pinning_that_takes_longest(seed: int) -> None:
    """One thread pins; where it is what limits, the verdict says so, and what it costs."""
    rng = random.Random(seed)
    pin_s = rng.uniform(0.01, 0.02)
    kind = type("SlowlyPinned", (SlowlyPinned,), {"seconds": pin_s})
    loader = DataLoader(Load(BATCH * 50, pin_s * rng.uniform(0.3, 0.7) / BATCH), BATCH, num_workers=2)
    with inside.iterator_of(kind, loader) as batches:
        before_s = train(batches, 0.0)
        verdict = batches.stats().verdict
    assert verdict.limit == "pin", verdict.text
    assert verdict.advice == {"pin_memory": False}
    assert_gain(before_s, train(loader, 0.0), verdict.gain)


class Spins(Load):
    """Samples that compute."""

    def __getitem__(self, index: int) -> Any:
        until = time.thread_time() + self.fetch_s
        while time.thread_time() < until:
            pass
        return self.sample


def gain_of_processes(count: int) -> float:
    """Return how much more so many processes compute than one, on this machine and now."""
    spin = "import time\nwhile time.thread_time() < 0.5: pass"
    seconds = []
    for processes in (1, count):
        began = time.perf_counter()
        running = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(processes)]
        for process in running:
            process.wait()
        seconds.append(time.perf_counter() - began)
    return count * seconds[0] / seconds[1]


@pytest.mark.parametrize("num_workers", [1, 2, 4])
@best_of_three
def test_workers_that_compute(num_workers: int) -> None:
    """As long as there are cores more workers are advised; when all are full that is said, and a cheaper fetch."""
    loader = DataLoader(Spins(BATCH * 60, 0.004), BATCH, num_workers=num_workers)
    _, stats = judged(loader, 0.0)
    verdict = stats.verdict
    assert verdict.limit == "fetch", str(stats)
    if num_workers < stats.cores and "others use them as well" not in verdict.text:
        assert verdict.advice == {"num_workers": stats.cores}
        advised, kept = follow(loader, verdict.advice), []
        for _ in range(5):
            gain = train(loader, 0.0) / train(advised, 0.0)
            possible = gain_of_processes(stats.cores)  # less than promised where others use the cores meanwhile
            kept.append(gain / min(verdict.gain, possible))
        assert statistics.median(kept) > 0.7
    else:
        assert f"all {stats.cores} cores are full" in verdict.text
        assert verdict.gain == 1.0


@pytest.mark.parametrize(("stage", "fetch_s", "collate_s"), [("fetch", 0.002, 0.0), ("collate", 0.0, 0.016)])
def test_what_takes_all_the_time_is_named(stage: str, fetch_s: float, collate_s: float) -> None:
    """The figures of real workers lead to the verdict that they are made for, whatever else the machine does."""
    loader = DataLoader(Load(BATCH * 30, fetch_s), BATCH, num_workers=1, collate_fn=SlowCollate(collate_s))
    train(loader, 0.0)
    verdict = loader.stats().verdict
    assert verdict.limit == stage, str(loader.stats())
    assert loader.stats().waited_share > 0.5


def test_few_batches_are_not_judged() -> None:
    """A verdict over a handful of batches would be noise."""
    loader = DataLoader(Load(BATCH * 3), BATCH, num_workers=2)
    assert loader.stats().verdict.limit == "unknown"
    train(loader, 0.0)
    assert loader.stats().verdict.text == "3 batches are too few to judge by"


def judged_without_start(dataset: Any, num_workers: int, step_s: float, **options: Any) -> LoaderStats:
    """Return the statistics of an epoch whose workers were there already, however long they took to start."""
    persistent = num_workers > 0
    with contextlib.closing(
        DataLoader(dataset, BATCH, num_workers=num_workers, persistent_workers=persistent, **options)
    ) as loader:
        for _ in range(1 + persistent):
            train(loader, step_s)
        return loader.stats()


PACES_S = (0.001, 0.004, 0.016)
"""How long what is slow takes for a sample: on a busy machine workers are as slow as what takes a millisecond."""


class SlowSampler(torch.utils.data.Sampler[int]):
    """Thinks for a while before each index."""

    def __init__(self, pace_s: float) -> None:
        self._pace_s = pace_s

    def __iter__(self) -> Iterator[int]:
        for index in range(BATCH * 20):
            time.sleep(self._pace_s)
            yield index


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_a_slow_sampler_is_named(num_workers: int) -> None:
    """Its time is spent inside `next`: training waits, for nothing that workers could do."""
    for pace_s in PACES_S:
        stats = judged_without_start(Load(BATCH * 20), num_workers, 0.001, sampler=SlowSampler(pace_s))
        if stats.verdict.limit == "sampler":
            break
    assert stats.verdict.limit == "sampler", str(stats)
    assert (stats.verdict.advice, stats.verdict.gain) == ({}, 1.0)
    # The first batch does not count; for the last ones, as many as the window, there is nothing left to read.
    assert stats.waiting.sampler.total_s > pace_s * BATCH * 14
    assert stats.waiting.sampler.total_s <= stats.waiting.consumer.total_s


class SlowStream(torch.utils.data.IterableDataset[int]):
    """Its samples take a while to come."""

    def __init__(self, pace_s: float) -> None:
        self._pace_s = pace_s

    def __iter__(self) -> Iterator[int]:
        for index in range(BATCH * 20):
            time.sleep(self._pace_s)
            yield index


class SlowQueue:
    """Its samples come over a queue of an event loop."""

    def __init__(self, pace_s: float) -> None:
        self._pace_s = pace_s

    async def __aiter__(self) -> AsyncIterator[int]:
        for index in range(BATCH * 20):
            await asyncio.sleep(self._pace_s)
            yield index


@pytest.mark.parametrize(
    ("make", "num_workers"),
    [
        *((SlowStream, count) for count in (0, 1, 2)),
        *((lambda pace_s: ParallelMap(partial(SlowStream, pace_s), int), count) for count in (0, 2)),
        *((SlowQueue, count) for count in (0, 1)),
    ],
)
def test_a_slow_source_is_named(make: Callable[[float], Any], num_workers: int) -> None:
    """Neither other options nor more workers make samples come faster: there is no advice."""
    for pace_s in PACES_S:
        stats = judged_without_start(make(pace_s), num_workers, 0.0)
        if stats.verdict.limit == "source":
            break
    assert stats.verdict.limit == "source", str(stats)
    assert (stats.verdict.advice, stats.verdict.gain) == ({}, 1.0)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_feed_whose_producers_are_slow_is_a_slow_source(num_workers: int) -> None:
    """Workers have nothing to do meanwhile."""
    feed: Feed[int] = Feed(range(BATCH * 20), batch_size=BATCH)
    loader = DataLoader(feed, num_workers=num_workers)

    def produce() -> None:
        for lease in feed.leases():
            with lease as item:
                time.sleep(0.001 + loader.stats().first_batch_s / BATCH / 4)  # 0.0 before: the start is a small part
                item.put(item.value)

    producer = threading.Thread(target=produce)
    producer.start()
    train(loader, 0.0)
    producer.join()
    verdict = loader.stats().verdict
    assert (verdict.limit, verdict.advice) == ("source", {}), str(loader.stats())


class Opens(Load):
    """A dataset that opens a file when its first sample is asked for."""

    is_open = False

    def __getitem__(self, index: int) -> Any:
        if not self.is_open:
            time.sleep(0.5)
            self.is_open = True
        return super().__getitem__(index)


def test_an_opening_in_the_first_sample_is_part_of_the_start() -> None:
    """It says nothing of the batches that follow, and workers that stay have it behind them."""
    loader = DataLoader(Opens(BATCH * 20), BATCH, num_workers=2)
    train(loader, 0.0)
    stats = loader.stats()
    assert stats.verdict.limit == "starting", str(stats)
    assert stats.verdict.advice == {"persistent_workers": True}
    assert stats.workers.opening_s > 0.8
