"""What makes batches: keys in, one outcome out, without process, thread, loop or channel."""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch.utils.data import IterableDataset, default_collate

from asyncloader import sample_rng
from asyncloader.messages.failure import CapturedError
from asyncloader.messages.messages import EpochSpec, Kind, WorkerSpec
from asyncloader.messages.snapshot import Frozen, Made, WorkerStart
from asyncloader.seeding import sample_context
from asyncloader.seeding.seeder import Seeder
from asyncloader.worker.batch_maker import BatchMaker
from asyncloader.worker.job import Job

KEY = (11, 0, 0)


@pytest.fixture(autouse=True)
def _nowhere() -> Iterator[None]:
    """Leave the context of the test run as it was."""
    outside = sample_context.current.set(sample_context.SampleContext(Seeder(KEY), 0))
    yield
    sample_context.current.reset(outside)


class Here:
    """A host that has nothing of its own."""

    where = "in a test"
    is_remote = False

    def __init__(self) -> None:
        self.seconds = 0.0
        self.entered: list[tuple[int, Any]] = []

    def cpu_clock(self) -> float:
        self.seconds += 1.0
        return self.seconds

    def enter(self, worker_id: int, spec: WorkerSpec, open_dataset: Callable[[], Any]) -> None:
        self.entered.append((worker_id, open_dataset()))

    def ends(self, error: BaseException) -> bool:
        return not isinstance(error, (Exception, asyncio.CancelledError))

    def capture(self, error: BaseException) -> Any:
        return CapturedError(type(error).__name__, self.where, error=error)

    def collator(self, collate_fn: Callable[[Any], Any]) -> Any:
        return collate_fn


class Plain:
    """Ten times the key; raises what it was told to for some."""

    def __init__(self, **raises: BaseException) -> None:
        self.raises = {int(key[1:]): error for key, error in raises.items()}

    def __getitem__(self, key: int) -> int:
        if key in self.raises:
            raise self.raises[key]
        return key * 10


class Numbers(IterableDataset[int]):
    """So many numbers; has a state; raises in the place of some, as an iterator that can go on."""

    def __init__(self, length: int, bad: tuple[int, ...] = ()) -> None:
        self.length, self.bad, self.at = length, bad, 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.at == self.length:
            raise StopIteration
        self.at += 1
        if self.at - 1 in self.bad:
            raise ValueError(self.at - 1)
        return self.at - 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def make_maker(dataset: Any, starts: dict[int, WorkerStart] | None = None, run: int = 1, **options: Any) -> BatchMaker:
    """Return a maker whose run has begun."""
    spec = WorkerSpec(
        dataset=dataset,
        is_iterable=isinstance(dataset, IterableDataset),
        auto_collation=True,
        collate_fn=list,
        drop_last=False,
        worker_init_fn=None,
        num_workers=1,
        base_seed=5,
        seeds_each_batch=False,
    )
    maker = BatchMaker(0, replace(spec, **options), Here())
    epoch = EpochSpec(run, KEY, starts=starts)
    maker.enter(epoch)
    maker.begin(epoch)
    return maker


def error_of(outcome: Any) -> BaseException:
    """Return what a failure is about."""
    assert outcome.kind == Kind.FAILURE
    return cast("CapturedError", outcome.error).error


def told(outcome: Any) -> list[Any]:
    """Return the keys, or positions in a stream, of bad samples."""
    return [(bad.key, bad.position, bad.error.type_name) for bad in outcome.bad]


# ------------------------------------------------------------------------------------------------------ one by one


def test_a_batch() -> None:
    """Its samples in order, collated, with a record that names the ticket and the run."""
    maker = make_maker(Plain(), run=3)
    outcome = maker.answer(7, [3, 1], waited_s=0.5)
    assert outcome.kind == Kind.BATCH
    assert (outcome.data, outcome.bad, outcome.snapshot) == ([30, 10], (), None)
    record = outcome.record
    assert (record.ticket, record.epoch, record.samples, record.wait_s, record.cpu_s) == (7, 3, 2, 0.5, 1.0)


