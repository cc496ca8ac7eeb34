"""Streams without any I/O: what iterators say when they are dropped, and datasets that are taken through runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import assume, given, settings

from asyncloader.engine.tracks import Track
from asyncloader.messages.messages import WorkerSpec
from asyncloader.messages.snapshot import Frozen, Keeper, WorkerStart
from asyncloader.worker.job import Job
from asyncloader.worker.stream import Stream
from tests.support import effort
from tests.worker.fetching import maker_of

SPEC = WorkerSpec(None, True, True, list, False, None, 1, 0, False, is_async=True)

# ------------------------------------------------------------------------------------------------------- what is told


class Scripted:
    """An async iterable that does one thing after the other, and ends when it is cancelled, or goes on."""

    def __init__(self, script: list[str], stubborn: bool) -> None:
        self.script = script
        self.stubborn = stubborn
        self.is_cancelled = False

    async def __aiter__(self) -> AsyncIterator[Any]:
        for number, step in enumerate(self.script):
            try:
                await asyncio.sleep(0)
            except asyncio.CancelledError:
                if not self.stubborn:
                    return
            if step == "exit":
                raise SystemExit
            yield self.later(number, step)

    async def later(self, number: int, step: str) -> int:
        for _ in range(number % 3):
            await asyncio.sleep(0)
        if step == "exit later":
            raise SystemExit
        return number


@settings(max_examples=effort.examples(150), deadline=None)
@given(
    script=st.lists(st.sampled_from(["sample", "sample", "sample", "exit", "exit later"]), max_size=8),
    stubborn=st.booleans(),
    concurrency=st.integers(1, 4),
    batch_size=st.integers(1, 3),
    drop_after=st.none() | st.integers(0, 25),
)
def test_an_end_is_told_of_data_that_have_ended(
    script: list[str], stubborn: bool, concurrency: int, batch_size: int, drop_after: int | None
) -> None:
    """Not of an iterator that has raised what ends the worker, nor of one that was dropped; and after everything."""
    finished: list[list[int]] = []
    told: list[int] = []
    over: list[str] = []

    async def run() -> None:
        def on_finished(job: Job) -> None:
            assert not over
            assert not told
            finished.append(job.samples)

        def stop(error: BaseException) -> None:
            over.append("dying")
            stream.drop()

        def on_exhausted(ticket: int) -> None:
            assert not over
            assert not told
            told.append(ticket)

        stream = Stream(
            Scripted(script, stubborn),
            (
                maker_of(replace(SPEC, samples_at_once=concurrency), lambda error: isinstance(error, SystemExit)),
                on_finished,
                stop,
            ),
            on_exhausted,
        )
        for ticket in range(10):
            stream.add(ticket, [None] * batch_size)
        for turn in range(60):
            if turn == drop_after and not over:
                over.append("dropped")
                stream.drop()
            await asyncio.sleep(0)
        await stream.aclose()

    asyncio.run(run())
    if not over:
        assert told == [len(finished)]
        assert sorted(number for batch in finished for number in batch) == list(range(len(script)))
    assert bool(told) <= ("exit" not in script and "exit later" not in script)


class Raising:
    """An async iterator that raises in place of some samples and goes on, unless it is over by that, as a generator is.

    Samples are awaitables, the first of which take longest.
    """

    def __init__(self, length: int, raises_at: set[int], *, goes_on: bool) -> None:
        self.numbers = iter(range(length))
        self.raises_at = raises_at
        self.goes_on = goes_on

    def __aiter__(self) -> AsyncIterator[Any]:
        return self if self.goes_on else self._generated()

    async def _generated(self) -> AsyncIterator[Any]:
        with contextlib.suppress(StopAsyncIteration):
            while True:
                yield await anext(self)

    async def __anext__(self) -> Any:
        for number in self.numbers:
            if number in self.raises_at:
                raise KeyError(number)
            return self.later(number)
        raise StopAsyncIteration

    async def later(self, number: int) -> int:
        for _ in range(9 - number):
            await asyncio.sleep(0)
        return number


@settings(max_examples=effort.examples(150), deadline=None)
@given(
    length=st.integers(0, 9),
    raises_at=st.sets(st.integers(0, 8), max_size=3),
    goes_on=st.booleans(),
    tolerated=st.booleans(),
    concurrency=st.integers(1, 4),
    batch_size=st.integers(1, 4),
)
def test_what_an_iterator_raises_is_told_in_its_batch(
    length: int, raises_at: set[int], goes_on: bool, tolerated: bool, concurrency: int, batch_size: int
) -> None:
    """It costs the batch, whose samples are those before it, or a sample where that is tolerated, and nothing else."""
    finished: list[Job] = []
    told: list[int] = []

    async def run() -> None:
        spec = replace(SPEC, samples_at_once=concurrency, on_error="skip" if tolerated else "raise")
        overlap_run = maker_of(spec, lambda _: False), finished.append, pytest.fail
        stream = Stream(Raising(length, raises_at, goes_on=goes_on), overlap_run, told.append)
        for ticket in range(12):
            stream.add(ticket, [None] * batch_size)
        for _ in range(300):
            await asyncio.sleep(0)
        await stream.aclose()

    asyncio.run(run())
    seen: list[int | str] = []
    for job in finished:
        is_fatal = job.fatal_at in job.errors
        assert is_fatal == bool(job.errors and not (tolerated and goes_on))
        samples = [number for at, number in enumerate(job.samples) if at not in job.errors]
        seen += samples
        seen += [f"raised {error.args[0]}" for _, error in sorted(job.errors.items())]
        assert len(samples) + len(job.errors) <= batch_size
    expected: list[int | str] = []
    for number in range(length):
        expected.append(f"raised {number}" if number in raises_at else number)
        if number in raises_at and not goes_on:
            break
    assert sorted(map(str, seen)) == sorted(map(str, expected))
    assert told == [len(finished)]


# --------------------------------------------------------------------------------------------------------- other runs


class CountsAtTheBeginning:
    """Counts its runs when one begins, unless it has just been given a state."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.run, self.at = -1, 0
        self.resumed = False

    def __iter__(self) -> Iterator[int]:
        if not self.resumed:
            self.run, self.at = self.run + 1, 0
        self.resumed = False
        while self.at < self.length:
            self.at += 1
            yield self.run * 100 + self.at

    def state_dict(self) -> dict[str, int]:
        return {"run": self.run, "at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.run, self.at, self.resumed = state["run"], state["at"], True


class CountsAtTheEnd(CountsAtTheBeginning):
    """Counts them when one is over, however."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.run = 0

    def __iter__(self) -> Iterator[int]:
        try:
            while self.at < self.length:
                self.at += 1
                yield self.run * 100 + self.at
        finally:
            self.run, self.at = self.run + 1, 0


def test_a_run_that_was_not_begun_is_over_before_the_next() -> None:
    """A dataset that was put in the middle of its data, and left there, begins the next run at the beginning."""
    dataset = CountsAtTheEnd(5)
    state = {"dataset": {"run": 3, "at": 2}, "iterator": None, "ended": False}

    async def run() -> None:
        run = maker_of(SPEC, bool), print, print
        stream = Stream(dataset, run, print, keeper=Keeper(dataset, 1, WorkerStart(0, state)))
        await stream.aclose(runs_on=True)

    asyncio.run(run())
    assert (dataset.run, dataset.at) == (4, 0)


async def test_the_loop_has_its_turns_while_a_stream_is_read_over() -> None:
    """A worker that reads what was made before it is told to end meanwhile."""
    read: list[int] = []

    class Long:
        def __iter__(self) -> Iterator[int]:
            for number in range(10_000):
                read.append(number)
                yield number

    dataset = Long()
    stream = Stream(dataset, (maker_of(SPEC, bool), print, print), print, keeper=Keeper(dataset, 1, WorkerStart(1000)))
    stream.add(1000, [None])
    while not read:  # noqa: ASYNC110 - no longer than until its next turn
        await asyncio.sleep(0)
    await stream.aclose()
    assert len(read) < 1000


class Worker:
    """Reads batches of a stream, one run after the other, with its state kept."""

    def __init__(self, dataset: CountsAtTheBeginning, every: int, batch_size: int) -> None:
        self.dataset = dataset
        self.every = every
        self.batch_size = batch_size

    def begin(self, start: WorkerStart) -> None:
        """Begin a run there."""
        self.iterator: Any = None  # the one of the run before is closed
        self.keeper = Keeper(self.dataset, self.every, start)
        self.iterator = iter(self.dataset)
        self.has_ended = self.keeper.attach(self.iterator)
        for _ in range(self.keeper.gap()):
            self.read()

    def read(self) -> list[int]:
        """Read a batch; none at the end of the data."""
        batch = [] if self.has_ended else list(islice(self.iterator, self.batch_size))
        self.has_ended = self.has_ended or len(batch) < self.batch_size
        return batch

    def make(self, track: Track, ticket: int) -> list[int]:
        """Read a batch, and note on the track where the worker is, as the session does."""
        track.given(ticket)
        if batch := self.read():
            snapshot = self.keeper.take(ended=self.has_ended)
            track.answered(ticket, None if isinstance(snapshot, Frozen) and snapshot.ended else snapshot)
        return batch


@settings(max_examples=effort.examples(150), deadline=None)
@given(
    kind=st.sampled_from([CountsAtTheBeginning, CountsAtTheEnd]),
    length=st.integers(0, 7),
    every=st.integers(1, 4),
    batch_size=st.integers(1, 3),
    runs=st.lists(st.none() | st.integers(0, 4), max_size=4),
    made=st.integers(0, 4),
)
def test_another_worker_goes_on_as_the_one_before(
    kind: type[CountsAtTheBeginning], length: int, every: int, batch_size: int, runs: list[int | None], made: int
) -> None:
    """Through runs that were read to the end (None), or left after so many batches, and lost in the middle of one.

    In a later run only from a state that was told in it.
    """
    survivor = Worker(kind(length), every, batch_size)
    for left_after in runs:
        track = Track(WorkerStart())
        survivor.begin(WorkerStart())
        ticket = 0
        while ticket != left_after and survivor.make(track, ticket):
            ticket += 1
    track = Track(WorkerStart())
    survivor.begin(WorkerStart())
    for ticket in range(made):
        survivor.make(track, ticket)
    assume(track.start.snapshot is not None or not runs)
    successor = Worker(kind(length), every, batch_size)
    successor.begin(track.start)
    for _ in range(3):  # this run, and two more
        while batch := survivor.read():
            assert successor.read() == batch
        assert not successor.read()
        survivor.begin(WorkerStart())
        successor.begin(WorkerStart())
