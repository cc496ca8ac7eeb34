"""What becomes of a batch whose samples come in any order, without any I/O."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from asyncloader.messages.messages import WorkerSpec
from asyncloader.worker.job import Job
from asyncloader.worker.overlap import Overlap
from asyncloader.worker.thread_fetcher import ThreadFetcher
from tests.support import effort
from tests.support.patience import until
from tests.worker.fetching import maker_of

SPEC = WorkerSpec(None, False, True, list, False, None, 1, 0, False, is_async=True, samples_at_once=100)
KINDS: dict[str, type[BaseException] | None] = {
    "good": None,
    "bad": ValueError,
    "cancelled": asyncio.CancelledError,
    "exit": SystemExit,
}


def is_exit(error: BaseException) -> bool:
    """Whether it ends the worker."""
    return isinstance(error, SystemExit)


class ByHand(Overlap):
    """All samples are asked for at once, and come when the test says so."""

    def _fill(self) -> None:
        while self._waiting:
            job = self._waiting.popleft()
            job.started = job.count
            job.pending = dict.fromkeys(range(job.count))


@settings(max_examples=effort.examples(200), deadline=None)
@given(
    kinds=st.lists(st.sampled_from([*KINDS, "good", "bad"]), min_size=1, max_size=6),
    on_error=st.sampled_from(["raise", "skip"]),
    data=st.data(),
)
def test_the_first_error_of_a_batch_stands_for_it(kinds: list[str], on_error: Any, data: st.DataObject) -> None:
    """Whatever comes first, and told once; but what ends the worker is told at once, and nothing after it."""
    order = data.draw(st.permutations(range(len(kinds))))
    finished: list[Job] = []
    stopped: list[BaseException] = []
    came: list[int] = []

    async def run() -> None:
        spec = replace(SPEC, on_error=on_error)
        overlap = ByHand(maker_of(spec, is_exit), finished.append, stopped.append)
        overlap.add(0, list(range(len(kinds))))
        (job,) = overlap._jobs.values()
        for position in order:
            if position not in job.pending:  # was cancelled, as a sample before it costs the batch
                continue
            kind = KINDS[kinds[position]]
            overlap._take(job, position, position, None if kind is None else kind(position))
            came.append(position)
            assert all(other < min(job.fatal_at, len(kinds)) for other in job.pending)
            if stopped or overlap.is_idle:
                break

    asyncio.run(run())
    costing = [at for at, kind in enumerate(kinds) if kind != "good" and (kind != "bad" or on_error == "raise")]
    if kinds[came[-1]] == "exit":
        assert [type(error) for error in stopped] == [SystemExit]
        assert not finished
        return
    (job,) = finished
    if costing:
        assert (type(job.errors[job.fatal_at]), job.fatal_at) == (KINDS[kinds[costing[0]]], costing[0])
        assert set(range(costing[0] + 1)) <= set(came)
    else:
        assert job.fatal_at not in job.errors
        assert sorted(job.errors) == [at for at, kind in enumerate(kinds) if kind == "bad"]
        assert [at for at in job.samples if at is not None] == [at for at, kind in enumerate(kinds) if kind == "good"]


def test_a_batch_without_samples_is_there_at_once() -> None:
    """Nothing comes that could finish it."""
    finished: list[Job] = []

    async def run() -> None:
        ByHand(maker_of(SPEC, is_exit), finished.append, pytest.fail).add(0, [])

    asyncio.run(run())
    assert [job.samples for job in finished] == [[]]


def test_samples_that_were_not_asked_for_are_left_out_of_a_batch_that_is_lost() -> None:
    """Where there are fewer slots than samples: nobody waits for them."""
    finished: list[Job] = []

    class OneByOne(Overlap):
        def _fill(self) -> None:
            for job in self._waiting:
                if not job.pending:
                    job.pending[job.started] = None
                    job.started += 1

    async def run() -> None:
        overlap = OneByOne(maker_of(SPEC, is_exit), finished.append, pytest.fail)
        overlap.add(0, [0, 1])
        (job,) = overlap._jobs.values()
        overlap._take(job, 0, None, ValueError(0))

    asyncio.run(run())
    assert [job.fatal_at for job in finished] == [0]


def test_a_batch_begins_when_a_thread_takes_its_first_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not when that was put into the queue."""
    monkeypatch.setattr("asyncloader.worker.thread_fetcher.perf_counter", lambda: 7.0)
    finished: list[Job] = []

    async def run() -> None:
        spec = replace(SPEC, is_async=False, samples_at_once=1)
        fetcher = ThreadFetcher(range(4), maker_of(spec, is_exit), finished.append, pytest.fail)
        fetcher.add(0, [1, 2])
        await until(lambda: finished)
        await fetcher.aclose()

    asyncio.run(run())
    assert [(job.began, job.samples) for job in finished] == [(7.0, [1, 2])]