def test_a_single_key() -> None:
    """Without automatic batching the one sample goes to collate_fn as it is."""
    outcome = make_maker(Plain(), auto_collation=False, collate_fn=str).answer(0, 4)
    assert outcome.kind == Kind.BATCH
    assert (outcome.data, outcome.record.samples) == ("40", 1)


@pytest.mark.parametrize("error", [ValueError("v"), StopIteration(1), asyncio.CancelledError(), KeyError()])
def test_what_a_sample_raises_costs_its_batch(error: BaseException) -> None:
    """And no other; StopIteration and CancelledError of the user's code as well."""
    maker = make_maker(Plain(_2=error))
    assert error_of(maker.answer(0, [1, 2])) is error
    assert maker.answer(1, [1, 3]).kind == Kind.BATCH


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
@pytest.mark.parametrize("on_error", ["raise", "skip", "replace"])
def test_what_a_worker_cannot_go_on_after_is_raised(error: BaseException, on_error: str) -> None:
    """It is no outcome, however bad samples are dealt with."""
    with pytest.raises(type(error)):
        make_maker(Plain(_2=error), on_error=on_error).answer(0, [1, 2])


@pytest.mark.parametrize(
    ("on_error", "data"),
    [("skip", [10, 30]), ("replace", [10, 30, 30])],
)
def test_a_bad_sample(on_error: str, data: list[int]) -> None:
    """Is left out, or another one stands in its place, and it is told with the batch."""
    outcome = make_maker(Plain(_2=OSError()), on_error=on_error).answer(0, [1, 2, 3])
    assert outcome.kind == Kind.BATCH
    assert sorted(outcome.data) == data
    assert told(outcome) == [(2, 1, "OSError")]


def test_no_good_sample() -> None:
    """The batch is left out; where sizes have to stay equal the first error stands in its place. Either is told."""
    first = OSError("first")
    skipped = make_maker(Plain(_1=first, _2=KeyError()), on_error="skip").answer(0, [1, 2])
    replaced = make_maker(Plain(_1=first, _2=KeyError()), on_error="replace").answer(0, [1, 2])
    assert skipped.kind == Kind.LEFT_OUT
    assert error_of(replaced) is first
    assert told(skipped) == told(replaced) == [(1, 0, "OSError"), (2, 1, "KeyError")]


def test_collate_fn_raises_over_a_batch_with_a_bad_sample() -> None:
    """That is the failure of the batch, and the bad sample counts all the same."""

    def collate(samples: list[int]) -> Any:
        raise TypeError(samples)

    outcome = make_maker(Plain(_2=OSError()), on_error="skip", collate_fn=collate).answer(0, [1, 2])
    assert isinstance(error_of(outcome), TypeError)
    assert told(outcome) == [(2, 1, "OSError")]


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_the_end_of_a_stream(on_error: str) -> None:
    """A short batch is the last one, and then there is none, however often one is asked for."""
    maker = make_maker(Numbers(5), on_error=on_error)
    first, second = maker.answer(0, [None] * 3), maker.answer(1, [None] * 3)
    assert first.kind == Kind.BATCH
    assert second.kind == Kind.BATCH
    assert (first.data, second.data, maker.has_ended) == ([0, 1, 2], [3, 4], True)
    assert maker.answer(2, [None] * 3).kind == Kind.EXHAUSTED
    assert maker.answer(3, [None] * 3).kind == Kind.EXHAUSTED


def test_a_short_batch_is_dropped() -> None:
    """With drop_last it is the end at once."""
    assert make_maker(Numbers(2), drop_last=True).answer(0, [None] * 3).kind == Kind.EXHAUSTED


def test_a_bad_sample_of_a_stream() -> None:
    """It has no key, but a place in its batch."""
    outcome = make_maker(Numbers(5, bad=(1,)), on_error="skip").answer(0, [None] * 3)
    assert outcome.kind == Kind.BATCH
    assert (outcome.data, told(outcome)) == ([0, 2], [(None, 1, "ValueError")])


