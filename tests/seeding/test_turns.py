"""Blocks that take turns with the global generators, under a seed of their own."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import pytest
import torch

from asyncloader import sample_rng, sample_seed
from asyncloader.seeding import turns
from asyncloader.seeding.generators import left_alone
from asyncloader.seeding.sample_context import BATCH, COLLATION, SampleContext, current
from asyncloader.seeding.seeder import Seeder
from asyncloader.seeding.switch import GeneratorSwitch
from tests.support import inside
from tests.support.forks import forked

KEY = (7, 1, 0)
SEEDER = Seeder(KEY)


def draw() -> tuple[float, float, float]:
    """Draw from all three global generators."""
    return random.random(), float(np.random.rand()), float(torch.rand(()))


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """The generators are as they were, nobody has a turn, and no sample is being fetched."""
    outside = current.set(None)  # type: ignore[arg-type]  # whatever another test has left in this thread
    with left_alone():
        yield
    assert inside.turn_holder() is None
    assert inside.turn_is_free()
    assert current.get(None) is None
    current.reset(outside)


def within(sample: SampleContext | None) -> Any:
    """Return what a sample draws in a block, and then in another one."""
    outside = current.set(sample) if sample is not None else None
    try:
        with sample_seed():
            one = draw()
        with sample_seed():
            return one, draw()
    finally:
        if outside is not None:
            current.reset(outside)


def test_what_is_drawn_depends_on_the_place_in_the_epoch_alone() -> None:
    """Not on batch and position; and each block, sample and epoch has numbers of its own."""
    expected = within(SampleContext.of_sample(SEEDER, 3, 2, first=10))
    assert within(SampleContext.of_sample(SEEDER, 0, 0, first=12)) == expected
    others = [
        within(SampleContext.of_sample(Seeder(key), 3, position, first=10))
        for key, position in [(KEY, 1), (KEY, BATCH), (KEY, COLLATION), ((7, 2, 0), 2), (KEY, 0)]
    ]
    drawn = [number for blocks in [expected, *others] for block in blocks for number in block]
    assert len(set(drawn)) == len(drawn)


@pytest.fixture
def in_a_sample() -> Iterator[SampleContext]:
    """A sample is being fetched."""
    sample = SampleContext.of_sample(SEEDER, 0, 0, first=5)
    outside = current.set(sample)
    yield sample
    current.reset(outside)


def test_a_block_in_a_block_goes_on_where_the_outer_one_is(in_a_sample: SampleContext) -> None:
    """It is the same turn of the same sample."""
    with sample_seed():
        expected = [draw(), draw()]
    current.set(SampleContext.of_sample(SEEDER, 0, 0, first=5))
    with sample_seed():
        found = [draw()]
        with sample_seed():
            found.append(draw())
    assert found == expected


@pytest.mark.parametrize(
    "sample", [None, SampleContext.of_sample(SEEDER, 0, 0)], ids=["nothing is fetched", "another seeding"]
)
def test_elsewhere_it_changes_nothing(sample: SampleContext | None) -> None:
    """A dataset with blocks works by itself, and under any seeding."""
    random.seed(1)
    first = random.getstate()
    within(sample)
    random.setstate(first)
    expected = random.random(), random.random()
    random.setstate(first)
    assert tuple(block[0] for block in within(sample)) == expected


def test_a_block_that_raises_gives_its_turn_back(in_a_sample: SampleContext) -> None:
    """The next sample has it."""
    with pytest.raises(KeyError), sample_seed():
        raise KeyError
    assert within(SampleContext.of_sample(SEEDER, 0, 1, first=5)) == within(
        SampleContext.of_sample(SEEDER, 0, 1, first=5)
    )


def test_generators_that_are_the_trainers_are_not_seeded() -> None:
    """Where samples are made at the same time in its process: the error says what to draw from, and that works."""
    outside = current.set(SampleContext.of_sample(Seeder(KEY, may_seed=False), 0, 0, first=5))
    before = random.getstate()
    with pytest.raises(RuntimeError, match=r"sample_rng\(\), or use worker processes"), sample_seed():
        raise AssertionError
    assert random.getstate() == before
    sample_rng()
    current.reset(outside)


def test_an_await_inside_a_block_is_refused() -> None:
    """The other samples of the loop would run inside it."""

    async def sample(position: int, go_on: asyncio.Event) -> None:
        current.set(SampleContext.of_sample(SEEDER, 0, position, first=0))
        with sample_seed():
            await go_on.wait()

    async def both() -> None:
        go_on = asyncio.Event()
        first = asyncio.create_task(sample(0, go_on))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="there is an await inside the block"):
            await asyncio.create_task(sample(1, go_on))
        go_on.set()
        await first

    asyncio.run(both())


def test_blocks_of_several_threads_take_turns(in_a_sample: SampleContext) -> None:
    """One that comes while another thread is in a block waits for its end."""

    def draw_in_a_block() -> float:
        current.set(SampleContext.of_sample(SEEDER, 0, 1, first=5))
        with sample_seed():
            return random.random()

    with ThreadPoolExecutor(1) as pool:
        with sample_seed():
            drawn = pool.submit(draw_in_a_block)
            assert not wait([drawn], timeout=0.1).done
        assert drawn.result(30) == draw_in_a_block()
    current.set(in_a_sample)


@pytest.mark.parametrize("is_own", [True, False])
def test_a_coroutine_that_blocks_its_loop_on_a_block_is_named(
    is_own: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its step waits for the thread, and the thread's block for the end of the step; another's step only takes long."""
    monkeypatch.setattr(turns, "_PATIENCE_S", 0.05)
    switch = GeneratorSwitch(SEEDER, warns=False)
    sample, other = (SampleContext.of_sample(SEEDER, 0, position, 0, switch) for position in range(2))

    def draw_in_a_block() -> float:
        current.set(sample if is_own else other)
        with sample_seed():
            return random.random()

    with left_alone(), ThreadPoolExecutor(1) as pool, caplog.at_level(logging.WARNING, "asyncloader"):
        switch.begin(sample)
        drawn = pool.submit(draw_in_a_block)
        assert not wait([drawn], timeout=0.5).done
        switch.end(sample, is_last=True)
        drawn.result(30)
    assert ("both wait for ever" in caplog.text) is is_own


