"""Workers that come and go, in an epoch and between two: the data are those of any fixed number, bit for bit."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from asyncloader import ConfigurationError, DataLoader
from tests.support import inside
from tests.support.patience import wait_until

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

LENGTH = 60


class Drawing(Dataset[Any]):
    """Samples with random numbers of all three generators, and who made them."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        return index, torch.rand(3), np.random.rand(), os.getpid(), info.id, info.num_workers


class Awaited(Drawing):
    """The same, awaited; without global generators."""

    async def __getitem__(self, index: int) -> Any:  # type: ignore[override]
        await asyncio.sleep(0)
        return index, torch.full((3,), float(index)), 0.5, os.getpid(), 0, 0


def bits(batch: Any) -> Any:
    """What must be the same, whoever made the batch."""
    return batch[0].tolist(), batch[1].tolist(), batch[2].tolist()


@functools.cache
def expected(dataset: Any = None, epochs: int = 1, **options: Any) -> list[Any]:
    """The batches of one worker that stays."""
    torch.manual_seed(3)
    loader = DataLoader(dataset or Drawing(), 2, shuffle=True, num_workers=1, **options)
    batches = [bits(batch) for _ in range(epochs) for batch in loader]
    loader.close()
    return batches


def wait_for_workers(loader: Any, count: int) -> None:
    """Wait until so many take batches."""
    wait_until(lambda: loader.stats().num_workers == count)


@pytest.mark.covering(1)
@pytest.mark.parametrize("scheduling", ["static", "dynamic"])
@pytest.mark.parametrize("backend", ["process", "thread"])
def test_the_data_are_those_of_a_fixed_number(scheduling: Any, backend: Any) -> None:
    """While workers join and leave in the middle of an epoch; those that join make some of it."""
    torch.manual_seed(3)
    dataset = Awaited() if backend == "thread" else Drawing()
    options: Any = {"scheduling": scheduling, "worker_backend": backend, "max_buffered_bytes": 0}
    loader = DataLoader(dataset, 2, shuffle=True, num_workers=2, **options)
    seen, makers = [], set()
    for number, batch in enumerate(loader):
        seen.append(bits(batch))
        makers.add(int(batch[4][0]))
        if change := {3: 4, 12: 1, 20: 3}.get(number):
            loader.set_num_workers(change)
            assert loader.num_workers == change
            wait_for_workers(loader, change)
    assert seen == expected(Awaited() if backend == "thread" else None)
    assert [*loader.stats().workers.changes.values()] == [3, 4, 1, 2, 3]
    assert backend == "thread" or makers == {0, 1, 2, 3}


def test_those_that_join_know_of_how_many_there_are() -> None:
    """And have the lowest ids that are free."""
    loader = DataLoader(Drawing(), 1, num_workers=1, max_buffered_bytes=0)
    iterator = iter(loader)
    told = {tuple(map(int, batch[4:])) for batch in [next(iterator) for _ in range(3)]}
    loader.set_num_workers(3)
    wait_for_workers(loader, 3)
    told |= {tuple(map(int, batch[4:])) for batch in iterator}
    assert told == {(0, 1), (1, 3), (2, 3)}


def test_the_number_changes_in_async_for() -> None:
    """The call does not wait, so a loop may make it."""
    torch.manual_seed(3)
    loader = DataLoader(Awaited(), 2, shuffle=True, num_workers=1)

    async def run() -> list[Any]:
        seen = []
        async for batch in loader:
            seen.append(bits(batch))
            if len(seen) in (2, 12):
                loader.set_num_workers(3 if len(seen) == 2 else 1)
        return seen

    assert asyncio.run(run()) == expected(Awaited())


