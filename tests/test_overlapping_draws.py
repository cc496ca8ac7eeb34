"""Samples that are fetched at the same time, and draw: each has draws of its own, across whatever it awaits.

Samples are little programs of waits and draws. How long a wait is, is a number of turns of the loop, so which sample
runs after which depends on how many are in flight and on which worker they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from asyncloader import DataLoader, sample_rng, sample_seed
from asyncloader.seeding.generators import left_alone
from asyncloader.seeding.sample_context import SampleContext, current
from asyncloader.seeding.seeder import Seeder
from asyncloader.seeding.switch import DrawWatch, GeneratorSwitch, steps
from tests.support import effort

LENGTH = 60

DRAWS: dict[str, Callable[[], Any]] = {
    "random": random.random,
    "gauss": lambda: random.gauss(0, 1),  # keeps a second number
    "numpy": np.random.rand,
    "normal": np.random.randn,  # keeps one too
    "torch": lambda: torch.rand(()).item(),
    "randn": lambda: torch.randn(()).item(),
    "block of words": lambda: np.random.bytes(4 * 624)[:4],
}


async def turns(count: int) -> None:
    """Wait for so many turns of the loop."""
    for _ in range(count):
        await asyncio.sleep(0)


def in_a_block() -> float:
    """Draw in a block."""
    with sample_seed():
        return random.random()


class Programs:
    """Samples of which each does something else.

    Args:
        seed: Of the programs; not of what they draw.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.own = np.random.default_rng(seed)
        self.shift = random.Random(seed)

    def __len__(self) -> int:
        return 32

    async def __getitem__(self, index: int) -> Any:
        return index, await self._run(random.Random(self.seed * 1000 + index), depth=0)

    async def _run(self, chooses: random.Random, depth: int) -> list[Any]:
        found: list[Any] = []
        for _ in range(chooses.randint(1, 5)):
            choice = chooses.choice(
                [*DRAWS, "own", "shift", "wait", "wait", "wait", "tasks", "in time", "block", "rng"]
                + ["thread"] * (depth == 0)  # blocks of threads of one sample would be counted as they come
            )
            if choice == "wait":
                await turns(chooses.choice([1, 2, 4, 9, 80]))
            elif choice == "rng":
                found.append(sample_rng().random())
            elif choice in ("tasks", "in time"):
                inner = [random.Random(chooses.random()) for _ in range(2 if depth < 2 else 0)]
                if choice == "tasks":
                    found += await asyncio.gather(*(self._run(each, depth + 1) for each in inner))
                elif inner:
                    found.append(await asyncio.wait_for(self._run(inner[0], depth + 1), 60))
            elif choice == "block":
                found.append(in_a_block())
            elif choice == "thread":
                found.append(await asyncio.to_thread(in_a_block))
            else:
                found.append(
                    self.own.random() if choice == "own" else
                    self.shift.random() if choice == "shift" else
                    DRAWS[choice]()
                )  # fmt: skip
        return found


def run(dataset: Any, state: Any = None, stop: int | None = None, **options: Any) -> Any:
    """Return the batches of an epoch, or of its beginning, with the state there."""
    common = {"batch_size": 4, "shuffle": True, "collate_fn": list, "num_workers": 1, "seeding": "sample"}
    options = common | options
    if options["num_workers"] and "worker_backend" not in options:
        options["multiprocessing_context"] = "fork"  # what workers log goes where the trainer's log goes
    with left_alone():
        torch.manual_seed(3)
        loader = DataLoader(dataset, **options)
        if state is not None:
            loader.load_state_dict(state)
        found = []
        for batch in loader:
            found.append(batch)
            if len(found) == stop:
                return found, loader.state_dict()
        return found


