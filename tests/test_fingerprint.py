"""`fingerprint=True`: one fingerprint of the batches that were given, however they were made, and whatever happened."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from asyncloader import ConfigurationError, DataLoader, options
from asyncloader.engine.finisher import Finisher
from asyncloader.run.worker_iterator import WorkerIterator
from tests import inside
from tests.pins import Pins

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
BATCH = 4
COUNT = 10


class Numbered(Dataset[Any]):
    """Samples with a tensor, a number and a text; some bytes of one may be another."""

    def __init__(self, odd: int | None = None, bad: int | None = None, deadly: Path | None = None) -> None:
        self.odd, self.bad, self.deadly = odd, bad, deadly

    def __len__(self) -> int:
        return BATCH * COUNT

    def __getitem__(self, index: int) -> Any:
        if index == self.bad:
            raise ValueError(index)
        if index == 17 and self.deadly is not None and not self.deadly.exists():
            self.deadly.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return {
            "image": torch.full((3, 5), float(index) + (index == self.odd) / 1024),
            "label": index,
            "name": str(index),
        }


class Awaited(Numbered):
    async def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)


class Stream(IterableDataset[Any]):
    """The same samples; each of several workers has those of every so many batches, as the sampler would give them."""

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for batch in range(first, COUNT, step):
            yield from map(Numbered().__getitem__, range(batch * BATCH, (batch + 1) * BATCH))


def run(dataset: Any = None, /, **more: Any) -> str:
    """Take all batches of a run, and return their fingerprint."""
    loader = DataLoader(dataset or Numbered(), BATCH, **{"fingerprint": True, **more})
    assert len(list(loader)) == COUNT
    found = loader.stats().fingerprint
    loader.close()
    assert found is not None
    assert found == loader.state_dict()["fingerprint"] == loader.stats().as_dict()["fingerprint"]
    assert f"fingerprint {found}" in str(loader.stats())
    return found


@pytest.fixture(scope="module")
def expected() -> str:
    """That of a run without workers."""
    return run()


@pytest.mark.parametrize(
    "way",
    [
        {"num_workers": 1},
        {"num_workers": 2, "scheduling": "dynamic"},
        {"num_workers": 3, "in_order": False, "scheduling": "dynamic"},
        {"num_workers": 2, "worker_backend": "thread"},
        {"num_workers": 2, "concurrency": 3},
        {"concurrency": 3},
        {"num_workers": 2, "seeding": "sample"},
        {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 3},
        pytest.param({"num_workers": 1, "multiprocessing_context": "spawn"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_all_ways_to_make_batches_agree(way: dict[str, Any], expected: str) -> None:
    """Any number of workers, processes or threads, in any order, with samples one after the other or at once."""
    assert run(**way) == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_async_samples_and_streams_agree(num_workers: int, expected: str) -> None:
    """What makes the samples does not matter, as long as batches have the same numbers."""
    assert run(Awaited(), num_workers=num_workers) == expected
    assert run(Stream(), num_workers=num_workers) == expected


def test_pinned_batches_agree(expected: str) -> None:
    """The digest is made before a batch is copied, whatever the copy is."""

    class Pinning(WorkerIterator[Any]):
        def _make_finisher(self, loop: Any) -> Finisher:
            return Finisher(loop, Pins(lambda batch: {**batch, "image": batch["image"] + 1}))

    loader = DataLoader(Numbered(), BATCH, num_workers=2, fingerprint=True)
    with inside.iterator_of(Pinning, loader) as batches:
        assert next(batches)["image"][0, 0, 0] == 1
        list(batches)
        assert batches.stats().fingerprint == expected


def test_another_bit_is_another_fingerprint(expected: str) -> None:
    """In one sample of one batch; and the same data in another order of samples, or of batches."""
    found = {expected, run(Numbered(odd=20)), run(Numbered(odd=21))}
    order = list(range(BATCH * COUNT))
    found |= {run(sampler=[1, 0, *order[2:]]), run(sampler=[*order[BATCH:], *order[:BATCH]])}
    assert len(found) == 5


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("in_order", [True, False])
def test_a_resumed_run_has_the_fingerprint_of_the_whole_one(num_workers: int, in_order: bool, expected: str) -> None:
    """Wherever it was left: states have that of what was given, whatever was made ahead."""
    chosen: dict[str, Any] = {"num_workers": num_workers, "in_order": in_order, "fingerprint": True}
    loader = DataLoader(Numbered(), BATCH, **chosen, scheduling="dynamic")
    states, iterator = [loader.state_dict()], iter(loader)
    for _ in range(COUNT):
        next(iterator)
        states.append(json.loads(json.dumps(loader.state_dict())))
        assert states[-1]["fingerprint"] == loader.stats().fingerprint
    assert states[0]["fingerprint"] is None
    assert len({state["fingerprint"] for state in states}) == COUNT + 1
    assert states[-1]["fingerprint"] == expected
    loader.close()
    for state in states[:COUNT:3]:
        resumed = DataLoader(Numbered(), BATCH, **{**chosen, "num_workers": 2 - num_workers})
        resumed.load_state_dict(state)
        assert len(list(resumed)) == COUNT - state["position"] - len(state["ahead"])
        assert resumed.stats().fingerprint == expected
        resumed.close()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_each_epoch_has_a_fingerprint_of_its_own(num_workers: int, expected: str) -> None:
    """Also after the state of the end of one, and with workers that stay."""
    persistent = num_workers > 0
    loader = DataLoader(Numbered(), BATCH, num_workers=num_workers, fingerprint=True, persistent_workers=persistent)
    for _ in range(2):
        list(loader)
        assert loader.stats().fingerprint == expected
    state = loader.state_dict()
    loader.close()
    loader = DataLoader(Numbered(), BATCH, num_workers=num_workers, fingerprint=True)
    loader.load_state_dict(state)
    list(loader)
    assert loader.stats().fingerprint == expected


def test_batches_without_one_before_a_resume_leave_the_run_without_one() -> None:
    """Nobody could say what they were; without batches before it there is one."""
    loader = DataLoader(Numbered(), BATCH)
    iterator = iter(loader)
    first = loader.state_dict()
    next(iterator)
    for state, is_known in ((first, True), (loader.state_dict(), False)):
        resumed = DataLoader(Numbered(), BATCH, fingerprint=True)
        resumed.load_state_dict(state)
        list(resumed)
        assert (resumed.stats().fingerprint is not None) is is_known
    assert loader.stats().fingerprint is None


def test_a_batch_that_is_made_again_counts_once(tmp_path: Path, expected: str) -> None:
    """After its worker died."""
    loader = DataLoader(Numbered(deadly=tmp_path / "died"), BATCH, num_workers=2, fingerprint=True)
    assert len(list(loader)) == COUNT
    assert loader.stats().replacements == 1
    assert loader.stats().fingerprint == expected


@pytest.mark.parametrize("on_error", ["raise", "skip", "replace"])
def test_bad_samples_count_as_what_the_batch_is(on_error: Any) -> None:
    """The fingerprint is that of what was given, an error or a batch that is left out aside; for any workers alike."""

    def found(num_workers: int) -> str | None:
        loader = DataLoader(Numbered(bad=9), BATCH, num_workers=num_workers, fingerprint=True, on_error=on_error)
        iterator, count = iter(loader), 0
        for _ in range(COUNT):
            try:
                count += next(iterator) is not None
            except ValueError:
                assert on_error == "raise"
        assert count == COUNT - (on_error == "raise")
        loader.close()
        return loader.stats().fingerprint

    assert found(0) == found(2) not in (None, run())


def test_an_async_consumer_has_it_too(expected: str) -> None:
    """As of each batch that it was given."""

    async def consume(num_workers: int) -> str | None:
        loader = DataLoader(Numbered(), BATCH, num_workers=num_workers, fingerprint=True)
        async for _ in loader:
            pass
        return loader.stats().fingerprint

    for num_workers in (0, 2):
        assert asyncio.run(consume(num_workers)) == expected


def test_what_is_no_answer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """At construction; and without its package, with what to install."""
    with pytest.raises(ConfigurationError, match="fingerprint should be True or False, but got 'xxh3'"):
        DataLoader([1], fingerprint="xxh3")  # type: ignore[arg-type]
    monkeypatch.setattr(options, "find_spec", lambda name: None if name == "xxhash" else importlib.util.find_spec(name))
    with pytest.raises(ConfigurationError, match=r"needs xxhash, .* pip install 'asyncloader\[fingerprint\]'"):
        DataLoader([1], fingerprint=True)
    DataLoader([1])


def test_several_consumers_make_one_fingerprint(expected: str) -> None:
    """Threads that share an iterator: each batch counts once."""
    loader = DataLoader(Numbered(), BATCH, num_workers=2, fingerprint=True)
    iterator, counts = iter(loader), itertools.count()

    def consume() -> None:
        for _ in iterator:
            next(counts)

    threads = [threading.Thread(target=consume) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert next(counts) == COUNT
    assert loader.stats().fingerprint == expected
