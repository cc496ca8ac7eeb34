"""The threads and processes that samples run in are ordinary ones: signals, cores, loops, the end of the program."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from asyncloader import ConfigurationError, DataLoader

IN_PROCESS = [
    pytest.param({"num_workers": 0}, id="here"),
    pytest.param({"num_workers": 1, "worker_backend": "thread"}, id="thread"),
]
PLACES = [pytest.param({"num_workers": 1}, id="process"), *IN_PROCESS]


class Samples:
    """What a function returns, twice."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return self.function()


class AsyncSamples(Samples):
    """What it returns on a thread that the loop starts."""

    async def __getitem__(self, index: int) -> Any:
        return await asyncio.to_thread(self.function)


def end_a_child() -> int:
    """Start a process, ask it to end, return how it did."""
    child = subprocess.Popen(["sleep", "60"])
    child.terminate()
    try:
        return child.wait(5)
    finally:
        child.kill()
        child.wait()


def take(dataset: Any, **options: Any) -> list[Any]:
    """Return the samples of an epoch."""
    return list(DataLoader(dataset, batch_size=None, collate_fn=lambda sample: sample, **options))


@pytest.mark.covering(2)
@pytest.mark.leaks("asyncio.to_thread keeps threads for later")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("concurrency", [None, 2])
@pytest.mark.parametrize("kind", [Samples, AsyncSamples])
def test_children_of_samples_hear_signals(kind: Any, concurrency: int | None, place: dict[str, Any]) -> None:
    """SIGTERM ends what a sample has started: no thread of ours blocks signals while the user's code runs in it."""
    assert take(kind(end_a_child), concurrency=concurrency, **place) == [-signal.SIGTERM] * 2


class Rows:
    """A table behind a connection that belongs to the thread that made it, and something else that does."""

    def __init__(self, path: Path) -> None:
        self.connection = sqlite3.connect(path)
        self.connection.execute("create table numbers (number integer)")
        self.connection.executemany("insert into numbers values (?)", [(i,) for i in range(8)])
        self.connection.commit()
        self.local = threading.local()
        self.local.offset = 10

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        query = "select number from numbers where number = ?"
        return int(self.connection.execute(query, (index,)).fetchone()[0] + self.local.offset)


@pytest.mark.forked("that is what it is about")
@pytest.mark.parametrize("is_main", [True, False], ids=["main thread", "another thread"])
def test_forked_workers_are_copies_of_the_thread_that_iterates(is_main: bool, tmp_path: Path) -> None:
    """What belongs to it works there: a connection to SQLite, which looks at the thread's identity, a thread-local."""
    seen: list[list[int]] = []

    def iterate() -> None:
        dataset: Any = Rows(tmp_path / "rows.db")
        loader: Any = DataLoader(dataset, batch_size=4, num_workers=2, persistent_workers=True)
        try:
            for _ in range(2):
                seen.extend(batch.tolist() for batch in loader)
        finally:
            loader.close()
            dataset.connection.close()

    if is_main:
        iterate()
    else:
        thread = threading.Thread(target=iterate)
        thread.start()
        thread.join()
    assert seen == [[10, 11, 12, 13], [14, 15, 16, 17]] * 2


class Leaving:
    """One sample's child task asks for the end of the program."""

    def __init__(self, error: type[BaseException], awaits: bool) -> None:
        self.error = error
        self.awaits = awaits

    def __len__(self) -> int:
        return 8

    async def leave(self) -> None:
        """Raise what asyncio lets out of its loop."""
        raise self.error

    async def __getitem__(self, index: int) -> int:
        if index == 3:
            task = asyncio.create_task(self.leave())
            if self.awaits:
                await task
            else:
                await asyncio.wait({task})
                task.exception()
        return index


@pytest.mark.parametrize("place", IN_PROCESS)
@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_a_child_task_that_leaves_costs_its_batch(error: type[BaseException], place: dict[str, Any]) -> None:
    """Not the loop on which all loaders of the process live, nor the thread."""
    other = iter(DataLoader(range(4), num_workers=1))  # type: ignore[arg-type]
    assert int(next(other)) == 0
    iterator: Any = iter(DataLoader(Leaving(error, awaits=True), batch_size=2, timeout=20, **place))  # type: ignore[arg-type]
    assert next(iterator).tolist() == [0, 1]
    with pytest.raises(error):
        next(iterator)
    assert [batch.tolist() for batch in iterator] == [[4, 5], [6, 7]]
    assert [int(batch) for batch in other] == [1, 2, 3]


@pytest.mark.parametrize("place", IN_PROCESS)
def test_a_child_task_that_leaves_for_itself_costs_nothing(place: dict[str, Any]) -> None:
    """Where nobody waits for what it raises."""
    loader: Any = DataLoader(Leaving(SystemExit, awaits=False), batch_size=2, timeout=20, **place)  # type: ignore[arg-type]
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6, 7]]


class Nested:
    """Sums up another loader for each sample."""

    def __init__(self, how: str, inner: Any) -> None:
        self.how = how
        self.inner = inner

    def __len__(self) -> int:
        return 2

    async def __getitem__(self, index: int) -> int:
        if self.how == "async for":
            return sum([int(batch) async for batch in self.inner])
        if self.how == "thread":
            return await asyncio.to_thread(lambda: sum(int(batch) for batch in self.inner))
        if self.how == "close":
            iterator = aiter(self.inner)
            await anext(iterator)
            iterator.close()
        return sum(int(batch) for batch in self.inner)


@pytest.mark.leaks("asyncio.to_thread keeps threads for later")
@pytest.mark.parametrize("how", ["async for", "thread"])
def test_a_loader_inside_a_dataset_on_the_loop(how: str) -> None:
    """Where it lets the loop turn it is served."""
    inner: Any = DataLoader(range(4), num_workers=1)  # type: ignore[arg-type]
    assert [int(number) for number in DataLoader(Nested(how, inner), batch_size=None, timeout=20)] == [6, 6]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("how", "inner"),
    [
        ("for", {"num_workers": 1}),
        ("for", {"num_workers": 1, "worker_backend": "thread"}),
        ("close", {"num_workers": 1}),
    ],
)
def test_a_loader_that_would_block_the_loop_is_refused(how: str, inner: dict[str, Any]) -> None:
    """It would wait for ever for what only the loop under it can do, and so would every loader of the process."""
    loader: Any = DataLoader(range(4), batch_size=1, **inner)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"asyncio\.to_thread"):
        next(iter(DataLoader(Nested(how, loader), batch_size=None, timeout=20)))  # type: ignore[arg-type]