@settings(max_examples=effort.examples(9), deadline=None)
@given(
    seed=st.integers(0, 10**6),
    num_workers=st.integers(1, 2),
    concurrency=st.sampled_from([1, 3, 64]),
    stop=st.integers(1, 7),
)
def test_draws_depend_on_the_seed_alone(seed: int, num_workers: int, concurrency: int, stop: int) -> None:
    """Not on the number of workers, nor on what else is in flight; a resume at any batch gives the same."""
    expected = run(Programs(seed))
    others = {"num_workers": num_workers, "concurrency": concurrency}
    assert run(Programs(seed), **others) == expected
    begun, state = run(Programs(seed), **others, stop=stop)
    assert begun + run(Programs(seed), state) == expected


@settings(max_examples=effort.examples(6), deadline=None)
@given(seed=st.integers(0, 10**6), batch_size=st.integers(1, 9))
def test_by_sample_they_do_not_depend_on_the_batch_size_either(seed: int, batch_size: int) -> None:
    """They are what each sample draws where it is made alone."""
    expected = [sample for batch in run(Programs(seed)) for sample in batch]
    found = run(Programs(seed), batch_size=batch_size, num_workers=2)
    assert [sample for batch in found for sample in batch] == expected


def test_a_plain_dataset_draws_the_same_by_sample() -> None:
    """Its samples are made one after the other, and seeded alike."""

    class Plain:
        def __len__(self) -> int:
            return LENGTH

        def __getitem__(self, index: int) -> Any:
            return index, random.random(), np.random.rand(), torch.rand(()).item()

    class Async(Plain):
        async def __getitem__(self, index: int) -> Any:  # type: ignore[override]
            await turns(index % 7)
            one = random.random()
            await turns(index % 5)
            return index, one, np.random.rand(), torch.rand(()).item()

    expected = run(Plain(), num_workers=0)
    assert run(Async(), num_workers=2) == run(Plain()) == expected


def test_whole_batches_have_draws_of_their_own() -> None:
    """Of `__getitems__`, and of collate_fn."""

    class Batches:
        collated = True

        def __len__(self) -> int:
            return LENGTH

        async def __getitems__(self, indices: list[int]) -> Any:
            first = random.random()
            await turns(indices[0] % 7)
            return [(index, first + random.random()) for index in indices]

    def collate(samples: list[Any]) -> Any:
        return samples, random.random()

    expected = run(Batches(), collate_fn=collate, concurrency=1)
    assert run(Batches(), collate_fn=collate, num_workers=2) == expected
    assert len({number for _, number in expected}) == len(expected)


# ------------------------------------------------------------------------------------------------ without a worker


def numbered(number: int) -> SampleContext:
    """Return the context of a sample at a place in the epoch."""
    return SampleContext.of_sample(Seeder((1, 2, 3)), 0, 0, first=number)


def alone(program: Callable[[], Any], number: int) -> Any:
    """Return what a coroutine gives that runs by itself, seeded."""
    Seeder((1, 2, 3))(number)
    coroutine = program()
    try:
        while True:
            coroutine.send(None)
    except StopIteration as end:
        return end.value


@settings(max_examples=40, deadline=None)
@given(
    programs=st.lists(st.lists(st.sampled_from([*DRAWS, "wait", "wait"]), max_size=8), min_size=1, max_size=9),
    order=st.integers(0, 10**6),
)
def test_any_order_of_steps_gives_what_each_draws_alone(programs: list[list[str]], order: int) -> None:
    """By hand: which sample goes on, or begins, is drawn."""
    chooses = random.Random(order)

    async def sample(choices: list[str]) -> list[Any]:
        found = []
        for choice in choices:
            found.append(await asyncio.sleep(0) if choice == "wait" else DRAWS[choice]())
        return found

    with left_alone():
        expected = [alone(lambda each=each: sample(each), number) for number, each in enumerate(programs)]
        switch = GeneratorSwitch(Seeder((1, 2, 3)))
        left = dict(enumerate(programs))
        going: dict[int, Any] = {}
        found: dict[int, Any] = {}
        while left:
            number = chooses.choice(sorted(left))
            if number not in going:
                going[number] = steps(switch, numbered(number), sample(left[number]))
            try:
                going[number].send(None)
            except StopIteration as end:
                found[number] = end.value
                del going[number], left[number]
    assert [found[number] for number in range(len(programs))] == expected


