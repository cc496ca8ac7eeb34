"""The end of the data is what the sampler or the stream says it is, and nothing else: no epoch is short in silence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from torch.utils.data import IterableDataset

from asyncloader import DataLoader

END = {"StopIteration": StopIteration, "StopAsyncIteration": StopAsyncIteration}


def raise_end(kind: str) -> Any:
    raise END[kind]("too early")


class Maps:
    """Six samples; one of them raises."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        return raise_end(self.kind) if index == 2 else index


class Batches(Maps):
    """Samples that come as a batch."""

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self[index] for index in indices]


class AsyncMaps(Maps):
    """Samples that are awaited."""

    async def __getitem__(self, index: int) -> int:  # type: ignore[override]
        await asyncio.sleep(0)
        return raise_end(self.kind) if index == 2 else index


class Whole(Maps):
    """All samples are good."""

    def __getitem__(self, index: int) -> int:
        return index


class Streams(IterableDataset[int]):
    """Six samples, all good."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __iter__(self) -> Iterator[Any]:
        return iter(range(6))


class Awaitables(Streams):
    """Six samples, to be awaited; one raises."""

    def __iter__(self) -> Iterator[Any]:
        return (AsyncMaps(self.kind)[index] for index in range(6))


class AsyncStreams:
    """Six samples, all good."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    async def __aiter__(self) -> AsyncIterator[int]:
        for index in range(6):
            yield index


class Sampler:
    """Names 0 and 1, raises, goes on. Its own end is StopIteration, but an `async for` has another one."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __iter__(self) -> Iterator[list[int]]:
        self.at = -1
        return self

    def __next__(self) -> list[int]:
        self.at += 1
        if self.at > 5:
            raise StopIteration
        if self.at == 2:
            raise RuntimeError("StopIteration in a generator") if self.kind == "StopIteration" else StopAsyncIteration
        return [self.at]


def collate(kind: str) -> Callable[[list[Any]], Any]:
    return lambda samples: raise_end(kind) if samples == [2] else samples


def loader_of(case: str, kind: str, **options: Any) -> DataLoader[Any]:
    fails = {"collate_fn": collate(kind)}
    makers: dict[str, Any] = {
        "getitem": (Maps, {}),
        "getitems": (Batches, {}),
        "async getitem": (AsyncMaps, {}),
        "collate": (Whole, fails),
        "collate of a stream": (Streams, fails),
        "collate of an async stream": (AsyncStreams, fails),
        "awaitables": (Awaitables, {"concurrency": 2}),
        "threads": (Maps, {"concurrency": 2} if options["num_workers"] else {}),
        "sampler": (Whole, {"batch_sampler": Sampler(kind)}),
    }
    dataset, more = makers[case]
    return DataLoader(dataset(kind), **{"collate_fn": list, **more, **options})


async def story(loader: DataLoader[Any], face: str) -> list[Any]:
    """Batches, and the errors in the places of others, to the end."""
    batches = aiter(loader) if face == "async for" else iter(loader)
    seen: list[Any] = []
    while True:
        try:
            batch = await anext(batches) if face == "async for" else next(batches)  # type: ignore[call-overload, arg-type]
            seen.append(batch)
        except (StopIteration, StopAsyncIteration):
            return seen
        except RuntimeError as error:
            seen.append(str(error))


CASES = [
    *("getitem", "getitems", "async getitem", "threads", "collate", "collate of a stream", "awaitables"),
    *("collate of an async stream", "sampler"),
]


@pytest.mark.covering(1)
@pytest.mark.parametrize(("face", "kind"), [("for", "StopIteration"), ("async for", "StopAsyncIteration")])
@pytest.mark.parametrize(
    ("num_workers", "backend"), [(0, "process"), (1, "process"), (1, "thread")], ids=["none", "process", "thread"]
)
@pytest.mark.parametrize("case", CASES)
def test_no_exception_of_the_users_is_the_end(case: str, num_workers: int, backend: Any, face: str, kind: str) -> None:
    """It is an error in the place of its batch, whatever raised it, and the other batches come."""
    loader = loader_of(case, kind, num_workers=num_workers, worker_backend=backend)
    seen = asyncio.run(story(loader, face))
    errors = [batch for batch in seen if isinstance(batch, str)]
    assert len(errors) == 1
    assert "StopIteration" in errors[0] or "StopAsyncIteration" in errors[0]
    assert [batch for batch in seen if batch not in errors] == [[0], [1], [3], [4], [5]]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_it_is_a_bad_sample_as_any(on_error: Any, num_workers: int) -> None:
    """And where no sample of a batch is good, the batch is left out, or an error."""
    options: dict[str, Any] = {"collate_fn": list, "num_workers": num_workers, "on_error": on_error}
    whole = list(DataLoader(Maps("StopIteration"), batch_size=3, **options))
    assert whole == ([[0, 1], [3, 4, 5]] if on_error == "skip" else [[0, 1, 0], [3, 4, 5]])
    single = iter(DataLoader(Maps("StopIteration"), **options))
    seen = [next(single), next(single)]
    if on_error == "replace":
        with pytest.raises(RuntimeError, match="raised StopIteration"):
            next(single)
    assert [*seen, *single] == [[0], [1], [3], [4], [5]]


def test_the_cause_is_what_was_raised() -> None:
    """With torch's words and the indices as notes."""
    batches = iter(DataLoader(Maps("StopIteration"), num_workers=1))
    for _ in range(2):
        next(batches)
    with pytest.raises(RuntimeError) as caught:
        next(batches)
    assert repr(caught.value.__cause__) == "StopIteration('too early')"
    assert "Caught StopIteration in DataLoader worker process 0." in caught.value.__notes__
    del caught, batches
