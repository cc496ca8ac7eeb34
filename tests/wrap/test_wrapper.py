"""Loaders around loaders: what a wrapper has of the loader within, and that its states are of what it has given."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from asyncloader import DataLoader, to_device
from asyncloader.errors import LoaderClosedError
from asyncloader.wrap import IteratorWrapper, LoaderWrapper
from tests.support.counted import Counted
from tests.support.forks import forked
from tests.wrap.ahead import Ahead, taken_ahead


class Doubled(IteratorWrapper):
    """What a user writes."""

    def receive(self, batch: Any) -> Any:
        return 2 * batch


LOADERS: dict[str, Any] = {
    "ours": lambda: DataLoader(range(6), None),  # type: ignore[arg-type]
    "workers": lambda: DataLoader(range(6), None, num_workers=2, worker_backend="thread"),  # type: ignore[arg-type]
    "torchdata": lambda: StatefulDataLoader(range(6), None),  # type: ignore[arg-type]
    "its own": lambda: Counted(6),
    "a wrapper": lambda: taken_ahead(range(6), None),
}


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("kind", LOADERS)
def test_states_are_of_the_batches_that_were_given(kind: str) -> None:
    """In a loop, after a `break`, after the end, and whatever was taken ahead."""
    make = LOADERS[kind]
    for taken in range(7):
        loader = LoaderWrapper[Any](make(), Ahead)
        assert [int(batch) for _, batch in zip(range(taken), loader, strict=False)] == [*range(taken)]
        other = LoaderWrapper[Any](make(), Ahead)
        other.load_state_dict(json.loads(json.dumps(loader.state_dict())))
        assert [int(batch) for batch in other] == [*range(taken, 6)]
        assert [int(batch) for batch in other] == [*range(6)]
    states = []
    loader = LoaderWrapper[Any](make(), Ahead)
    for _ in loader:
        states.append(loader.state_dict())
    states.append(loader.state_dict())
    for number, state in enumerate(states, 1):
        other = LoaderWrapper[Any](make(), Ahead)
        other.load_state_dict(state)
        assert [int(batch) for batch in other] == [*range(0 if number > 6 else number, 6)]


def test_a_wrapper_has_all_that_its_loader_has() -> None:
    """Methods and attributes; and nothing that it does not have."""
    ours: Any = to_device(DataLoader(range(6), 2), "cpu")  # type: ignore[arg-type]
    assert (len(ours), ours.batch_size, ours.num_workers) == (3, 2, 0)
    assert len(list(ours)) == ours.stats().batches == 3
    ours.set_epoch(3)
    torchs: Any = to_device(TorchLoader(range(6), 2), "cpu")  # type: ignore[arg-type]
    assert len(list(torchs)) == len(torchs) == 3
    for name in ("stats", "set_epoch", "state_dict"):
        assert not hasattr(torchs, name)
    torchs.close()  # there is nothing to close
    with pytest.raises(TypeError):
        len(to_device((each for each in range(3)), "cpu"))


async def test_wrappers_around_wrappers() -> None:
    """Both faces, in any depth."""
    loader: Any = LoaderWrapper(LoaderWrapper(taken_ahead(torch.arange(4), None), Doubled), Ahead)
    assert [int(batch) for batch in loader] == [0, 2, 4, 6]
    assert [int(batch) async for batch in loader] == [0, 2, 4, 6]
    iterator = iter(loader)
    next(iterator)
    assert iterator.state_dict()["position"] == loader.state_dict()["position"] == 1
    without: Any = LoaderWrapper(LoaderWrapper(TorchLoader(torch.arange(4), None), Ahead), Ahead)  # type: ignore[arg-type]
    assert [int(batch) for batch in without] == [0, 1, 2, 3]
    assert not hasattr(without, "state_dict")
    assert not hasattr(iter(without), "state_dict")


class BeginsAnew:
    """A loader that is its own iterator, and begins anew with each `iter`, as many prefetchers do."""

    def __iter__(self) -> BeginsAnew:
        self._left = iter(range(6))
        return self

    def __next__(self) -> int:
        return next(self._left)


@pytest.mark.parametrize("kind", [Doubled, Ahead])
def test_an_iterator_is_not_iterated_over_anew(kind: Any) -> None:
    """Within a run each batch comes once; the next run begins at the beginning, also after a `break`."""
    loader: Any = LoaderWrapper(BeginsAnew(), kind)
    whole = [*islice(loader, 20)]  # it would never end
    assert whole == [(2 if kind is Doubled else 1) * number for number in range(6)]
    for _ in loader:
        break
    assert [*islice(loader, 20)] == whole


@pytest.mark.parametrize("face", ["for", "async for"])
async def test_an_iterator_has_one_face(face: str) -> None:
    """Also where a batch is held already: two faces would both give it. The next run may be read by the other one."""
    loader: Any = taken_ahead(range(6), None, num_workers=1, worker_backend="thread", persistent_workers=True)
    iterator = iter(loader)

    async def take(by: str) -> int:
        return int(await asyncio.to_thread(next, iterator) if by == "for" else await anext(iterator))

    other = "for" if face == "async for" else "async for"
    for first, second in ((face, other), (other, face)):
        assert await take(first) == 0
        with pytest.raises(RuntimeError, match=f"read by `{first}`, so it cannot be read by `{second}`"):
            await take(second)
        assert [await take(first) for _ in range(5)] == [1, 2, 3, 4, 5]
        assert iter(loader) is iterator
    await iterator.aclose()


def test_a_fork_is_refused_while_a_thread_takes() -> None:
    """The thread, which holds the lock, is not in the fork: nobody would let go of the lock there."""
    came, may_go_on = threading.Event(), threading.Event()

    class Waits(IteratorWrapper):
        def receive(self, batch: Any) -> Any:
            came.set()
            assert may_go_on.wait(60.0)
            return batch

    iterator: Any = iter(LoaderWrapper(DataLoader(range(6), None), Waits))  # type: ignore[arg-type]

    def take() -> None:
        with pytest.raises(LoaderClosedError, match="not to a fork of it"):
            next(iterator)

    with ThreadPoolExecutor(1) as executor:
        first = executor.submit(next, iterator)
        try:
            assert came.wait(60.0)
            assert forked(take).wait() == 0
        finally:
            may_go_on.set()
        assert first.result() == 0


def test_a_look_beside_a_loop_does_not_matter_to_the_loop() -> None:
    """As with the loader itself; nor does a loop inside of the loop."""
    loader = taken_ahead(range(10), None)
    for number in loader:
        if number == 3:
            next(iter(loader))
        if number == 5:
            assert sum(1 for _ in loader) == 10
        if number in (4, 6):
            assert loader.state_dict()["position"] == number + 1
        if number == 7:
            break
    assert loader.state_dict()["position"] == 8


@pytest.mark.parametrize("make", [taken_ahead, lambda *data: LoaderWrapper(taken_ahead(*data), Ahead)])
def test_loops_that_are_left_while_the_end_is_held_do_not_matter_to_the_state_after_it(make: Any) -> None:
    """The loader within speaks of such a loop, as the iterator that training uses is at its end there."""
    loader = make(range(6), None)
    iterator = iter(loader)
    assert [next(iterator) for _ in range(6)] == [*range(6)]
    for _ in range(2):
        for number in loader:
            if number == 2:
                break
    assert next(iterator, None) is None
    del iterator
    fresh = make(range(6), None)
    fresh.load_state_dict(loader.state_dict())
    assert [*fresh] == [*range(6)]
    assert [*loader] == [*range(6)]


@pytest.mark.parametrize("ends", ["close", "load", "drop"])
def test_a_state_outlasts_its_iterator(ends: str) -> None:
    """Whatever is done with that; and no batch that was taken ahead is given then."""
    loader = taken_ahead(range(10), None)
    iterator: Any = iter(loader)
    for _ in range(4):
        next(iterator)
    if ends == "close":
        loader.close()
    elif ends == "load":
        loader.load_state_dict(loader.state_dict())
    if ends == "drop":
        del iterator
    else:
        with pytest.raises(LoaderClosedError, match="this iterator was closed"):
            next(iterator)
    assert loader.state_dict()["position"] == 4
    loader.load_state_dict(loader.state_dict())
    assert [*loader] == [*range(4, 10)]


def test_a_handler_of_a_signal_saves_in_the_middle_of_next() -> None:
    """While a batch is worked on it is not given yet; the same, while one is waited for."""
    saved = []

    class Saves(Ahead):
        def receive(self, batch: Any) -> Any:
            saved.append(loader.state_dict()["position"])
            return batch

    loader: Any = LoaderWrapper(DataLoader(range(5), None), Saves)  # type: ignore[arg-type]
    assert [*loader] == [*range(5)]
    assert saved == [0, 0, 0, 1, 2]


def test_a_state_while_another_thread_takes_is_of_what_was_given() -> None:
    """Batches that it takes while the state is asked for are held."""
    threads = []

    class Works(Counted):
        def state_dict(self) -> dict[str, int]:
            if threads:
                thread = threads.pop()
                thread.start()
                thread.join()
            return super().state_dict()

    loader: Any = LoaderWrapper(Works(6), IteratorWrapper)
    iterator = iter(loader)
    assert [next(iterator), next(iterator)] == [0, 1]
    threads.append(threading.Thread(target=lambda: asyncio.run(iterator.pull())))
    assert loader.state_dict() == {"at": 2}
    assert [*iterator] == [*range(2, 6)]


@pytest.mark.parametrize("hits", ["within", "receive"])
def test_an_interrupt_loses_no_batch(hits: str) -> None:
    """Whether the batch is waited for, or worked on; the state is that of what was given."""
    left = [5]

    def hit() -> None:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt

    class Data:
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> int:
            hit() if hits == "within" else None
            return index

    class Hits(Ahead):
        def receive(self, batch: Any) -> Any:
            hit() if hits == "receive" else None
            return batch

    loader: Any = LoaderWrapper(DataLoader(Data(), None), Hits)  # type: ignore[arg-type]
    iterator, seen = iter(loader), []
    with pytest.raises(KeyboardInterrupt):
        seen.extend(iter(partial(next, iterator), None))  # keeps what came before
    while len(seen) < 8:
        assert loader.state_dict()["position"] == len(seen)
        seen.append(next(iterator))
    assert seen == [*range(8)]


async def test_a_task_that_is_cancelled_loses_no_batch() -> None:
    """Another task of the loop is given the batch."""
    may_go = threading.Event()

    class Data:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            assert may_go.wait(30)
            return index

    options: Any = {"num_workers": 1, "worker_backend": "thread"}
    iterator = aiter(LoaderWrapper[Any](DataLoader(Data(), None, **options), Ahead))  # type: ignore[arg-type]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(iterator), 0.05)
    waits, others = (asyncio.ensure_future(anext(iterator)) for _ in range(2))
    await asyncio.sleep(0)
    waits.cancel()
    may_go.set()
    assert [await others, *[batch async for batch in iterator]] == [*range(4)]


def test_threads_share_an_iterator() -> None:
    """Each batch goes to exactly one of them."""
    iterator: Any = iter(taken_ahead(range(400), None, num_workers=1, worker_backend="thread"))
    with ThreadPoolExecutor(3) as pool:
        parts = [each.result() for each in [pool.submit(list, iterator) for _ in range(3)]]
    assert sorted(each for part in parts for each in part) == [*range(400)]


def test_errors_come_in_their_turns() -> None:
    """With the frames of the data's own code; the batches around them arrive."""

    class Data:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            if index == 2:
                raise OSError("a bad sector")
            return index

    iterator: Any = iter(taken_ahead(Data(), None))
    assert [next(iterator), next(iterator)] == [0, 1]
    with pytest.raises(OSError, match="a bad sector") as caught:
        next(iterator)
    assert caught.traceback[-1].name == "__getitem__"
    assert [*iterator] == [3]
    for closes in (False, True):
        with pytest.raises(StopIteration):
            next(iterator)
        iterator.close() if closes is False else None


def test_an_iterator_that_is_dropped_goes_at_once() -> None:
    """By its reference count alone, also with an error that was taken ahead."""

    def data() -> Iterator[int]:
        yield 0
        raise OSError

    gc.disable()
    try:
        iterator: Any = iter(LoaderWrapper[int](data(), Ahead))
        next(iterator)
        gone = weakref.ref(iterator)
        del iterator
        if sys.version_info >= (3, 12):  # an error of a generator refers to the frames of who has asked that
            gc.collect()
        assert gone() is None
    finally:
        gc.enable()


def test_a_wrapper_that_awaits_in_a_for_loop_is_told_so() -> None:
    """There is no loop to wait on."""

    class Awaits(IteratorWrapper):
        async def prepare(self) -> None:
            await asyncio.sleep(0)

    with pytest.raises(RuntimeError, match="has awaited something in a `for` loop"):
        next(iter(LoaderWrapper[int]([1], Awaits)))