def test_draws_beside_blocks_of_threads_depend_on_the_seed_alone() -> None:
    """Also where the first samples have neither."""

    class Mixed:
        def __len__(self) -> int:
            return 2 * LENGTH

        async def __getitem__(self, index: int) -> Any:
            await turns(1)
            number = random.random() if index > LENGTH and index % 2 else 0.0
            return index, number, await asyncio.to_thread(in_a_block) if index > LENGTH else 0.0

    expected = run(Mixed(), concurrency=1, shuffle=False)
    for options in ({"concurrency": 16}, {"concurrency": 5, "num_workers": 2}):
        assert run(Mixed(), shuffle=False, **options) == expected


def test_a_sample_that_raises_or_is_cancelled_leaves_the_others_alone() -> None:
    """Its last step ends like any other."""

    async def fails() -> None:
        random.random()
        await asyncio.sleep(0)
        raise KeyError

    async def waits() -> float:
        first = random.random()
        await asyncio.sleep(0)
        return first + random.random()

    with left_alone():
        expected = alone(waits, 7)
        switch = GeneratorSwitch(Seeder((1, 2, 3)))
        good = steps(switch, numbered(7), waits())
        bad = [steps(switch, numbered(number), fails()) for number in (1, 2)]
        for each in (*bad, good):
            each.send(None)
        with pytest.raises(KeyError):
            bad[0].send(None)
        with pytest.raises(asyncio.CancelledError):
            bad[1].throw(asyncio.CancelledError())
        with pytest.raises(StopIteration) as end:
            good.send(None)
        assert end.value.value == expected


# -------------------------------------------------------------------------------------------------------- warnings


