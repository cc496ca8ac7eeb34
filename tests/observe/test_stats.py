"""What loader.stats() tells, what it costs, and who else is told: the log, metrics, progress bars."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import threading
import time
from typing import Any

import numpy as np
import pytest
import rich.console
import rich.progress
import tqdm.asyncio

from asyncloader import DataLoader, LoaderStats
from asyncloader.observe.meter import Meter
from asyncloader.observe.timing import Timing, show_bytes
from tests.support.loads import Load

pytestmark = pytest.mark.on_threads


class SomeBad(Load):
    """Every tenth sample raises."""

    def __getitem__(self, index: int) -> Any:
        if index % 10 == 7:
            raise ValueError(index)
        return super().__getitem__(index)


def run_through(loader: DataLoader[Any], face: str, step_s: float = 0.0) -> LoaderStats:
    """Take all batches by one of the faces, with a step after each."""
    return measured(loader, face, step_s)[0]


def measured(loader: DataLoader[Any], face: str, step_s: float) -> tuple[LoaderStats, float, float]:
    """Do so, and return the seconds that batches after the first were waited for and that steps took, by this clock."""
    waited: list[float] = []
    trained: list[float] = []

    def timed(times: list[float], began: float) -> float:
        now = time.perf_counter()
        times.append(now - began)
        return now

    began = time.perf_counter()
    if face == "for":
        for _ in loader:
            began = timed(waited, began)
            time.sleep(step_s)
            began = timed(trained, began)
    else:

        async def run() -> None:
            nonlocal began
            async for _ in loader:
                began = timed(waited, began)
                await asyncio.sleep(step_s)
                began = timed(trained, began)

        asyncio.run(run())
    return loader.stats(), sum(waited[1:]), sum(trained[:-1])


@pytest.mark.parametrize("face", ["for", "async for"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_figures_of_a_run(num_workers: int, face: str) -> None:
    """Batches, samples, bytes and the time of each stage are those of the load, and go into JSON."""
    loader = DataLoader(Load(158, 0.002), 8, num_workers=num_workers, max_buffered_bytes=0)
    stats, waited_s, trained_s = measured(loader, face, 0.003)
    assert (stats.batches, stats.samples, stats.epoch, stats.num_workers) == (20, 158, 0, num_workers)
    assert stats.waiting.consumer.count == stats.waiting.batch.count == 19
    assert stats.stages.work.count == stats.stages.fetch.count == 20
    assert stats.stages.fetch.p50_s > 0.015
    assert stats.stages.fetch.mean_s + stats.stages.collate.mean_s <= stats.stages.work.mean_s * 1.001
    assert stats.waiting.consumer.p50_s <= stats.waiting.consumer.p99_s <= stats.waiting.consumer.longest_s
    # Its clock is inside of ours: whatever the machine does, it tells no more of waiting, and no less of training.
    assert 0.5 * waited_s < stats.waiting.consumer.total_s <= waited_s
    assert (
        trained_s <= stats.training_s <= stats.elapsed_s - stats.first_batch_s - stats.waiting.consumer.total_s + 1e-6
    )
    told_s = stats.waiting.consumer.total_s + stats.training_s
    assert stats.waited_share == pytest.approx(stats.waiting.consumer.total_s / told_s)
    if num_workers:
        assert stats.bytes >= 158 * 8 * 4
        assert sum(worker.batches for worker in stats.workers.each) == 20
        assert all(worker.busy_s >= 0.016 * (worker.batches - 1) for worker in stats.workers.each)
        assert 0 < stats.workers.busy_share <= 1
        assert 1 <= stats.waiting.ahead <= stats.waiting.window + 1
    told = json.loads(json.dumps(stats.as_dict()))
    assert told["stages"]["fetch"]["count"] == 20
    assert told["verdict"]["text"] in str(stats)
    assert run_through(loader, face).epoch == 1


def test_what_was_mended_is_counted() -> None:
    """Skipped samples are counted and named; errors that were raised are counted, and are no batches."""
    skipping = run_through(DataLoader(SomeBad(40), 8, num_workers=2, on_error="skip"), "for")
    assert (skipping.faults.bad_count, sorted(skipping.faults.bad_samples)) == (4, [7, 17, 27, 37])
    assert skipping.samples == 36
    loader = DataLoader(SomeBad(40), 8, num_workers=2)
    batches = iter(loader)
    for _ in range(5):
        with contextlib.suppress(ValueError):
            next(batches)
    assert (loader.stats().faults.errors, loader.stats().batches) == (4, 1)
    assert "errors 4" in str(loader.stats())
    batches.close()


@pytest.mark.processes
def test_persistent_workers_start_anew() -> None:
    """Each epoch has figures of its own, and what workers waited between two epochs is not theirs."""
    loader = DataLoader(Load(64, 0.001), 8, num_workers=1, persistent_workers=True)
    run_through(loader, "for")
    time.sleep(0.2)
    stats = run_through(loader, "for")
    assert (stats.epoch, stats.batches, stats.stages.work.count) == (1, 8, 8)
    assert stats.workers.each[0].idle_s < max(0.2, stats.elapsed_s)
    loader.close()


def test_it_can_be_asked_at_any_time() -> None:
    """Before the first run, in the middle of one and from another thread."""
    loader = DataLoader(Load(800), 8, num_workers=2)
    assert loader.stats().batches == 0
    seen: list[int] = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.001):  # without a pause, threads of a free machine get the interpreter every 5 ms at best
            seen.append(loader.stats().waiting.consumer.count)

    watcher = threading.Thread(target=watch)
    watcher.start()
    stats = run_through(loader, "for", 0.0005)
    done.set()
    watcher.join()
    assert seen == sorted(seen)
    assert stats.batches == 100


def test_timings_are_those_of_all_and_quantiles_of_the_last_thousand() -> None:
    """However many there are at a time."""
    seconds = np.random.default_rng(3).exponential(size=5000)
    timing = Timing()
    for part in np.split(seconds, [1, 257, 2000]):
        timing = timing.plus(part)
    assert (timing.count, timing.longest_s) == (5000, seconds.max())
    assert timing.total_s == pytest.approx(seconds.sum())
    assert timing.p99_s == pytest.approx(np.quantile(seconds[-1000:], 0.99))
    assert (Timing().p50_s, Timing().plus(np.array([-1.0, 0.0])).longest_s) == (0.0, 0.0)


@pytest.mark.processes
def test_an_epoch_is_told_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """One line at INFO, with the verdict; the figures come with the record, for metrics and for logs kept as JSON."""
    with caplog.at_level(logging.INFO, "asyncloader"):
        run_through(DataLoader(Load(80), 8, num_workers=2), "for")
    (record,) = [record for record in caplog.records if record.levelno == logging.INFO]
    assert record.getMessage().startswith("epoch 0: 10 batches in ")
    assert json.loads(json.dumps(record.__dict__["stats"]))["batches"] == 10


@pytest.mark.parametrize("num_workers", [0, 2])
def test_progress_bars_know_the_total(num_workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """tqdm and rich ask loader or iterator for their length; tqdm's `async for` as well."""
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)  # no thread that outlives the test
    loader = DataLoader(Load(50), 8, num_workers=num_workers)
    bar = tqdm.tqdm(loader, file=io.StringIO())
    assert (sum(1 for _ in bar), bar.n, bar.total) == (7, 7, 7)

    async def count() -> tuple[int, int, float | None]:
        bar = tqdm.asyncio.tqdm(loader, file=io.StringIO())
        return len([batch async for batch in bar]), bar.n, bar.total

    assert asyncio.run(count()) == (7, 7, 7)
    with rich.progress.Progress(console=rich.console.Console(file=io.StringIO())) as progress:
        assert sum(1 for _ in progress.track(loader)) == 7
        (task,) = progress.tasks
        assert (task.completed, task.total) == (7, 7)
    batches = iter(loader)
    assert len(batches) == 7
    del batches


@pytest.mark.parametrize(
    ("count", "shown"), [(0, "0 kB"), (1500, "2 kB"), (2_500_000, "2.5 MB"), (310 * 10**6, "310 MB"), (10**9, "1.0 GB")]
)
def test_bytes_are_written_with_two_or_three_digits(count: int, shown: str) -> None:
    """Two or three digits."""
    assert show_bytes(count) == shown


def test_a_look_while_another_thread_counts_the_first_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """No figure is less than nothing."""
    meter, looks = Meter(0, 0, 1), []

    def process_time() -> float:  # is asked when the batch is counted
        looks.append(meter.stats())
        return time.process_time()

    monkeypatch.setattr("asyncloader.observe.meter.process_time", process_time)
    now = time.perf_counter()
    meter.add([0, 1, now, now, now, now])
    assert [(stats.batches, stats.first_batch_s) for stats in looks] == [(1, 0.0)]
    assert meter.stats().first_batch_s > 0
