"""What `RayWorkers` refuses, and what a loader makes of it, without Ray."""

from __future__ import annotations

from typing import Any

import pytest

from asyncloader import ConfigurationError, DataLoader
from asyncloader.ray import RayWorkers
from asyncloader.ray.facts import differences, facts


def test_options_of_actors_are_kept_as_they_are() -> None:
    """With two defaults."""
    workers = RayWorkers(8, num_gpus=0.5, resources={"data": 1}, num_cpus=2)
    assert workers.actor_options == {
        "num_cpus": 2,
        "scheduling_strategy": "SPREAD",
        "num_gpus": 0.5,
        "resources": {"data": 1},
    }
    assert repr(RayWorkers(2)) == "RayWorkers(2, on_mismatch='raise', num_cpus=1, scheduling_strategy='SPREAD')"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_workers": 0}, "at least 1"),
        ({"num_workers": None}, "at least 1"),
        ({"num_workers": 2, "on_mismatch": "wanr"}, "but got 'wanr'"),
        ({"num_workers": 2, "max_restarts": 3}, "max_restarts cannot be chosen: the loader starts lost workers again"),
        ({"num_workers": 2, "max_concurrency": 3}, "concurrency="),
        ({"num_workers": 2, "lifetime": "detached"}, "end with their loader"),
    ],
)
def test_what_cannot_work_is_refused(arguments: dict[str, Any], words: str) -> None:
    """With what to do."""
    with pytest.raises(ConfigurationError, match=words):
        RayWorkers(**arguments)


def test_the_workers_of_a_loader_are_those_that_are_brought() -> None:
    """So `num_workers` is their number, for torch and frameworks; local ones beside them there are none."""
    data: Any = range(8)
    loader = DataLoader(data, 4, worker_backend=RayWorkers(3), persistent_workers=True)
    assert (loader.num_workers, loader.prefetch_factor) == (3, 2)
    again = DataLoader(data, 4, num_workers=3, worker_backend=RayWorkers(3))
    assert again.num_workers == 3  # as frameworks make a loader anew of its attributes
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"num_workers": 2}, "there are no others beside them"),
        ({"num_workers": "auto"}, "there are no others beside them"),
        ({"multiprocessing_context": "spawn"}, "processes of this machine"),
        ({"timeout": -1}, "timeout"),
    )
    for options, words in refused:
        with pytest.raises(ValueError, match=words):
            DataLoader(data, 4, worker_backend=RayWorkers(3), **options)
    wrong: Any
    for wrong in (3, None, RayWorkers):
        with pytest.raises(ConfigurationError, match=r'"process", "thread" or RayWorkers\(\.\.\.\)'):
            DataLoader(data, 4, worker_backend=wrong)
    wrong = "ray"
    with pytest.raises(ConfigurationError, match="'process', 'thread'"):
        DataLoader(data, 4, worker_backend=wrong)


def test_facts_that_differ_are_named_with_both_sides() -> None:
    """Those that make other bits, or another program."""
    here = facts()
    assert differences(here, here) == []
    there = here | {"Python": "3.99.0", "machine": "Plan 9"}
    assert differences(here, there) == [
        f"Python is {here['Python']} here and 3.99.0 there",
        f"machine is {here['machine']} here and Plan 9 there",
    ]