@pytest.fixture
def unwarned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has been warned of in this process, nor in its forks."""
    monkeypatch.setattr(DrawWatch, "has_warned", False)


@pytest.fixture
def logged(tmp_path: Path) -> Iterator[Path]:
    """The file that workers log to."""
    path = tmp_path / "log"
    handler = logging.FileHandler(path)
    log = logging.getLogger("asyncloader")
    log.addHandler(handler)
    yield path
    log.removeHandler(handler)
    handler.close()


SHARED = "Samples that are made at the same time seem to draw from random generators"
ELSEWHERE = "Something draws from the random generators of this worker while no sample runs on its loop"


class Blocking:
    """A plain dataset: draws as it is told."""

    def __init__(self, draw: Callable[[], Any], late: int = 0) -> None:
        self.draw = draw
        self.late = late

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return index, self.draw() if index >= self.late else 0.0


class Awaiting(Blocking):
    """The same, of coroutines."""

    async def __getitem__(self, index: int) -> Any:
        await turns(3)
        return super().__getitem__(index)


class Wholly(Blocking):
    """The same, whose batches are asked for as a whole."""

    def __getitems__(self, indices: list[int]) -> Any:
        return [self[index] for index in indices]


class Streaming(Blocking, IterableDataset[Any]):
    """The same as a stream."""

    __len__ = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[Any]:
        return map(self.__getitem__, range(LENGTH))


def beside_a_block() -> float:
    """Draw in a block, and outside of it."""
    return in_a_block() + random.random()


@pytest.mark.usefixtures("unwarned")
@pytest.mark.parametrize(
    ("dataset", "draw", "options"),
    [
        (Blocking, random.random, {"num_workers": 2}),
        (Blocking, np.random.rand, {"seeding": "sample"}),
        (Blocking, beside_a_block, {"seeding": "sample"}),
        (Awaiting, random.random, {"num_workers": 2}),
        (Awaiting, DRAWS["torch"], {}),
        (Awaiting, None, {}),
    ],
    ids=["threads", "threads, by sample", "threads, beside blocks", "coroutines", "torch", "its own generator"],
)
def test_samples_that_share_generators_and_draw_are_warned_of_once(
    dataset: Any, draw: Any, options: dict[str, Any], logged: Path
) -> None:
    """By one worker, with the way out: also where only a late sample draws."""
    data = dataset(draw, late=40)
    data.own = random.Random(3)
    if draw is None:
        data.draw = lambda: data.own.random()
    run(data, **{"seeding": "batch", "concurrency": 4} | options)
    told = logged.read_text()
    assert told.count(SHARED) == 1
    assert "asyncloader.sample_rng()" in told
    assert 'seeding="sample"' in told


@pytest.mark.usefixtures("unwarned")
@pytest.mark.parametrize(
    ("draw", "options"),
    [
        (lambda: sample_rng().random(), {"seeding": "batch"}),
        (lambda: 0.0, {"seeding": "batch"}),
        (in_a_block, {}),
        (random.random, {"seeding": "worker"}),
        (random.random, {"concurrency": None}),
    ],
    ids=["sample_rng", "nothing", "in blocks", "as torch", "one at a time"],
)
def test_nothing_is_said_where_nothing_is_wrong(draw: Any, options: dict[str, Any], logged: Path) -> None:
    """Or where it was asked for; the trainer has drawn before."""
    random.random()
    run(Blocking(draw), **({"concurrency": 4} | options))
    assert SHARED not in logged.read_text()


@pytest.mark.usefixtures("unwarned")
def test_a_batch_that_is_there_while_a_thread_is_in_a_block_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """The block moves the generators; what is drawn outside of it is seen when it begins, or with the next batch."""
    drawn, leave = threading.Event(), threading.Event()

    def hold() -> None:
        current.set(SampleContext.of_sample(Seeder((1, 2, 3)), 0, 0, 0, watch))
        with sample_seed():
            random.random()
            drawn.set()
            leave.wait(60)

    with left_alone(), caplog.at_level(logging.WARNING, "asyncloader"):
        watch = DrawWatch(Seeder((1, 2, 3)), is_alone=True)
        thread = threading.Thread(target=hold)
        thread.start()
        assert drawn.wait(60)
        watch.on_batch()
        leave.set()
        thread.join()
        watch.on_batch()
        assert SHARED not in caplog.text
        random.random()
        watch.on_batch()
    assert caplog.text.count(SHARED) == 1


@pytest.mark.usefixtures("unwarned")
def test_coroutines_with_draws_of_their_own_are_not_warned_of(logged: Path) -> None:
    """In a worker process, with seeding="sample"."""
    run(Awaiting(random.random), num_workers=2)
    assert not logged.read_text()


@pytest.mark.usefixtures("unwarned")
@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Awaiting, {"num_workers": 0}),
        (Blocking, {"num_workers": 0, "concurrency": 4}),
        (Awaiting, {"num_workers": 2, "worker_backend": "thread"}),
        (Blocking, {"num_workers": 2, "worker_backend": "thread"}),
        (Blocking, {"num_workers": 1, "worker_backend": "thread", "seeding": "sample", "batch_size": 1}),
        (Blocking, {"num_workers": 2, "worker_backend": "thread", "seeding": "worker", "persistent_workers": True}),
        (Wholly, {"num_workers": 2, "worker_backend": "thread"}),
        (Streaming, {"num_workers": 2, "worker_backend": "thread", "shuffle": False}),
    ],
)
def test_in_the_trainers_process_a_draw_is_warned_of_once(
    dataset: Any, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The generators are the trainer's there, under any seeding."""
    options = {"seeding": "sample" if dataset is Awaiting else "batch"} | options
    with caplog.at_level(logging.WARNING, "asyncloader"):
        run(dataset(lambda: 0.0), **options)
        assert SHARED not in caplog.text
        run(dataset(random.random), **options)
        run(dataset(random.random), **options)
    assert caplog.text.count(SHARED) == 1


