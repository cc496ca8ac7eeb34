"""Blocks that take turns with the global generators, under a seed of their own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from asyncloader import sample_rng, sample_seed
from asyncloader.errors import LoaderClosedError
from asyncloader.seeding import turns
from asyncloader.seeding.generators import left_alone
from asyncloader.seeding.sample_context import BATCH, COLLATION, EpochKey, SampleContext, current
from asyncloader.seeding.seeder import Seeder
from tests.faults.test_interrupts_everywhere import NEVER, CtrlC
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
    assert not inside.drawings()
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
    expected = within(SampleContext(SEEDER, 3, 2, first=10))
    assert within(SampleContext(SEEDER, 0, 0, first=12)) == expected
    others = [
        within(SampleContext(Seeder(key), 3, position, first=10))
        for key, position in [(KEY, 1), (KEY, BATCH), (KEY, COLLATION), ((7, 2, 0), 2), (KEY, 0)]
    ]
    drawn = [number for blocks in [expected, *others] for block in blocks for number in block]
    assert len(set(drawn)) == len(drawn)


def test_the_trainer_has_its_generators_back() -> None:
    """After each block, also one that raises; in a worker they are nobody's."""
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    with left_alone():
        expected = draw()
    within(SampleContext(SEEDER, 0, 0, first=0))
    outside = current.set(SampleContext(SEEDER, 0, BATCH, first=0))
    with pytest.raises(KeyError), sample_seed(0):
        raise KeyError
    current.reset(outside)
    assert draw() == expected


@pytest.fixture
def in_a_sample() -> Iterator[SampleContext]:
    """A sample is being fetched."""
    sample = SampleContext(SEEDER, 0, 0, first=5)
    outside = current.set(sample)
    yield sample
    current.reset(outside)


def test_a_worker_keeps_what_its_samples_leave(in_a_sample: SampleContext) -> None:
    """Saving and restoring three states would take ten times as long as seeding them."""
    before = random.getstate()
    with inside.turn_put_back():
        turns.own_generators()
        with sample_seed():
            drawn = draw()
    assert random.getstate() != before
    Seeder(KEY)(5, 3)
    assert draw() == drawn


def test_a_block_in_a_block_goes_on_where_the_outer_one_is(in_a_sample: SampleContext) -> None:
    """It is the same turn of the same sample."""
    with sample_seed():
        expected = [draw(), draw()]
    current.set(SampleContext(SEEDER, 0, 0, first=5))
    with sample_seed():
        found = [draw()]
        with sample_seed():
            found.append(draw())
    assert found == expected


@pytest.mark.parametrize("sample", [None, SampleContext(SEEDER, 0, 0)], ids=["nothing is fetched", "another seeding"])
def test_elsewhere_it_changes_nothing(sample: SampleContext | None) -> None:
    """A dataset with blocks works by itself, and under any seeding."""
    random.seed(1)
    first = random.getstate()
    within(sample)
    random.setstate(first)
    expected = random.random(), random.random()
    random.setstate(first)
    assert tuple(block[0] for block in within(sample)) == expected


def test_an_await_inside_a_block_is_refused() -> None:
    """The other samples of the loop would run inside it."""

    async def sample(position: int, go_on: asyncio.Event) -> None:
        current.set(SampleContext(SEEDER, 0, position, first=0))
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


def test_blocks_of_several_threads_take_turns() -> None:
    """One that comes while another thread is in a block waits for its end."""
    holds, leave = threading.Event(), threading.Event()
    order: list[str] = []

    def first() -> None:
        current.set(SampleContext(SEEDER, 0, 0, first=0))
        with sample_seed():
            holds.set()
            leave.wait(30)
            order.append("first")

    def second() -> None:
        current.set(SampleContext(SEEDER, 0, 1, first=0))
        with sample_seed():
            order.append("second")

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    assert holds.wait(30)
    threads[1].start()
    leave.set()
    for thread in threads:
        thread.join(30)
    assert order == ["first", "second"]


