"""States that torchdata's own loader has made, in ours: what follows is what follows there."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader as Theirs

from asyncloader import DataLoader
from asyncloader.errors import StateMismatchError
from asyncloader.stateful import StatefulDataLoader, convert
from tests.stateful.matrix import outcome, states, wrong
from tests.stateful.programs import SAMPLERS, Reader, StatefulStream, StreamOfReaders, make, plain

pytestmark = [
    pytest.mark.on_threads,
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]

A_FEW = [
    ("map", "shuffled, generator", 0, 1, False),
    ("map", "shuffled, no batches", 0, 1, False),
    ("map", "drop_last", 0, 1, False),
    ("map with a state", "own, with a state", 0, 1, False),
    ("map with a state", "own, with iterators with a state", 0, 1, False),
    ("map", "of batches, with a state", 0, 1, False),
    ("map", "torch's, seeded", 0, 1, False),
    ("map", "torch's, with the loader's generator", 1, 1, False),
    ("stream with a state", "sequential", 0, 1, False),
    ("map with a state", "shuffled", 3, 4, False),
    ("stream", "sequential", 3, 4, False),
    ("iterator with a state", "sequential", 3, 4, False),
    ("its own iterator", "sequential", 1, 1, True),
]


@pytest.mark.parametrize("program", A_FEW, ids=str)
def test_states_of_theirs(program: Any) -> None:
    """Before the first batch, in the middle, at the last batch and after it. All kinds are in tests/frameworks."""
    assert not wrong([program])


@pytest.mark.parametrize("sampler", sorted(SAMPLERS))
def test_order_is_theirs(sampler: str) -> None:
    """Three epochs; with workers, which persist or not, where that moves the generator in other ways."""
    with_workers = [("map", sampler, 2, 1, persistent) for persistent in (False, True)]
    for program in [("map", sampler, 0, 1, False), *(with_workers if sampler in ("shuffled", "counted") else ())]:
        theirs, ours = make(Theirs, program), make(StatefulDataLoader, program)
        torch.manual_seed(1)
        expected = [plain(theirs) for _ in range(3)]
        torch.manual_seed(1)
        assert [plain(ours) for _ in range(3)] == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_states_of_maps_fit_any_number_of_workers(num_workers: int) -> None:
    """Where there were workers and are none now, later epochs have another order, as torchdata's own do."""
    program = ("map", "shuffled", 3, 4, False)
    for moment, (state, *expected) in states(program).items():
        loader = make(StatefulDataLoader, program, num_workers)
        loader.load_state_dict(state)
        if num_workers or moment != "after":
            assert plain(loader) == expected[0], moment


def test_states_of_datasets_fit_as_many_workers() -> None:
    """Unless all workers had the same."""
    program = ("map with a state", "shuffled", 3, 4, False)
    found = states(program)
    loader = make(StatefulDataLoader, program, 2)
    loader.load_state_dict(found["before"][0])
    loader.load_state_dict(found["last batch"][0])  # the number of workers may still be set
    for refused in (loader.state_dict, partial(iter, loader), partial(aiter, loader)):
        with pytest.raises(StateMismatchError, match="num_workers"):
            refused()
    persistent = make(StatefulDataLoader, (*program[:4], True), 2)
    assert plain(persistent)
    persistent.load_state_dict(found["last batch"][0])
    with pytest.raises(StateMismatchError, match="num_workers"):
        iter(persistent)
    loader.num_workers = 3
    assert plain(loader) == found["last batch"][1]
    with pytest.raises(StateMismatchError, match="num_workers"):
        make(DataLoader, program, 2).load_state_dict(found["last batch"][0])


def test_states_of_streams_fit_as_many_workers() -> None:
    """Another number is refused by name."""
    for dataset in ("stream", "its own iterator"):
        program = (dataset, "sequential", 3, 1, False)
        for moment, (state, *_) in states(program).items():
            if moment != "after":
                for num_workers in (0, 2):
                    loader = make(DataLoader, program, num_workers)
                    with pytest.raises(StateMismatchError, match="num_workers"):
                        loader.load_state_dict(state)
                        iter(loader)


class Divided(StatefulStream):
    """Its parts are equal shares of it."""

    def part(self) -> range:
        info = get_worker_info()
        return range(21) if info is None else range(21)[info.id :: info.num_workers]


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("then", [0, 1])
def test_one_worker_of_a_stream_is_as_none(then: int, every: int) -> None:
    """In an epoch. After it nobody can know whether a worker goes on with its state: the trainer's process does."""
    theirs = Theirs(Divided(), 4, num_workers=then, snapshot_every_n_steps=every)
    iterator = iter(theirs)
    for done in range(7):
        loader = StatefulDataLoader(Divided(), 4, num_workers=1 - then)
        loader.load_state_dict(theirs.state_dict())
        assert plain(loader) == [list(range(21))[at : at + 4] for at in range(done * 4, 21, 4)]
        next(iterator, None)
    state = theirs.state_dict()
    assert state["_iterator_finished"]
    loader = StatefulDataLoader(Divided(), 4, num_workers=1 - then)
    if then:
        with pytest.raises(StateMismatchError, match="num_workers"):
            loader.load_state_dict(state)
            iter(loader)
    else:
        loader.load_state_dict(state)
        assert plain(loader) == plain(theirs)


def test_each_rank_loads_its_own_state() -> None:
    """Eight ranks, which share an epoch."""

    def make_rank(loader_class: Any, rank: int) -> Any:
        return loader_class(range(100), 3, sampler=DistributedSampler(range(100), 8, rank, seed=2))  # type: ignore[arg-type]

    for rank in range(8):
        theirs, ours = make_rank(Theirs, rank), make_rank(StatefulDataLoader, rank)
        iterator = iter(theirs)
        next(iterator)
        ours.load_state_dict(theirs.state_dict())
        assert plain(ours) == plain(iterator)


