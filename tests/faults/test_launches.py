"""A system that has no room for another process when a worker is to be replaced (EAGAIN), for a while or for good."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from asyncloader import DataLoader
from asyncloader.backends.processes import process
from asyncloader.engine import recovery
from asyncloader.engine.portal import get_portal
from asyncloader.errors import WorkerStartError


class Numbers(Dataset[int]):
    """One worker is killed at sample 9, the first time."""

    def __init__(self, folder: Path) -> None:
        self.flag = folder / "killed"

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        if index == 9 and not self.flag.exists():
            self.flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return index


class Stream(IterableDataset[int]):
    """Worker 0 of two yields the even numbers, and is killed at 8, the first time."""

    deterministic = True

    def __init__(self, folder: Path) -> None:
        self.flag = folder / "killed"

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        for number in range(info.id, 64, info.num_workers):
            if number == 8 and not self.flag.exists():
                self.flag.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield number


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[int]]:
    """Have the system refuse the next so many processes that the loop thread starts: replacements."""
    start_process, left, refused = process.start_process, [0], []

    def start(executor: Any) -> None:
        if get_portal().is_here and left[0]:
            left[0] -= 1
            refused.append(left[0])
            raise BlockingIOError(11, "Resource temporarily unavailable")
        start_process(executor)

    monkeypatch.setattr(process, "start_process", start)

    def begin(count: int) -> list[int]:
        left[0] = count
        return refused

    return begin


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("scheduling", ["static", "dynamic"])
def test_it_is_tried_again(
    scheduling: Any, num_workers: int, refuse: Callable[[int], list[int]], tmp_path: Path
) -> None:
    """Whether others live or not, no batch is lost."""
    refused = refuse(4)
    loader = DataLoader(Numbers(tmp_path), 4, num_workers=num_workers, scheduling=scheduling)
    assert torch.cat(list(loader)).tolist() == list(range(64))
    assert refused
    assert loader.stats().faults.retries


def test_others_go_on_without_it(refuse: Callable[[int], list[int]], tmp_path: Path) -> None:
    """Also if there is never room for another; in the next run too, with workers that stay."""
    refused = refuse(10_000)
    loader = DataLoader(Numbers(tmp_path), 4, num_workers=2, persistent_workers=True)
    for _ in range(3):
        assert torch.cat(list(loader)).tolist() == list(range(64))
    assert refused
    loader.close()


def test_a_worker_of_a_stream_is_waited_for(refuse: Callable[[int], list[int]], tmp_path: Path) -> None:
    """Nobody else can do its work."""
    refused = refuse(4)
    assert torch.cat(list(DataLoader(Stream(tmp_path), 4, num_workers=2))).unique().tolist() == list(range(64))
    assert len(refused) == 4


@pytest.mark.parametrize("kind", ["nobody is left", "it is needed"])
def test_it_ends_where_nobody_can_do_the_work(
    kind: str, refuse: Callable[[int], list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a bounded number of tries."""
    monkeypatch.setattr(recovery, "_MOST_LAUNCHES", 3)
    refused = refuse(10_000)
    dataset: Any = Numbers(tmp_path) if kind == "nobody is left" else Stream(tmp_path)
    with pytest.raises(WorkerStartError, match="no further process"):
        list(DataLoader(dataset, 4, num_workers=1 if kind == "nobody is left" else 2))
    assert len(refused) == 4
