"""A trainer that leaves a run has its generators: no sample of that run gives them back as they were before.

A block stays until the trainer has seeded, or for a while where the trainer waits for its end. So a trainer that does
not wait finds that its seed is undone.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from asyncloader import DataLoader, sample_seed
from asyncloader.errors import LoaderClosedError
from asyncloader.seeding import generators, turns
from asyncloader.seeding.generators import GLOBAL, state_of
from tests.support import inside

LENGTH = 12

pytestmark = [
    pytest.mark.on_threads,
]


class Blocks(Dataset[Any]):
    """The block of one sample stays until the trainer has seeded."""

    def __init__(self, slow: int = 6) -> None:
        self.slow = slow
        self.inside, self.seeded = threading.Event(), threading.Event()
        self.begun: list[int] = []

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        with sample_seed():
            self.begun.append(index)
            random.random()
            if index == self.slow:
                self.inside.set()
                self.stay()
        return index

    def stay(self) -> None:
        self.seeded.wait(0.1)


class AwaitedBlocks(Blocks):
    async def __getitem__(self, index: int) -> int:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().__getitem__(index)


class OneByOne(Blocks):
    """Its samples are seeded without blocks: where nothing overlaps."""

    def __getitem__(self, index: int) -> int:
        self.begun.append(index)
        random.random()
        if index == self.slow:
            self.inside.set()
            self.stay()
        return index


KINDS: dict[str, tuple[type[Blocks], dict[str, Any]]] = {
    "threads": (Blocks, {"num_workers": 2, "worker_backend": "thread"}),
    "sample threads": (Blocks, {"num_workers": 1, "worker_backend": "thread", "concurrency": 3}),
    "on the loop": (AwaitedBlocks, {"num_workers": 0}),
}


@pytest.fixture(autouse=True)
def the_same_generators() -> Iterator[None]:
    with torch.random.fork_rng():
        before = random.getstate()
        yield
        random.setstate(before)


def make_loader(kind: str, **options: Any) -> tuple[Blocks, DataLoader[Any]]:
    dataset, others = KINDS[kind]
    data = dataset()
    return data, DataLoader(data, 2, seeding="sample", **others, **options)


@contextlib.contextmanager
def seeds_after(data: Blocks) -> Iterator[None]:
    """Leave a run inside, while a block runs; then the trainer seeds, and that has to last."""
    random.seed(1)
    torch.manual_seed(1)
    assert data.inside.wait(30)
    yield
    random.seed(2)
    torch.manual_seed(2)
    expected = random.getstate(), torch.initial_seed()
    begun = len(data.begun)
    data.seeded.set()
    inside.until_engines_end()  # what has been dropped has ended
    assert (random.getstate(), torch.initial_seed()) == expected
    assert len(data.begun) == begun


@pytest.mark.parametrize("kind", KINDS)
def test_a_trainer_that_breaks_off_may_seed(kind: str) -> None:
    """The iterator is dropped, which waits for the block."""
    data, loader = make_loader(kind)
    iterator = iter(loader)
    with seeds_after(data):
        del iterator


@pytest.mark.parametrize("kind", KINDS)
async def test_a_task_that_breaks_off_may_seed(kind: str) -> None:
    """The loop of the task waits too: not for long."""
    data, loader = make_loader(kind)
    iterator = aiter(loader)
    with seeds_after(data):
        del iterator


@pytest.mark.parametrize("kind", KINDS)
def test_a_trainer_that_breaks_off_as_a_block_begins_may_seed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block has just read what the generators are, and has drawn nothing."""
    data, loader = make_loader(kind)
    data.slow = -1

    def gated(generator: Any) -> Any:
        state = state_of(generator)
        if generator is GLOBAL[-1] and not data.inside.is_set():
            data.inside.set()
            data.stay()
        return state

    monkeypatch.setattr(generators, "state_of", gated)
    iterator = iter(loader)
    with seeds_after(data):
        del iterator


@pytest.mark.parametrize("kind", KINDS)
def test_a_trainer_that_closes_may_seed(kind: str) -> None:
    """The iterator stays there, and gives no more."""
    data, loader = make_loader(kind)
    iterator: Any = iter(loader)
    with seeds_after(data):
        iterator.close()
    with pytest.raises(LoaderClosedError):
        next(iterator)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_task_that_closes_may_seed(kind: str) -> None:
    """Without blocking its loop."""
    data, loader = make_loader(kind)
    async with aiter(loader) as iterator:
        with seeds_after(data):
            await iterator.aclose()