def test_a_sampler_of_torchs_draws_anew(caplog: pytest.LogCaptureFixture) -> None:
    """Its generator is in no state of torchdata's: it is the user who seeds it again, and a warning says so."""
    program = ("map", "torch's, seeded", 0, 1, False)
    state, *expected = states(program)["middle"]
    assert outcome(program, state, expected, DataLoader) == "equal"
    assert "generator of RandomSampler" in caplog.text


def test_an_order_of_the_global_generator_is_refused() -> None:
    """Nobody can know it: samples would come twice, and others not at all. States of ours have that generator."""
    sampler = RandomSampler(range(23))
    for options in ({"batch_size": 4, "sampler": sampler}, {"batch_sampler": BatchSampler(sampler, 4, False)}):
        theirs, ours = Theirs(range(23), **options), DataLoader(range(23), **options)  # type: ignore[arg-type]
        for _ in theirs:
            with pytest.raises(StateMismatchError, match="generator was"):
                ours.load_state_dict(theirs.state_dict())


@pytest.mark.parametrize(
    "program",
    [("iterator with a state", "sequential", 3, 4, False), ("its own iterator", "sequential", 3, 1, True)],
    ids=str,
)
async def test_async_for_goes_on_after_batches_that_are_read_again(program: Any) -> None:
    """The first `anext` reads them, or all that is left of an epoch, and the states until then are as good."""
    for moment, (state, *expected) in states(program).items():
        loader = make(StatefulDataLoader, program)
        loader.load_state_dict(state)
        converted = convert(state, loader)
        iterator = aiter(loader)
        if converted["left_out"]:
            assert iterator.state_dict()["left_out"] == converted["left_out"]
            with pytest.raises(RuntimeError, match="async for"):
                next(iterator)
            another = make(StatefulDataLoader, program)
            another.load_state_dict(iterator.state_dict())
            assert plain(another) == expected[0], moment
        assert plain([batch async for batch in iterator]) == expected[0], moment
        assert plain([batch async for batch in loader]) == expected[1], moment


class Slow(StreamOfReaders):
    """Each sample takes 20 ms."""

    def __iter__(self) -> Any:
        return SlowReader(self.part())


class SlowReader(Reader):
    """Each sample takes 20 ms."""

    def __next__(self) -> int:
        time.sleep(0.02)
        return super().__next__()


async def test_what_is_read_again_blocks_no_loop() -> None:
    """And what was dropped before a task was cancelled is not dropped twice."""

    def make_slow(loader_class: Any) -> Any:
        return loader_class(Slow(), 2, num_workers=2, snapshot_every_n_steps=20)

    theirs = make_slow(Theirs)
    iterator = iter(theirs)
    for _ in range(8):
        next(iterator)
    state, rest = theirs.state_dict(), plain(iterator)
    loader = make_slow(StatefulDataLoader)
    loader.load_state_dict(state)
    batches, turns = aiter(loader), 0
    first = asyncio.create_task(anext(batches))
    while not first.done() and turns < 1000:  # the workers have 0.1 s and more to do
        await asyncio.sleep(0.005)
        turns += 1
        if loader.state_dict()["left_out"] <= 4:
            first.cancel()
    assert turns > 2
    assert first.cancelled()
    assert plain([batch async for batch in batches]) == rest


def test_convert_writes_a_state_of_ours() -> None:
    """It is as good as the state itself, and nothing of the loader moves."""
    program = ("map", "shuffled", 0, 1, False)
    state, *expected = states(program)["middle"]
    loader = make(StatefulDataLoader, program)
    before = loader.state_dict()
    ours = convert(state, loader)
    assert loader.state_dict() == before
    assert convert(ours, loader) == ours
    assert outcome(program, ours, expected, StatefulDataLoader) == "equal"


def test_set_epoch_after_a_load_is_that_of_the_state() -> None:
    """A state of torchdata does not say its epoch: trainers set that before or after they load."""
    program = ("map", "distributed", 0, 1, False)
    theirs = make(Theirs, program)
    theirs.sampler.set_epoch(3)
    iterator = iter(theirs)
    for _ in range(2):
        next(iterator)
    state, rest = theirs.state_dict(), plain(iterator)
    ours = make(DataLoader, program)
    ours.load_state_dict(state)
    ours.set_epoch(3)
    assert plain(ours) == rest


def test_what_does_not_fit_is_named() -> None:
    """Another batch size, kind of dataset, sampler; a state of nodes; half a state."""
    shuffled = states(("map", "shuffled", 0, 1, False))["middle"][0]
    stream = states(("stream", "sequential", 0, 1, False))["middle"][0]
    with_state = states(("map", "own, with a state", 0, 1, False))["middle"][0]
    plainest = states(("map", "sequential", 0, 1, False))["middle"][0]
    cases = [
        ("batch_size", StatefulDataLoader(range(23), 3, shuffle=True), shuffled),
        ("kind", StatefulDataLoader(range(23), 4), stream),
        ("sampler", StatefulDataLoader(range(23), 4), shuffled),
        ("sampler", StatefulDataLoader(range(23), 4), with_state),
        ("sampler", StatefulDataLoader(range(23), 4, shuffle=True), plainest),
        ("kind", StatefulDataLoader(range(23), 4), {"root": {}, "num_yielded": 3}),
        ("keys", StatefulDataLoader(range(23), 4), {"_num_yielded": 3}),
        ("version", StatefulDataLoader(range(23), 4), {"position": 3}),
    ]
    for name, loader, state in cases:
        with pytest.raises(StateMismatchError) as caught:
            loader.load_state_dict(state)  # type: ignore[attr-defined]
        assert caught.value.field == name
