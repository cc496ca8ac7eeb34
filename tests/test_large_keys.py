"""Large keys reach workers whole, and as their own, whatever becomes of the workers."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import pickle
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncloader import DataLoader
from asyncloader.datasets import ParallelMap
from asyncloader.transport.slab import slab_pool
from tests.support import inside

COUNT = 40
KIB = 1 << 10


@pytest.fixture(autouse=True)
def by_count() -> Iterator[None]:
    """Have workers be renewed by how much they have made."""
    with inside.renewals_by_count():
        yield


def item(number: int) -> Any:
    """Return an item of a stream, of one of several kinds: distinct contents, and memory of its own."""
    noise = np.random.default_rng(number).integers(0, 256, 40 * KIB + number, np.uint8)
    match number % 8:
        case 0:
            return noise.tobytes()
        case 1:
            return bytearray(noise)
        case 2:
            return noise
        case 3:
            return torch.from_numpy(noise)
        case 4:
            return {"a": noise[::2], "b": [torch.from_numpy(noise)[::3], noise.tobytes() * 2, f"{number}"]}
        case 5:
            return np.asfortranarray(noise[: 4 * KIB].reshape(64, -1)), "é" * 70_000
        case 6:
            return torch.from_numpy(noise[: 4 * KIB]).to(torch.bfloat16).requires_grad_()
    return number


def items() -> Iterator[Any]:
    """A stream of all kinds."""
    yield from map(item, range(COUNT))


def describe(thing: Any) -> Any:
    """Return what tells things of different contents or types apart."""
    if isinstance(thing, dict):
        return {key: describe(each) for key, each in thing.items()}
    if isinstance(thing, (list, tuple)):
        return type(thing).__name__, [describe(each) for each in thing]
    if isinstance(thing, torch.Tensor):
        contents = thing.detach().view(torch.uint8).numpy() if thing.is_contiguous() else thing.numpy()
        return str(thing.dtype), tuple(thing.shape), thing.requires_grad, describe(contents.tobytes())
    if isinstance(thing, np.ndarray):
        return str(thing.dtype), thing.shape, thing.flags.fnc, describe(thing.tobytes())
    if isinstance(thing, (bytes, bytearray)):
        return type(thing).__name__, hashlib.sha1(thing).hexdigest()
    return thing


async def awaited(thing: Any) -> Any:
    """Describe, awaited."""
    await asyncio.sleep(0.001)
    return describe(thing)


kept: list[tuple[Any, Any]] = []


def keep(thing: Any) -> Any:
    """Keep every item in the worker: those kept before are as they were, and may be written to."""
    for other, description in kept:
        assert describe(other) == description
    made = describe(thing)
    if isinstance(thing, np.ndarray):
        thing += 1
    kept.append((thing, describe(thing)))
    return made


def stop_at(number: int, path: Path, thing: Any) -> Any:
    """End the worker, once, at an item."""
    made = describe(thing)
    if made == describe(item(number)):
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            return made
        os.kill(os.getpid(), signal.SIGKILL)
    return made


WANTED = [describe(item(number)) for number in range(COUNT)]


def loader_of(fn: Any, stream: Any = items, batch_size: int = 4, **options: Any) -> DataLoader[Any]:
    """Return a loader whose batches are lists."""
    return DataLoader(ParallelMap(stream, fn), batch_size, collate_fn=list, **{"num_workers": 2, **options})


def flat(batches: Any) -> list[Any]:
    """Return the samples of batches."""
    return [sample for batch in batches for sample in batch]


PLACES = [
    pytest.param({}, id="fork"),
    pytest.param({"multiprocessing_context": "spawn", "persistent_workers": True}, id="spawn", marks=pytest.mark.slow),
    pytest.param({"worker_backend": "thread"}, id="threads"),
    pytest.param({"scheduling": "dynamic"}, id="dynamic"),
    pytest.param(inside.renewed_after(4), id="renewed"),
    pytest.param({"persistent_workers": True}, id="persistent"),
    pytest.param({"num_workers": 0}, id="none"),
]
ODD = ("dynamic", "renewed", "persistent")
"""In these an async function is awaited each night: how keys reach a worker is no matter of what is done with them."""


@pytest.mark.parametrize(
    ("fn", "options"),
    [
        *(pytest.param(describe, *place.values, id=str(place.id), marks=place.marks) for place in PLACES),
        *(
            pytest.param(
                awaited, *place.values, id=f"awaited, {place.id}", marks=[pytest.mark.slow] * (place.id in ODD)
            )
            for place in PLACES
            if place.id != "spawn"
        ),
    ],
)
def test_items_come_whole(fn: Any, options: dict[str, Any]) -> None:
    """Also after an epoch that is left in the middle."""
    loader = loader_of(fn, **options)
    iterator = iter(loader)
    assert flat([next(iterator), next(iterator)]) == WANTED[:8]
    del iterator
    assert flat(loader) == WANTED
    loader.close()


def slowly(path: Path, number: int, row: np.ndarray[Any, Any]) -> torch.Tensor:
    """Make a sample, which takes a while; end the worker, once, at an item."""
    time.sleep(0.001)
    if row[0] == number:
        with contextlib.suppress(FileExistsError):
            path.touch(exist_ok=False)
            os.kill(os.getpid(), signal.SIGKILL)
    return torch.from_numpy(row)


@pytest.mark.parametrize("options", [*PLACES[:2], *PLACES[3:5]])
def test_they_are_the_workers_own(options: dict[str, Any]) -> None:
    """What a worker keeps stays as it is; arrays may be written to."""
    assert flat(loader_of(keep, batch_size=2, **options)) == WANTED


@pytest.mark.parametrize("options", [*PLACES[:2], *PLACES[3:5]])
def test_a_worker_that_is_killed_costs_nothing(options: dict[str, Any], tmp_path: Path) -> None:
    """Its items are sent again, to another."""
    loader = loader_of(partial(stop_at, 17, tmp_path / "ended"), batch_size=2, **options)
    assert flat(loader) == WANTED
    assert loader.stats().faults.retries


def buffers(count: int, nbytes: int) -> Iterator[bytes]:
    """A stream of bytes."""
    yield from (bytes([number % 256]) * nbytes for number in range(count))


def test_large_items_become_large_batches() -> None:
    """Large messages go both ways at once, and a worker has tickets that it has not read."""
    stream = partial(map, partial(np.full, 50_000), range(200))
    loader = DataLoader(ParallelMap(stream, torch.from_numpy), 4, num_workers=2)
    kept_ones = list(loader)
    assert [batch[:, 0].tolist() for batch in kept_ones] == [[*range(at, at + 4)] for at in range(0, 200, 4)]
    assert all(bool((batch == batch[:, :1]).all()) for batch in kept_ones)


def test_nothing_grows() -> None:
    """Over hundreds of batches, the memory that is reserved is that of some."""
    loader = loader_of(len, partial(buffers, 2_000, 20 * KIB), persistent_workers=True, max_buffered_bytes=0)
    for _ in range(2):
        iterator, most = iter(loader), []
        for number, _batch in enumerate(iterator):
            if number % 25 == 0:
                most.append(slab_pool().reserved_bytes)
        assert number == 499
        assert max(most[10:]) <= 2 * max(most[:10])
    loader.close()


def fail_at_odd(thing: bytes) -> int:
    """Make a sample of each other item."""
    if thing[0] % 2:
        raise ValueError("odd")
    return len(thing)


@pytest.mark.parametrize("options", [{"num_workers": 0}, {}, {"worker_backend": "thread"}])
def test_items_are_named_by_their_numbers(options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """In errors, logs and statistics, which hold none of them and print none."""
    options = {"collate_fn": list, "num_workers": 2, **options}
    dataset = ParallelMap(partial(buffers, 10, 64 * KIB), fail_at_odd)
    first, *_ = _errors(DataLoader(dataset, 5, **options))
    text = str(first) + "".join(getattr(first, "__notes__", [])) + str(first.__cause__)
    assert "sample with the index 1 raised it" in text
    assert "[0, 1, 2, 3, 4]" in text
    assert first.keys == [0, 1, 2, 3, 4]  # type: ignore[attr-defined]
    loader = DataLoader(dataset, 1, on_error="skip", **options)
    assert len(list(loader)) == 5
    stats = loader.stats()
    assert list(stats.faults.bad_samples) == [1, 3, 5, 7, 9]
    assert sorted(map(list, stats.faults.left_out)) == [[1], [3], [5], [7], [9]]
    assert r"\x00\x00" not in text + caplog.text


@pytest.mark.parametrize("on_crash", ["raise", "skip"])
def test_items_of_a_worker_that_died_are_named_by_their_numbers(
    on_crash: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They are not printed either."""
    stream = partial(map, partial(np.full, 5_000), range(4))
    loader = DataLoader(
        ParallelMap(stream, partial(slowly, tmp_path / "ended", 2)), 2, num_workers=1, on_crash=on_crash
    )
    errors = [str(error) for error in _errors(loader)]
    assert sum("indices [2, 3]" in words for words in [*errors, *caplog.messages]) == 1


def _errors(loader: DataLoader[Any]) -> Iterator[Exception]:
    iterator = iter(loader)
    while True:
        try:
            next(iterator)
        except StopIteration:
            return
        except Exception as error:
            yield error


def test_a_state_has_none_of_them() -> None:
    """It names the next item."""
    loader = loader_of(len, partial(buffers, 40, 64 * KIB))
    iterator = iter(loader)
    next(iterator)
    assert len(pickle.dumps(loader.state_dict())) < 64 * KIB