class Beside:
    """Runs something in another thread, which says when it is inside, and waits for what must not come meanwhile."""

    def __init__(self, around: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        self.inside, self.meanwhile = threading.Event(), threading.Event()
        self.was_disturbed: bool | None = None
        self._around = around
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        current.set(SampleContext(SEEDER, 0, 0, first=0))
        with self._around():
            self.inside.set()
            self.was_disturbed = self.meanwhile.wait(0.2)

    def __enter__(self) -> Beside:
        self._thread.start()
        assert self.inside.wait(30)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._thread.join(30)
        assert self.was_disturbed is not None


alone = partial(turns.alone, EpochKey(KEY))


@pytest.mark.parametrize("others", [turns.exclusive_draws, turns.untouched, alone])
@pytest.mark.parametrize("seeding", [sample_seed, alone])
def test_nobody_draws_or_looks_while_another_thread_has_seeded_the_generators(seeding: Any, others: Any) -> None:
    """What a block has seeded is not the trainer's; nor is what a batch has that is made without workers."""
    random.seed(3)
    before = random.getstate()
    with Beside(seeding) as beside, others():
        beside.meanwhile.set()
        assert random.getstate() == before
    assert not beside.was_disturbed


@pytest.mark.parametrize("drawing", [turns.exclusive_draws, alone])
def test_a_block_waits_for_what_draws_in_another_thread(drawing: Any, in_a_sample: SampleContext) -> None:
    """A sampler that is read draws from the trainer's generators."""
    with Beside(drawing) as beside, sample_seed():
        beside.meanwhile.set()
    assert not beside.was_disturbed


def test_a_sampler_may_look_at_the_generators_and_use_blocks(in_a_sample: SampleContext) -> None:
    """It runs in one thread with these: a loader inside a sample has samplers too."""
    with turns.exclusive_draws(), turns.untouched(), sample_seed():
        expected = draw()
    current.set(SampleContext(SEEDER, 0, 0, first=5))
    with alone(), turns.exclusive_draws(), sample_seed(), turns.exclusive_draws():
        assert draw() == expected


def test_a_sampler_that_waits_for_a_block_does_not_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Blocks go on after a while, and the log says what may come of it."""
    monkeypatch.setattr(turns, "_PATIENCE_S", 0.05)
    given = threading.Event()

    def sample() -> None:
        current.set(SampleContext(SEEDER, 0, 0, first=0))
        with sample_seed():
            given.set()

    thread = threading.Thread(target=sample)
    with turns.exclusive_draws() as drawing:
        thread.start()
        assert given.wait(30)
    thread.join(30)
    assert drawing.overstayed
    assert "A sampler that is read" in caplog.text


def test_a_block_that_waits_for_the_loader_does_not_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The loader goes on after a while, and the log says what may come of it."""
    monkeypatch.setattr(turns, "_PATIENCE_S", 0.05)
    with Beside(sample_seed) as beside, turns.exclusive_draws():
        beside.meanwhile.set()
    assert beside.was_disturbed
    assert "A sample_seed() block has had the global random generators" in caplog.text


@pytest.mark.parametrize("is_its_own", [True, False])
def test_a_block_that_waits_for_a_block_of_its_own_sample_is_refused(
    is_its_own: bool, in_a_sample: SampleContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread of the sample's, with its context, would wait for ever. Blocks of others are waited for."""
    monkeypatch.setattr(turns, "_PATIENCE_S", 0.05)
    other = SampleContext(SEEDER, 0, 1, first=5)

    def draw_in_a_block() -> float:
        current.set(in_a_sample if is_its_own else other)
        with sample_seed():
            return random.random()

    with ThreadPoolExecutor(1) as pool:
        with sample_seed():
            drawn = pool.submit(draw_in_a_block)
            if is_its_own:
                with pytest.raises(RuntimeError, match="a sample has waited for"):
                    drawn.result(30)
            else:
                assert not wait([drawn], timeout=0.3).done
        if not is_its_own:
            drawn.result(30)


def test_a_fork_has_no_turn_that_another_thread_had() -> None:
    """That thread is not there, and would never give it back."""
    holds, leave = threading.Event(), threading.Event()

    def hold() -> None:
        current.set(SampleContext(SEEDER, 0, 0, first=0))
        with sample_seed():
            holds.set()
            leave.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert holds.wait(30)
    assert not inside.turn_is_free()

    def look() -> bool:
        is_free = inside.turn_is_free() and inside.turn_holder() is None
        return is_free and inside.generators_are_the_trainers()

    assert forked(look).wait() == 0
    leave.set()
    thread.join(30)


@pytest.mark.parametrize("first", [None, 4])
def test_samples_of_one_call_have_their_own_numbers(first: int | None) -> None:
    """Of `sample_rng` under any seeding: what a sample that is fetched alone has, each time it is asked."""
    outside = current.set(SampleContext(SEEDER, 2, BATCH, first=first))
    found = []
    for position in (1, 0, 1):
        with sample_seed(position):
            found.append((sample_rng().random(), random.random()))
    current.reset(outside)
    outside = current.set(SampleContext(SEEDER, 2, 1, first=first))
    with sample_seed(7):  # the position is that of a batch: this is one sample
        by_itself = [(sample_rng().random(), random.random())]
    with sample_seed():
        by_itself.append((sample_rng().random(), random.random()))
    current.reset(outside)
    same = slice(None, 1) if first is None else slice(None)
    assert [pair[same] for pair in (found[0], found[2])] == [pair[same] for pair in by_itself]
    assert found[1][0] not in (found[0][0], found[2][0])


def is_free() -> bool:
    """Whether another thread can have its turn: whoever has the lock may take it again."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(inside.turn_is_free).result()


@contextlib.contextmanager
def block(position: int | None = None) -> Iterator[None]:
    outside = current.set(SampleContext(SEEDER, 0, BATCH if position is not None else 0, first=0))
    try:
        with sample_seed(position):
            yield
    finally:
        current.reset(outside)


@pytest.mark.skipif(
    sys.version_info[:2] == (3, 12), reason="CPython 3.12.1 crashes by itself where instructions are traced"
)
@pytest.mark.parametrize("around", [turns.untouched, alone, block, partial(block, 1)])
def test_an_interrupt_leaves_no_turn_taken(around: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    """At whichever moment it comes: blocks of other threads would wait for ever, or the trainer lose its generators."""
    random.seed(3)
    before = random.getstate()
    for moment in itertools.count(1):
        try:
            with CtrlC(moment), around():
                pass
            break
        except KeyboardInterrupt:
            pass
        assert is_free(), moment
        assert inside.turn_holder() is None
        assert random.getstate() == before
        assert current.get(None) is None
    assert moment > 2


def test_an_interrupt_before_the_end_of_a_block_begins_leaves_no_turn_taken(in_a_sample: SampleContext) -> None:
    """A handler may raise where `__exit__` begins, so that nothing of it is done."""
    random.seed(3)
    before = random.getstate()
    seeds = sample_seed()
    seeds.__enter__()
    assert not is_free()
    del seeds
    assert is_free()
    assert inside.turn_holder() is None
    assert random.getstate() == before


@pytest.mark.skipif(
    sys.version_info[:2] == (3, 12), reason="CPython 3.12.1 crashes by itself where instructions are traced"
)
@pytest.mark.parametrize("position", [None, 1])
def test_a_second_interrupt_leaves_no_turn_taken(position: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In what is done where `__exit__` did not begin: but for the moment where this itself begins."""
    told: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda error: told.append(error.exc_type))
    random.seed(3)
    before = random.getstate()

    def drop(moment: int) -> None:
        outside = current.set(SampleContext(SEEDER, 0, BATCH if position is not None else 0, first=0))
        seeds, told[:] = sample_seed(position), []
        seeds.__enter__()
        with CtrlC(moment):
            del seeds
        current.reset(outside)

    for moment in itertools.count(2):
        drop(NEVER)
        drop(moment)
        assert is_free(), moment
        assert inside.turn_holder() is None
        assert random.getstate() == before
        if not told:
            break
    assert moment > 9


def test_no_block_of_an_epoch_that_is_over_begins() -> None:
    """Nor a batch that is made without workers; other epochs of the same numbers go on."""
    over, other = EpochKey(KEY), EpochKey(KEY)
    assert not turns.end([over])
    for epoch in (over, other):
        outside = current.set(SampleContext(Seeder(epoch), 0, 0, first=0))
        expected = pytest.raises(LoaderClosedError) if epoch is over else contextlib.nullcontext()
        with expected, sample_seed():
            pass
        with expected, turns.alone(epoch):
            pass
        current.reset(outside)


@pytest.mark.parametrize("seeding", [sample_seed, turns.alone])
def test_the_end_of_an_epoch_tells_whether_a_sample_has_the_generators(seeding: Any) -> None:
    """Of that epoch, in another thread: the rest is no business of who ends it."""
    epoch = EpochKey(KEY)

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        outside = current.set(SampleContext(Seeder(epoch), 0, 0, first=0))
        with seeding() if seeding is sample_seed else seeding(epoch):
            yield
        current.reset(outside)

    with Beside(around) as beside:
        assert not turns.end([EpochKey(KEY)])
        assert turns.end([epoch])
        beside.meanwhile.set()
    assert not turns.end([epoch])


@pytest.mark.parametrize("seeding", [sample_seed, alone])
async def test_the_thread_of_a_loop_waits_less_long(
    seeding: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Other tasks wait with it."""
    monkeypatch.setattr(turns, "_LOOP_PATIENCE_S", 0.05)
    with Beside(seeding) as beside:
        turns.wait_ended()
        beside.meanwhile.set()
    assert beside.was_disturbed
    assert "for 0.05 s" in caplog.text