def test_no_block_of_the_last_run_begins_in_the_next_one_of_persistent_workers() -> None:
    """It would give back what the trainer has seeded for that one."""
    refused: list[int] = []

    class Gated(Blocks):
        def __getitem__(self, index: int) -> int:
            self.inside.set()
            self.seeded.wait(30)
            try:
                with sample_seed():
                    self.begun.append(index)
            except LoaderClosedError:
                refused.append(index)
                raise
            return index

    data = Gated()
    options: Any = {"num_workers": 1, "worker_backend": "thread", "persistent_workers": True}
    loader = DataLoader(data, 2, seeding="sample", **options)
    iter(loader)
    assert data.inside.wait(30)
    iterator = iter(loader)
    data.seeded.set()
    assert [index for batch in iterator for index in batch.tolist()] == list(range(LENGTH))
    loader.close()
    inside.until_engines_end()
    assert refused  # the first sample; that of the next batch as well if the worker has not heard of the next run yet
    assert data.begun == list(range(LENGTH))


@pytest.mark.parametrize("kind", KINDS)
def test_a_trainer_may_seed_after_a_state_was_loaded_in_place(kind: str) -> None:
    """The iterator goes on with another run; that is closed, and only the first one has a block that lasts."""
    data, loader = make_loader(kind)
    iterator: Any = iter(loader)
    state = loader.state_dict()
    with seeds_after(data):
        data.slow = -1
        iterator.load_state_dict(state)
        iterator.close()


async def test_a_batch_that_is_made_on_the_thread_of_async_for_does_not_undo_it() -> None:
    """A task is cancelled while its batch is made; more batches were asked for, and are not begun."""
    data = OneByOne(slow=0)
    loader = DataLoader(data, 2, seeding="sample")
    iterator = aiter(loader)
    waiting = [asyncio.ensure_future(anext(iterator)) for _ in range(2)]
    await asyncio.to_thread(data.inside.wait, 30)
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    del task, waiting
    with seeds_after(data):
        del iterator
    assert data.begun == [0, 1]


@pytest.mark.processes
def test_a_block_may_drop_its_own_run() -> None:
    """Nobody waits for itself."""
    held: list[Any] = []
    is_held = threading.Event()

    class Dropping(Blocks):
        def stay(self) -> None:
            assert is_held.wait(30)
            held.clear()
            self.seeded.set()

    data = Dropping(slow=2)
    held.append(iter(DataLoader(data, 2, seeding="sample", num_workers=1, worker_backend="thread")))
    is_held.set()
    assert data.seeded.wait(30)
    inside.until_engines_end()


def test_a_block_that_lasts_does_not_hold_up_a_drop_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The trainer goes on after a while, and the log says what may come of it."""
    monkeypatch.setattr(turns, "_PATIENCE_S", 0.05)

    class Lasting(Blocks):
        def stay(self) -> None:
            self.seeded.wait(30)

    data = Lasting(slow=2)
    iterator = iter(DataLoader(data, 2, seeding="sample", num_workers=1, worker_backend="thread"))
    assert data.inside.wait(30)
    del iterator
    assert "A sample_seed() block has had the global random generators" in caplog.text
    data.seeded.set()
    inside.until_engines_end()


def test_a_signal_does_not_cut_the_wait_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its handler runs when the block has ended that a dropped iterator waits for."""
    waits = threading.Event()
    wait_ended = turns.wait_ended
    order: list[str] = []

    def waited() -> None:
        waits.set()
        wait_ended()

    class Signalling(Blocks):
        def stay(self) -> None:
            assert waits.wait(30)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            threading.Event().wait(0.05)
            order.append("the block ends")

    monkeypatch.setattr(turns, "wait_ended", waited)
    before = signal.signal(signal.SIGUSR1, lambda *_: order.append("the handler"))
    try:
        data = Signalling(slow=2)
        iterator = iter(DataLoader(data, 2, seeding="sample", num_workers=1, worker_backend="thread"))
        assert data.inside.wait(30)
        del iterator
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert order == ["the block ends", "the handler"]
    inside.until_engines_end()