def test_persistent_workers_between_two_epochs() -> None:
    """Those that stay are the same processes; those that go are gone before the next epoch has ended."""
    torch.manual_seed(3)
    loader = DataLoader(Drawing(), 2, shuffle=True, num_workers=2, persistent_workers=True)
    seen, pids = [], []
    for count in (3, 1, 2):
        batches = list(loader)
        seen += map(bits, batches)
        pids.append({int(pid) for batch in batches for pid in batch[3]})
        loader.set_num_workers(count)
    assert seen == expected(epochs=3, persistent_workers=True)
    assert pids[2] < pids[1]
    assert pids[0] < pids[1]
    assert [len(own) for own in pids] == [2, 3, 1]
    loader.close()


def test_an_epoch_that_begins_before_a_worker_has_joined() -> None:
    """It begins with who is there; who comes takes part."""
    torch.manual_seed(3)
    loader = DataLoader(Drawing(), 2, shuffle=True, num_workers=1, persistent_workers=True)
    seen = []
    for count in (4, 2, 5):
        iterator = iter(loader)
        seen += [bits(next(iterator)) for _ in range(3)]
        loader.set_num_workers(count)
        seen += map(bits, iterator)
        loader.set_num_workers(count - 1)
    wait_for_workers(loader, 4)
    assert seen == expected(epochs=3, persistent_workers=True)
    loader.close()


def test_a_state_goes_on_with_another_number() -> None:
    """Taken while workers come and go."""
    torch.manual_seed(3)
    loader = DataLoader(Drawing(), 2, shuffle=True, num_workers=2)
    iterator = iter(loader)
    seen = [bits(next(iterator)) for _ in range(4)]
    loader.set_num_workers(3)
    seen += [bits(next(iterator)) for _ in range(4)]
    state = loader.state_dict()
    del iterator
    loader = DataLoader(Drawing(), 2, shuffle=True, num_workers=1)
    loader.load_state_dict(state)
    assert seen + [bits(batch) for batch in loader] == expected()


class Gate:
    """A place in samples where workers wait until it is opened, or they are killed.

    Args:
        folder: Where they note that they wait.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        os.mkfifo(folder / "fifo")

    def wait(self) -> None:
        """Wait, in a worker."""
        (self.folder / f"waits {os.getpid()}").touch()
        os.close(os.open(self.folder / "fifo", os.O_RDONLY))

    def wait_for(self, count: int) -> None:
        """Wait until so many have come to it."""
        wait_until(lambda: len(list(self.folder.glob("waits *"))) == count)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Let everybody through."""
        writer = os.open(self.folder / "fifo", os.O_RDWR)
        try:
            yield
        finally:
            os.close(writer)