def test_a_generator_that_raised_is_over() -> None:
    """A bad sample would make the epoch silently short: what it raised is raised."""

    class Broken(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            yield 0
            raise OSError

    maker = make_maker(Broken(), on_error="skip")
    assert isinstance(error_of(maker.answer(0, [None] * 2)), OSError)
    assert maker.answer(1, [None] * 2).kind == Kind.EXHAUSTED


# ---------------------------------------------------------------------------------------------------------- seeds


class Draws:
    """Draws from the generators of its place."""

    def __getitem__(self, key: int) -> Any:
        return random.random(), torch.rand(()).item(), sample_rng().random()


def test_seeds_depend_on_the_batch_alone() -> None:
    """Made in any order, by any worker, a batch is the same; without them the worker's streams run on."""
    one, other = make_maker(Draws(), seeds_each_batch=True), make_maker(Draws(), seeds_each_batch=True)
    there = [one.answer(ticket, [0, 1]) for ticket in (0, 1)]
    again = [other.answer(ticket, [0, 1]) for ticket in (1, 0)]
    data = [outcome.data for outcome in (*there, *reversed(again))]
    assert data[:2] == data[2:]
    assert len({number for batch in data[:2] for sample in batch for number in sample}) == 12
    unseeded = make_maker(Draws())
    first, second = (unseeded.answer(0, [0]).data[0] for _ in range(2))
    assert first[0] != second[0]
    assert first[2] == second[2] == data[0][0][2]


def test_the_context_of_the_caller_is_left_as_it_was() -> None:
    """sample_rng() works in collate_fn too, and not outside of a batch."""

    def in_between() -> None:
        maker = make_maker(Plain(), collate_fn=lambda samples: sample_rng().random())
        assert maker.answer(0, [1]).kind == Kind.BATCH
        with pytest.raises(RuntimeError, match="no sample is being fetched"):
            sample_rng()

    contextvars.Context().run(in_between)


# --------------------------------------------------------------------------------------------------------- states


def test_states_come_with_batches() -> None:
    """Each is that after its own batch; the last one, of a dataset that stays, comes with the end."""
    maker = make_maker(Numbers(3), {0: WorkerStart()}, keeps_dataset=True)
    outcomes = [maker.answer(ticket, [None] * 2) for ticket in range(3)]
    states = [cast("Frozen", outcome.snapshot).thaw() for outcome in outcomes]
    assert [state["iterator"] or state["dataset"] for state in states] == [{"at": 2}, {"at": 3}, {"at": 3}]
    assert [state["ended"] for state in states] == [False, True, False]


def test_a_failure_brings_the_state_too() -> None:
    """What was read for it was read."""
    maker = make_maker(Numbers(4), {0: WorkerStart()}, collate_fn=default_collate)
    assert cast("Frozen", maker.answer(0, [None] * 2).snapshot).thaw()["iterator"] == {"at": 2}
    broken = make_maker(Numbers(4), {0: WorkerStart()}, collate_fn=int)
    outcome = broken.answer(0, [None] * 2)
    assert outcome.kind == Kind.FAILURE
    assert cast("Frozen", outcome.snapshot).thaw()["iterator"] == {"at": 2}


def test_a_stream_begins_where_another_worker_was() -> None:
    """At its state, after so many batches, and without those that were made ahead."""
    snapshot = {"dataset": None, "iterator": {"at": 4}, "ended": False}
    maker = make_maker(Numbers(20), {0: WorkerStart(1, snapshot, ahead=(1,))})
    data = [maker.answer(ticket, [None] * 2).data for ticket in range(2)]
    assert data == [[6, 7], [10, 11]]


def test_a_run_that_was_not_begun_is_over_before_the_next() -> None:
    """A dataset that was put in the middle of its data, and left there, begins the next run at the beginning."""

    class Counts(Numbers):
        run = 0

        def __iter__(self) -> Iterator[int]:
            try:
                while self.at < self.length:
                    self.at += 1
                    yield self.run * 100 + self.at
            finally:
                self.run, self.at = self.run + 1, 0

    maker = make_maker(Counts(3), {0: WorkerStart(0, {"dataset": {"at": 2}, "iterator": None, "ended": False})})
    maker.begin(EpochSpec(2, KEY, starts={0: WorkerStart()}))
    assert maker.answer(0, [None] * 3).data == [101, 102, 103]


def test_what_was_made_after_a_state_is_made_again() -> None:
    """At once, with its seeds, aside, and for nobody."""
    asked = []

    class Counts(Plain):
        def __getitem__(self, key: int) -> int:
            asked.append((key, random.random()))
            return key

        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None:
            pass

    def note(entered: list[str]) -> Any:
        @contextmanager
        def aside() -> Iterator[None]:
            entered.append("in")
            yield
            entered.append("out")

        return aside

    first = make_maker(Counts(), seeds_each_batch=True)
    first.answer(4, [1, 2])
    before, entered = list(asked), list[str]()
    asked.clear()
    maker = BatchMaker(0, replace(first.spec), Here(), aside=note(entered))
    maker.begin(EpochSpec(1, KEY, starts={0: WorkerStart(0, None, (), (Made(KEY, 4, [1, 2]),))}))
    assert (asked, entered) == (before, ["in", "out"])


# -------------------------------------------------------------------------------------------------------- opening


def test_nothing_to_work_with() -> None:
    """Why that is answers every ticket."""
    error = OSError("gone")
    maker = BatchMaker(0, error, Here())
    maker.enter(EpochSpec(2, KEY))
    maker.begin(EpochSpec(2, KEY))
    outcome = maker.answer(5, [1])
    raised = error_of(outcome)
    assert (type(raised), raised.args) == (OSError, ("gone",))
    assert raised is not error  # it would keep the frames of whoever it is raised to
    assert (outcome.record.ticket, outcome.record.epoch) == (5, 2)


def test_worker_init_fn_or_the_dataset_raises() -> None:
    """So does that, in any run."""

    def init(worker_id: int) -> None:
        raise KeyError(worker_id)

    class Shut(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            raise PermissionError

    assert isinstance(error_of(make_maker(Plain(), worker_init_fn=init).answer(0, [1])), KeyError)
    assert isinstance(error_of(make_maker(Shut()).answer(0, [1])), PermissionError)


# ------------------------------------------------------------------------------------------------- samples gathered


def gathered(samples: list[Any], errors: dict[int, Exception] | None = None) -> Job:
    """Return a ticket whose samples are here."""
    job = Job(3)
    job.keys, job.samples, job.errors = list(range(100, 100 + len(samples))), samples, dict(errors or {})
    return job


@pytest.mark.parametrize("on_error", ["raise", "skip", "replace"])
def test_gathered_samples_are_dealt_with_alike(on_error: str) -> None:
    """As those that are fetched one by one: with none, some, or only bad ones among them."""
    for bad in ((), (1,), (0, 1, 2)):
        errors: dict[int, Exception] = {position: OSError(str(position)) for position in bad}
        fetching = make_maker(Plain(**{f"_{100 + position}": e for position, e in errors.items()}), on_error=on_error)
        fetched = fetching.answer(3, [100, 101, 102])
        job = gathered([None if position in bad else (100 + position) * 10 for position in range(3)], dict(errors))
        if on_error == "raise" and bad:  # as what overlaps them notes it
            job.fatal_at = min(job.errors)
        outcome = make_maker(Plain(), on_error=on_error).gathered(job)
        assert outcome.kind == fetched.kind
        assert told(outcome) == told(fetched)
        if fetched.kind == Kind.BATCH:
            assert outcome.data == fetched.data
        if fetched.kind == Kind.FAILURE:
            assert error_of(outcome) is error_of(fetched)


def test_what_no_batch_can_be_made_after() -> None:
    """It costs the batch, whatever the samples are, and the ticket refers to it no more."""
    error = OSError()
    job = gathered([1, 2], {0: error, 1: KeyError()})
    job.fatal_at = 0
    assert error_of(make_maker(Plain(), on_error="skip").gathered(job)) is error
    assert (job.samples, job.errors) == (None, {})
