"""The verdict on forty cases whose best options are known: right, or silent, and never wrong.

A case is simulated as it is, then with what the verdict advises: that has to bring what was promised. Where nothing is
advised, no other number of workers and no other concurrency brings more than a little.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from tests.observe.simulated import Load, run, seconds

MS = 1e-3


def waits(train: float, wait: float, **more: Any) -> Load:
    """Return a load whose samples mostly wait. Milliseconds."""
    return Load(train * MS, wait_s=wait * MS, cpu_s=0.05 * wait * MS, **more)


def computes(train: float, cpu: float, **more: Any) -> Load:
    """Return a load whose samples compute. Milliseconds."""
    return Load(train * MS, cpu_s=cpu * MS, **more)


CASES: list[tuple[str, Load, int, int, set[str]]] = [
    # what, load, workers, concurrency, which options are advised
    ("a network, without workers", waits(10, 100), 0, 1, {"num_workers", "concurrency"}),
    ("a network, nothing but", waits(0.1, 100), 0, 1, {"num_workers", "concurrency"}),
    ("a network, one worker", waits(10, 100), 1, 1, {"concurrency"}),
    ("a network, two workers", waits(10, 100), 2, 1, {"concurrency"}),
    ("a network, four workers", waits(10, 100), 4, 1, {"concurrency"}),
    ("a slow network, fast steps", waits(1, 400), 2, 1, {"concurrency"}),
    ("a network, eight at once", waits(2, 100), 1, 8, {"concurrency"}),
    ("a network, 16 at once, which keeps the interpreter busy", waits(1, 100), 2, 16, {"num_workers"}),
    ("a network, enough at once", waits(10, 100), 1, 16, set()),
    ("a network, enough workers", waits(20, 60), 4, 1, set()),
    ("a network on two cores", waits(5, 100, cores=2), 2, 1, {"concurrency"}),
    ("a network that needs one worker", waits(50, 40), 0, 1, {"num_workers"}),
    ("decoding, without workers", computes(10, 30), 0, 1, {"num_workers"}),
    ("decoding, without workers, slow steps", computes(100, 30), 0, 1, {"num_workers"}),
    ("little decoding, without workers", computes(100, 2), 0, 1, set()),
    ("decoding, one worker", computes(10, 30), 1, 1, {"num_workers"}),
    ("decoding, two workers", computes(10, 50), 2, 1, {"num_workers"}),
    ("decoding, two workers on two cores", computes(10, 50, cores=2), 2, 1, set()),
    ("decoding, one worker on two cores", computes(1, 50, cores=2), 1, 1, {"num_workers"}),
    ("decoding, one worker on one core", computes(1, 50, cores=1), 1, 1, set()),
    ("decoding, eight workers on eight cores", computes(1, 50), 8, 1, set()),
    ("decoding, 16 workers on eight cores", computes(1, 50), 16, 1, set()),
    ("decoding, one worker too many", computes(20, 50), 4, 1, {"num_workers"}),
    ("decoding and steps on the same two cores", computes(20, 30, cores=2, train_cpu=1.0), 1, 1, {"num_workers"}),
    ("no workers, steps on the same two cores", computes(20, 30, cores=2, train_cpu=1.0), 0, 1, {"num_workers"}),
    ("no workers, steps on the same core", computes(20, 30, cores=1, train_cpu=1.0), 0, 1, set()),
    ("collation, one worker", computes(10, 40, collate_s=0.035), 1, 1, {"num_workers"}),
    ("collation beside waiting", Load(0.01, wait_s=0.02, cpu_s=0.03, collate_s=0.028), 1, 1, {"num_workers"}),
    ("half decoding, half waiting", Load(0.005, wait_s=0.03, cpu_s=0.028), 2, 1, {"concurrency"}),
    ("slow steps, one worker", computes(100, 20), 1, 1, set()),
    ("slow steps, four workers", computes(100, 20), 4, 1, {"num_workers"}),
    ("slow steps, 16 workers", waits(50, 100), 16, 1, {"num_workers"}),
    ("workers that start for long", computes(1, 2, start_s=12.0), 2, 1, {"persistent_workers"}),
    ("the same, and a network", waits(1, 8, start_s=12.0), 2, 1, {"persistent_workers"}),
    (
        "workers that start for long, few batches",
        computes(5, 20, start_s=5.0, batches=12),
        2,
        1,
        {"persistent_workers"},
    ),
    ("a few batches", waits(1, 400, batches=12), 2, 1, {"concurrency"}),
    ("three batches", waits(1, 400, batches=3), 1, 1, set()),
    ("tiny batches, without workers", computes(0.1, 0.2), 0, 1, set()),
    ("many cores", computes(2, 200, cores=64), 4, 1, {"num_workers"}),
    ("many cores, few batches", computes(1, 200, cores=64, batches=20), 4, 1, {"num_workers"}),
]


WITH_OPTIONS: list[tuple[str, Load, int, dict[str, Any], set[str]]] = [
    # what, load, workers, options, which options are advised
    ("a stream over a network, without workers", waits(60, 80), 0, {"is_iterable": True}, {"num_workers"}),
    ("a stream over a network, one worker", waits(10, 100), 1, {"is_iterable": True}, set()),
    ("a stream that is decoded", computes(10, 30), 1, {"is_iterable": True}, set()),
    ("a number that looks after itself", computes(10, 30), 1, {"auto": True}, set()),
    ("too many workers, which look after themselves", computes(100, 20), 4, {"auto": True}, set()),
    ("workers that stay, and start for long", computes(1, 2, start_s=12.0), 2, {"persistent_workers": True}, set()),
]


def test_there_are_forty_cases() -> None:
    """Each with its own name."""
    assert len(CASES) == len({case[0] for case in CASES}) == 40


@pytest.mark.parametrize(("load", "workers", "concurrency", "advised"), [case[1:] for case in CASES], ids=[
    case[0] for case in CASES
])  # fmt: skip
def test_what_is_advised_brings_what_is_promised(load: Load, workers: int, concurrency: int, advised: set[str]) -> None:
    """What is advised brings what is promised; what is not advised would bring nothing."""
    stats = run(load, workers, concurrency)
    verdict = stats.verdict
    assert set(verdict.advice) == advised, verdict.text
    if verdict.limit == "starting":
        assert verdict.text.partition(" of the time")[2].startswith(" passed before the first batch")
        later = run(load.__class__(**{**vars(load), "start_s": 0.0}), workers, concurrency)
        assert 0.8 <= stats.elapsed_s / later.elapsed_s / verdict.gain <= 1.25
    elif verdict.advice:
        options = {"workers": verdict.advice.get("num_workers", workers)}
        options["concurrency"] = verdict.advice.get("concurrency", concurrency)
        gained = seconds(load, stats) / seconds(load, run(load, **options))
        if "concurrency" in verdict.advice:
            assert verdict.gain == 1.0  # it is not told before it is tried
        else:
            assert 0.8 <= gained / verdict.gain <= 1.25, verdict.text
        assert gained > (1.05 if verdict.limit != "training" else 0.95)
        assert options["workers"] <= max(workers, load.batches, 1)
    elif verdict.limit != "unknown" and load.cpu_s > 300e-6:  # to hand over a batch is not simulated
        others = itertools.product({max(1, workers), workers + 1, 2 * workers + 1, 4 * workers}, {concurrency, 32})
        best = min(seconds(load, run(load, max(1, count), at_once)) for count, at_once in others)
        assert seconds(load, stats) / best < 1.15, verdict.text


@pytest.mark.parametrize(("load", "workers", "options", "advised"), [case[1:] for case in WITH_OPTIONS], ids=[
    case[0] for case in WITH_OPTIONS
])  # fmt: skip
def test_nothing_is_advised_that_an_option_makes_useless(
    load: Load, workers: int, options: dict[str, Any], advised: set[str]
) -> None:
    """Options that make some advice useless: who reads which part of a stream, it decides; "auto" needs no number."""
    stats = run(load, workers, options=options)
    verdict = replace(stats, options={**stats.options, **options}).verdict
    assert set(verdict.advice) == advised, verdict.text
    if advised:
        gained = seconds(load, stats) / seconds(load, run(load, verdict.advice["num_workers"], options=options))
        assert 0.8 <= gained / verdict.gain <= 1.25, verdict.text