class Gated(Drawing):
    """Samples of which those from the fourth batch on are behind a gate."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    def __getitem__(self, index: int) -> Any:
        if index >= 6:
            self.gate.wait()
        return super().__getitem__(index)


@pytest.mark.parametrize("on_crash", ["retry", "skip"])
def test_a_worker_that_dies_while_it_leaves_is_not_replaced(tmp_path: Path, on_crash: Any) -> None:
    """Others do what it had."""
    gate = Gate(tmp_path)
    loader = DataLoader(Gated(gate), 2, num_workers=3, on_crash=on_crash)
    iterator: Any = iter(loader)
    seen = [next(iterator)[0].tolist() for _ in range(3)]
    gate.wait_for(3)  # each is in the middle of a batch
    loader.set_num_workers(1)
    wait_for_workers(loader, 1)
    os.kill(inside.pids(iterator)[2], signal.SIGKILL)
    wait_until(lambda: len(inside.workers(iterator)) == 2)
    with gate.opened():
        seen += [batch[0].tolist() for batch in iterator]
    wanted = [[i, i + 1] for i in range(0, LENGTH, 2)]
    stats = loader.stats()
    assert [batch for batch in wanted if batch not in seen] == ([] if on_crash == "retry" else [[10, 11]])
    assert seen == [batch for batch in wanted if batch in seen]
    assert (stats.faults.replacements, stats.faults.retries) == (0, int(on_crash == "retry"))


def test_a_worker_that_leaves_stays_if_it_is_wanted_again(tmp_path: Path) -> None:
    """It is the same process."""
    gate = Gate(tmp_path)
    loader = DataLoader(Gated(gate), 2, num_workers=2)
    iterator: Any = iter(loader)
    seen = [next(iterator) for _ in range(3)]
    gate.wait_for(2)
    pids = {*inside.pids(iterator)}
    loader.set_num_workers(1)
    loader.set_num_workers(2)
    wait_until(lambda: len(loader.stats().workers.changes) == 2)
    with gate.opened():
        seen += iterator
    assert [batch[0].tolist() for batch in seen] == [[i, i + 1] for i in range(0, LENGTH, 2)]
    assert {int(batch[3][0]) for batch in seen} == pids


def leave(worker: int) -> None:
    """End the process of a worker that comes after the first."""
    if worker:
        os._exit(7)


def test_a_worker_that_cannot_join_is_told_of_and_the_others_go_on(caplog: Any) -> None:
    """Nothing that it had is lost: it had nothing."""
    torch.manual_seed(3)
    loader = DataLoader(Drawing(), 2, shuffle=True, num_workers=1, worker_init_fn=leave)
    iterator = iter(loader)
    seen = [bits(next(iterator)) for _ in range(3)]
    with caplog.at_level(logging.WARNING, "asyncloader"):
        loader.set_num_workers(2)
        wait_until(lambda: "No process could be started for worker" in caplog.text)
    seen += map(bits, iterator)
    assert seen == expected()
    assert loader.stats().workers.changes == {}


def test_workers_that_come_and_go_are_in_the_timeline_and_the_figures(tmp_path: Path) -> None:
    """And in the log."""
    loader = DataLoader(Drawing(), 1, num_workers=1, max_buffered_bytes=0, trace=tmp_path / "trace.json")
    iterator = iter(loader)
    next(iterator)
    loader.set_num_workers(2)
    wait_for_workers(loader, 2)
    list(iterator)
    events = json.loads((tmp_path / "trace.json").read_text())
    assert [event["name"] for event in events if event["ph"] == "i"] == ["epoch 0", "2 workers"]
    stats = loader.stats()
    assert [*stats.as_dict()["workers"]["changes"].values()] == [*stats.workers.changes.values()] == [2]
    assert "workers came and went: 2 after" in str(stats)
    assert sum(worker.batches for worker in stats.workers.each) == LENGTH


class Counting(Dataset[Any]):
    """A dataset with a state of its own."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        return index

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


class Stream(IterableDataset[int]):
    """A stream."""

    def __iter__(self) -> Any:
        return iter(range(10))


@pytest.mark.parametrize(
    ("dataset", "options", "why"),
    [
        (Stream(), {"num_workers": 2}, "an iterable dataset is divided"),
        (range(8), {"num_workers": 2, "seeding": "worker"}, 'with seeding="worker"'),
        (Counting(), {"num_workers": 2}, "a state of its own in each"),
        (range(8), {}, "has no workers"),
    ],
    ids=["stream", "seeding", "state", "no workers"],
)
def test_where_the_number_cannot_change(dataset: Any, options: Any, why: str) -> None:
    """The error says why, and nothing has changed."""
    loader = DataLoader(dataset, **options)
    with pytest.raises(ConfigurationError, match=why):
        loader.set_num_workers(3)
    assert loader.num_workers == options.get("num_workers", 0)


@pytest.mark.parametrize("number", [0, -1, 1.5, True, "auto"])
def test_what_is_no_number_of_workers(number: Any) -> None:
    """It is refused."""
    with pytest.raises(ConfigurationError, match="num_workers should be an integer of at least 1"):
        DataLoader(range(8), num_workers=2).set_num_workers(number)  # type: ignore[arg-type]


def test_without_a_run_it_is_the_number_of_the_next() -> None:
    """Before the first, and after one."""
    loader = DataLoader(Drawing(), 2, num_workers=1)
    loader.set_num_workers(3)
    assert {int(batch[4][0]) for batch in loader} == {0, 1, 2}
    loader.set_num_workers(2)
    assert {int(batch[4][0]) for batch in loader} == {0, 1}
