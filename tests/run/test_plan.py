"""What is read of samplers: torch's batches, from any place, with the states that they had."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, SequentialSampler

from asyncloader import DataLoader
from asyncloader.engine.actions import VOID
from asyncloader.engine.progress import Progress
from asyncloader.errors import LoaderClosedError
from asyncloader.messages.snapshot import Pace
from asyncloader.run.plan import Plan, samplers_within
from asyncloader.stateful import StatefulDataLoader
from tests.run.giving import give
from tests.support import effort


class Counting:
    """A sampler whose iterator is itself, and tells where it is."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.at = 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.at == self.length:
            raise StopIteration
        self.at += 1
        return self.at - 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class BeginsAnew(Counting):
    """A sampler that begins anew when it is iterated over, but right after a state was loaded: as lhotse's."""

    is_loaded = False

    def __iter__(self) -> Iterator[int]:
        if not self.is_loaded:
            self.at = 0
        return self

    def __next__(self) -> int:
        self.is_loaded = False
        return super().__next__()

    def load_state_dict(self, state: dict[str, int]) -> None:
        super().load_state_dict(state)
        self.is_loaded = True


class BeginsAnewWithoutState(BeginsAnew):
    """The same, of which nobody can take a state."""

    state_dict: Any = None


def plan_of(sampler: Any, progress: Progress | None = None) -> Plan:
    """The plan over what torch's loader would iterate over."""
    return Plan(sampler, iter(sampler), progress or Progress(), Pace())


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("length", [0, 1, 6, 7])
def test_batches_are_torchs(length: int, drop_last: bool) -> None:
    """The short one at the end as well; and there is nothing after the end."""
    sampler = BatchSampler(SequentialSampler(range(length)), 3, drop_last)
    progress = Progress()
    plan = plan_of(sampler, progress)
    assert list(plan) == list(sampler)
    assert next(plan, None) is None
    assert progress.read == len(sampler)


@pytest.mark.parametrize("batches", range(5))
def test_a_plan_goes_on_in_the_middle(batches: int) -> None:
    """What comes before is left out; behind the end there is nothing."""
    sampler = BatchSampler(SequentialSampler(range(10)), 3, False)
    plan = plan_of(sampler, Progress(batches))
    plan.resume(None, batches)
    assert list(plan) == list(sampler)[batches:]