@pytest.mark.usefixtures("unwarned")
@pytest.mark.parametrize("options", [{"num_workers": 2, "worker_backend": "thread"}, {"concurrency": 4}])
def test_another_loader_that_begins_is_not_taken_for_a_sample(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Its base seed is drawn while the first samples are made, and its order when they are there."""
    begun, goes_on = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        goes_on.wait(60)

    with left_alone(), caplog.at_level(logging.WARNING, "asyncloader"):
        iterator = iter(DataLoader(Blocking(wait), 4, collate_fn=list, **options))  # type: ignore[arg-type]
        begun.wait(60)
        other = iter(DataLoader(range(12), 4, shuffle=True))  # type: ignore[arg-type]
        goes_on.set()
        for _ in zip(iterator, other, strict=False):
            torch.rand(())
    assert SHARED not in caplog.text


@pytest.mark.usefixtures("unwarned")
def test_a_draw_counts_once_though_two_samples_end_with_it(caplog: pytest.LogCaptureFixture) -> None:
    """Two threads look at the generators at the same time, after the base seed of another loader was drawn."""
    both = threading.Barrier(2, timeout=0.3)
    with left_alone(), caplog.at_level(logging.WARNING, "asyncloader"):
        watch = DrawWatch(Seeder((1, 2, 3)), is_alone=False)
        look = watch._positions

        def look_together() -> Any:
            found = look()
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait()
            return found

        random.random()
        watch._positions = look_together
        threads = [threading.Thread(target=watch.end) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert SHARED not in caplog.text


@pytest.mark.usefixtures("unwarned")
def test_draws_of_the_trainer_are_not_taken_for_those_of_samples(caplog: pytest.LogCaptureFixture) -> None:
    """After the first batch only the trainer knows who draws."""
    loader = DataLoader(Awaiting(lambda: 0.0), 4, collate_fn=list)  # type: ignore[arg-type]
    with left_alone(), caplog.at_level(logging.WARNING, "asyncloader"):
        for _ in loader:
            random.random()
    assert SHARED not in caplog.text


def test_threads_beside_coroutines_are_warned_of(logged: Path) -> None:
    """They draw while no sample runs on the loop; in blocks they have draws of their own."""

    class OnThreads(Awaiting):
        async def __getitem__(self, index: int) -> Any:
            step_ended = threading.Event()
            asyncio.get_running_loop().call_soon(step_ended.set)
            return index, await asyncio.to_thread(self._draw_after, step_ended)

        def _draw_after(self, step_ended: threading.Event) -> Any:
            step_ended.wait(60)
            return self.draw()

    expected = run(OnThreads(in_a_block), concurrency=1)
    assert run(OnThreads(in_a_block), num_workers=2) == expected
    assert ELSEWHERE not in logged.read_text()
    for num_workers in (1, 2):  # of which one does
        run(OnThreads(random.random), num_workers=num_workers, concurrency=1)
        assert logged.read_text().count(ELSEWHERE) == num_workers


def test_samples_of_an_epoch_that_was_left_are_not_taken_for_threads(logged: Path) -> None:
    """They draw once more when they are cancelled, beside those of the next epoch."""

    class DrawsAtTheEnd(Awaiting):
        async def __getitem__(self, index: int) -> Any:
            first = self.draw()
            try:
                await turns(20 if index else 0)
            finally:
                await turns(3)
                self.draw()
            return index, first, self.draw()

    with left_alone():
        loader = DataLoader(
            DrawsAtTheEnd(random.random),  # type: ignore[arg-type]
            1,
            collate_fn=list,
            num_workers=1,
            concurrency=16,
            persistent_workers=True,
        )
        for _ in range(3):
            next(iter(loader))
        assert len(list(loader)) == LENGTH
    assert ELSEWHERE not in logged.read_text()
