"""What the verdict says of figures that are given to it; test_verdict_of_loads.py has it judge loads that run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from asyncloader.observe.figures import Workers, WorkerStats
from asyncloader.observe.meter import Meter
from asyncloader.observe.stats import LoaderStats
from asyncloader.observe.timing import Timing

BATCHES = 41


def timing(seconds: float) -> Timing:
    """Return what so many batches took, each as long."""
    return Timing().plus(np.full(BATCHES - 1, seconds))


def figures(
    *,
    train: float,
    waited: float,
    fetch: float,
    busy: float,
    workers: int = 2,
    cpu: float = 1.0,
    of_workers: dict[str, float] | None = None,
    **more: Any,
) -> LoaderStats:
    """Return the statistics of a run whose batches all were alike. Seconds a batch; `busy` and `cpu` are shares."""
    elapsed = (train + waited) * (BATCHES - 1)
    count = BATCHES // max(1, workers)
    each = tuple(
        WorkerStats(n, count, busy * elapsed, busy * elapsed / count, (1 - busy) * elapsed) for n in range(workers)
    )
    stats = Meter(0, workers, 2 * workers).stats()
    return replace(
        stats,
        batches=BATCHES,
        cores=2,
        elapsed_s=elapsed,
        training_s=train * (BATCHES - 1),
        waiting=replace(stats.waiting, consumer=timing(waited)),
        stages=replace(stats.stages, fetch=timing(fetch), work=timing(fetch)),
        workers=Workers(each, cpu * fetch * (BATCHES - 1), **(of_workers or {})),
        **more,
    )


@pytest.mark.parametrize("busy", [0.6, 0.75, 0.95])
def test_a_trainer_that_waits_is_never_told_to_be_faster(busy: float) -> None:
    """However busy workers look: where they, or the cores, are what a batch waits for, that is what is said."""
    stats = figures(train=0.001, waited=0.030, fetch=0.060, busy=busy)
    verdict = stats.verdict
    assert verdict.limit == "fetch"
    assert "keeps up, faster training steps" not in verdict.text
    assert "all 2 cores are full, so more workers would not help, a cheaper fetch would" in verdict.text


def test_a_hiccup_beside_a_slow_trainer_is_no_limit_of_the_loader() -> None:
    """Nothing to gain: the steps are what takes the time."""
    verdict = figures(train=0.030, waited=0.002, fetch=0.020, busy=0.3).verdict
    assert verdict.limit == "training"


def test_cores_that_this_process_uses_itself() -> None:
    """A server in a thread beside the training, say: it is not the workers that fill the cores."""
    stats = figures(train=0.001, waited=0.030, fetch=0.060, busy=0.95, cpu=0.55, main_cpu_s=0.9 * 0.031 * (BATCHES - 1))
    assert "all 2 cores are full (0.9 of them by this process itself)" in stats.verdict.text


def test_more_batches_ahead_than_the_window() -> None:
    """Workers that ran ahead: not "37.7 of 4"."""
    stats = figures(train=0.01, waited=0.0, fetch=0.01, busy=0.5)
    stats = replace(stats, waiting=replace(stats.waiting, ahead=37.7, ready=30.0))
    assert "37.7 batches ahead (window 4), 30.0 of them ready" in str(stats)


def test_cores_of_workers_that_a_provider_brings_are_not_ours() -> None:
    """They compute, and more of them would help: they do not fill the cores here."""
    computing = {"train": 0.001, "waited": 0.029, "fetch": 0.24, "busy": 0.95, "workers": 8}
    stats = figures(**computing, options={"has_provider": True})
    assert "num_workers=32 would make it 4.0 times" in stats.verdict.text
    assert "all 2 cores are full" in figures(**computing).verdict.text


@pytest.mark.parametrize("workers", [0, 1])
def test_cores_that_others_use_as_well(workers: int) -> None:
    """How much of them further workers would get is not known; and what waits for a core does not wait for a disk."""
    crowded: dict[str, Any] = {"train": 0.001, "waited": 0.030, "fetch": 0.030, "busy": 0.95, "workers": workers}
    cpu_s, stalled_s = 0.4 * 0.030 * (BATCHES - 1), 0.55 * 0.030 * (BATCHES - 1)
    cpu = {"cpu": 0.4} if workers else {"cpu": 0.0, "main_cpu_s": cpu_s}
    verdict = figures(**crowded, **cpu, of_workers={"stalled_s": stalled_s}).verdict
    assert verdict.limit == "fetch"
    assert verdict.gain == 1.0
    assert verdict.advice == {}
    assert "(others use them as well)" in verdict.text
    waits = figures(**crowded, **cpu).verdict
    assert waits.advice["concurrency"] > 1