@pytest.mark.on_threads
@pytest.mark.parametrize("kind", [BeginsAnew, BeginsAnewWithoutState])
@pytest.mark.parametrize("options", [{"batch_size": None}, {"batch_size": 2}, {"batch_size": 2, "drop_last": True}])
@pytest.mark.parametrize(("loader_class", "num_workers"), [(DataLoader, 0), (DataLoader, 1), (StatefulDataLoader, 0)])
def test_an_iterator_that_begins_anew_is_iterated_over_once(
    kind: type[BeginsAnew],
    options: dict[str, Any],
    loader_class: Any,
    num_workers: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From each batch, whenever the sampler's state was taken last: on a busy machine that may be batches before."""
    whole = 4 if options["batch_size"] else 8

    def batches_of(loader: Any) -> list[Any]:
        return [batch.tolist() if options["batch_size"] else int(batch) for batch in loader]

    def make() -> Any:
        return loader_class(range(8), sampler=kind(8), num_workers=num_workers, **options)

    expected = batches_of(make())
    assert len(expected) == whole
    moments = [(last_state, done) for last_state in range(1, whole) for done in range(last_state, whole)]
    for last_state, done in effort.share(moments, num_workers + len(options), 3 if whole == 8 else 2):
        stopped = make()
        monkeypatch.setattr(Pace, "is_due", lambda pace: stopped.sampler.at <= last_state * (8 // whole))  # noqa: B023
        batches = iter(stopped)
        for _ in range(done):
            next(batches)
        state = stopped.state_dict()
        batches.close()
        resumed = make()
        resumed.load_state_dict(state)
        assert batches_of(resumed) == expected[done:], (last_state, done)


def test_what_was_yielded_out_of_order_is_void() -> None:
    """It keeps its place."""
    progress = Progress(1, {2})
    sampler = BatchSampler(SequentialSampler(range(8)), 2, False)
    plan = plan_of(sampler, progress)
    plan.resume(None, 1)
    assert [*plan] == [[2, 3], VOID, [6, 7]]


def test_states_are_those_after_a_batch() -> None:
    """The last one that is not beyond what is done with, and how many batches were drawn since."""
    progress = Progress()
    plan = plan_of(BatchSampler(Counting(8), 2, False), progress)
    for _ in range(3):
        next(plan)
    for position in range(3):
        state, drawn, _ = progress.sampler_state(progress.now.position)
        if position:
            assert state is not None
            told = state.thaw()["sampler"] or state.thaw()["iterator"]
            assert told["at"] == 2 * (position - drawn)
        give(progress, position)


def test_what_a_sampler_raises_is_raised_and_ends_the_plan() -> None:
    """As torch's BatchSampler, a generator, would have it."""

    class Failing(Counting):
        def __next__(self) -> int:
            if self.at == 3:
                raise KeyError(self.at)
            return super().__next__()

    plan = plan_of(BatchSampler(Failing(8), 2, False))
    assert next(plan) == [0, 1]
    with pytest.raises(KeyError):
        next(plan)
    assert next(plan, None) is None


class Interrupted(Counting):
    """A sampler that a Ctrl-C hits, once, while it is read."""

    def __next__(self) -> int:
        if self.at == 3 and not hasattr(self, "hit"):
            self.hit = True
            raise KeyboardInterrupt
        return super().__next__()


class InterruptedGenerator(Interrupted):
    """The same as a generator, which is finished then."""

    def __iter__(self) -> Iterator[int]:
        while self.at < self.length:
            yield self.__next__()


class InterruptedOnce:
    """The same for a loader, which iterates over its sampler more than once."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.was_hit = False

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        for index in range(self.length):
            if index == 20 and not self.was_hit:
                self.was_hit = True
                raise KeyboardInterrupt
            yield index


@pytest.mark.parametrize("batch_size", [None, 2])
def test_an_interrupt_inside_a_generator_does_not_shorten_the_epoch(batch_size: int | None) -> None:
    """It is finished then, and a batch that was begun lacks indices: the plan says so, each time."""
    sampler = InterruptedGenerator(8)
    plan = plan_of(sampler if batch_size is None else BatchSampler(sampler, batch_size, False))
    with pytest.raises(KeyboardInterrupt):
        list(plan)
    for _ in range(2):
        with pytest.raises(LoaderClosedError, match="KeyboardInterrupt was raised while the sampler was read"):
            next(plan)


def test_an_interrupt_inside_an_iterator_that_goes_on_loses_no_index() -> None:
    """Neither of the batch that was begun."""
    plan = plan_of(BatchSampler(Interrupted(8), 2, False))
    assert next(plan) == [0, 1]
    with pytest.raises(KeyboardInterrupt):
        next(plan)
    assert list(plan) == [[2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="without workers"),
        pytest.param({"num_workers": 2}, id="processes"),
        pytest.param({"num_workers": 2, "worker_backend": "thread"}, id="threads"),
        pytest.param({"num_workers": 1, "persistent_workers": True}, id="persistent"),
    ],
)
def test_a_loader_whose_sampler_was_interrupted_goes_on_from_its_state(options: dict[str, Any]) -> None:
    """What was read before comes first; then the error, whose advice gives all the rest."""
    loader = DataLoader(range(40), 1, sampler=InterruptedOnce(40), **options)
    iterator = iter(loader)
    seen: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        for batch in iterator:
            seen += batch.tolist()
    with pytest.raises(LoaderClosedError, match="load_state_dict"):
        for batch in iterator:
            seen += batch.tolist()
    loader.load_state_dict(loader.state_dict())
    for batch in loader:
        seen += batch.tolist()
    assert seen == [*range(40)]
    loader.close()


def test_samplers_within_are_found_once_from_the_outermost_on() -> None:
    """However they refer to each other."""
    inner = SequentialSampler(range(3))
    outer = BatchSampler(inner, 2, False)
    assert samplers_within(outer) == [outer, inner]
    inner.sampler = outer  # type: ignore[attr-defined]
    assert samplers_within(outer) == [outer, inner]


KEYS = [[0, 1, 2, 3], [4, 5, 6, 7]]
ONCE = {"an iterator": iter, "a map": partial(map, int), "a generator": lambda keys: (key for key in keys)}
"""Batches of keys that can be read once, as torch's loader takes them."""


class InterruptedSamples:
    """Random numbers. An interrupt comes at the third sample, once."""

    def __init__(self, *, is_hit: bool = True) -> None:
        self.is_hit = is_hit

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[int, float]:
        if index == 2 and self.is_hit:
            self.is_hit = False
            raise KeyboardInterrupt
        return index, torch.rand(()).item()


@pytest.mark.parametrize("once", ONCE.values(), ids=ONCE)
def test_keys_that_can_be_read_once_are_there_after_an_interrupt(once: Any) -> None:
    """The batch is made again, whole."""
    iterator = iter(DataLoader(InterruptedSamples(), batch_sampler=map(once, KEYS), collate_fn=list))
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    assert [[index for index, _ in batch] for batch in iterator] == KEYS


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("once", ONCE.values(), ids=ONCE)
def test_keys_that_can_be_read_once_are_counted(once: Any, num_workers: int) -> None:
    """Samples draw by their places in the epoch, as those of lists."""
    made = []
    for batch_sampler in (KEYS, [*map(once, KEYS)]):
        torch.manual_seed(5)
        data = InterruptedSamples(is_hit=False)
        loader = DataLoader(data, batch_sampler=batch_sampler, seeding="sample", num_workers=num_workers)
        made.append([[part.tolist() for part in batch] for batch in loader])
    assert made[0] == made[1]


def test_an_interrupt_inside_of_keys_does_not_shorten_the_batch() -> None:
    """They are finished then: the plan says so, each time."""

    def keys() -> Iterator[int]:
        yield 0
        raise KeyboardInterrupt

    plan = plan_of([keys(), [1]])
    with pytest.raises(KeyboardInterrupt):
        next(plan)
    for _ in range(2):
        with pytest.raises(LoaderClosedError, match="An exception was raised while the sampler was read"):
            next(plan)