def test_a_fork_has_no_turn_that_another_thread_had() -> None:
    """That thread is not there, and would never give it back."""
    holds, leave = threading.Event(), threading.Event()

    def hold() -> None:
        current.set(SampleContext.of_sample(SEEDER, 0, 0, first=0))
        with sample_seed():
            holds.set()
            leave.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert holds.wait(30)
    assert not inside.turn_is_free()
    assert forked(lambda: inside.turn_is_free() and inside.turn_holder() is None).wait() == 0
    leave.set()
    thread.join(30)


@pytest.mark.parametrize("first", [None, 4])
def test_samples_of_one_call_have_their_own_numbers(first: int | None) -> None:
    """Of `sample_rng` under any seeding: what a sample that is fetched alone has, each time it is asked."""
    outside = current.set(SampleContext.of_sample(SEEDER, 2, BATCH, first=first))
    found = []
    for position in (1, 0, 1):
        with sample_seed(position):
            found.append((sample_rng().random(), random.random()))
    current.reset(outside)
    outside = current.set(SampleContext.of_sample(SEEDER, 2, 1, first=first))
    with sample_seed(7):  # the position is that of a batch: this is one sample
        by_itself = [(sample_rng().random(), random.random())]
    with sample_seed():
        by_itself.append((sample_rng().random(), random.random()))
    current.reset(outside)
    same = slice(None, 1) if first is None else slice(None)
    assert [pair[same] for pair in (found[0], found[2])] == [pair[same] for pair in by_itself]
    assert found[1][0] not in (found[0][0], found[2][0])
