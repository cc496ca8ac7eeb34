"""Ray Train on two processes of the CPU: one argument keeps our loader; without it torch's loads."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.ranks import run_launcher

PROGRAM = Path(__file__).with_name("ray_ranks.py")
GONE_S = 10.0


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each process found in the one run that these tests look at; Ray's daemons are gone after it."""
    found = run_launcher(PROGRAM, tmp_path_factory.mktemp("ray"))
    _, left = psutil.wait_procs(processes_of(found[0]["session"]), GONE_S)
    for process in left:
        process.kill()
    assert not left
    return found


def processes_of(session: int) -> list[psutil.Process]:
    """Find what still runs of a program and of what it started, daemons and their workers included."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError):  # it is gone
            if os.getsid(process.pid) == session:
                found.append(process)
    return found


def test_each_process_trains_on_its_half(ranks: list[Any]) -> None:
    """With the line, each epoch the two halves are the dataset, shuffled anew; the weights agree.

    That it was our workers who made the batches, and that nothing was warned of, each process asserts itself.
    """
    first, second = ranks
    for ours, theirs in zip(first["epochs"], second["epochs"], strict=True):
        assert sorted(ours + theirs) == list(range(40))
    assert first["epochs"][0] != first["epochs"][1]
    assert first["weight"] == second["weight"]


def test_a_state_is_one_batch_ahead(ranks: list[Any]) -> None:
    """Ray's wrapper takes a batch before it hands out the one before it; so the page says how to save a state."""
    for rank in ranks:
        assert rank["rest"] == rank["epochs"][1][12:]


@pytest.mark.parametrize("way", ["elastic", "by its sampler"])
def test_a_sampler_that_divides_is_kept(way: str, ranks: list[Any]) -> None:
    """Our ElasticSampler with the line; and a DistributedSampler, which Ray sees by itself."""
    first, second = ranks
    assert sorted(first[way] + second[way]) == list(range(40))


def test_a_stream_is_kept(ranks: list[Any]) -> None:
    """Ray leaves loaders of iterable datasets alone; each process reads all of it, as with torch."""
    assert [sorted(rank["stream"]) for rank in ranks] == [list(range(40))] * 2


def test_without_the_line_torch_loads(ranks: list[Any]) -> None:
    """Ray builds a torch DataLoader."""
    first, second = ranks
    assert sorted(first["without"] + second["without"]) == list(range(40))
