"""What is tried again, how often, how long, and what is raised in the end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import pickle
import random
import weakref

import pytest

from asyncloader.datasets import FetchError, Retries
from asyncloader.datasets.retry import TransientError

AT_ONCE = Retries(tries=4, first_wait_s=0.0, longest_wait_s=0.0)


class Stutter:
    """Fails as often as told, then answers."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.calls = 0

    async def __call__(self) -> str:
        self.calls += 1
        if self.failures:
            raise self.failures.pop(0)
        return "here"


async def test_transient_failures_are_tried_again() -> None:
    """As long as there are tries left, a failure that passes is not seen."""
    attempt = Stutter(*[TransientError("503")] * 3)
    assert await AT_ONCE.run(attempt, "key") == "here"
    assert attempt.calls == 4


async def test_the_last_failure_is_told_when_tries_run_out() -> None:
    """The error names what was fetched, the last failure and the count, has it as cause, and survives pickling."""
    attempt = Stutter(*[TransientError(f"failure {number}") for number in range(9)])
    with pytest.raises(FetchError, match=r"^key 7: failure 3 \(4 tries\)$") as caught:
        await AT_ONCE.run(attempt, "key 7")
    assert isinstance(caught.value.__cause__, TransientError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    with pytest.raises(FetchError, match="1 try"):
        await Retries(tries=1).run(Stutter(TransientError("503")), "key")


@pytest.mark.parametrize("failures", [1, 9])
async def test_nothing_is_kept_of_failures(failures: int) -> None:
    """Their tracebacks have the frames of the tries, and those the client: it goes with them, without a collection."""
    attempt = Stutter(*[TransientError("503") for _ in range(failures)])
    gone = weakref.ref(attempt)
    gc.disable()
    try:
        with contextlib.suppress(FetchError):
            await AT_ONCE.run(attempt, "key")
        del attempt
        assert gone() is None
    finally:
        gc.enable()


async def test_other_exceptions_end_it_at_once() -> None:
    """What trying again cannot help is raised as it is."""
    attempt = Stutter(KeyError("no such row"), TransientError("never reached"))
    with pytest.raises(KeyError, match="no such row"):
        await AT_ONCE.run(attempt, "key")
    assert attempt.calls == 1


async def test_total_time_is_bounded() -> None:
    """A try that hangs, and a server that wants to be left alone for an hour, end when the time is up."""
    brief = Retries(total_s=0.05)
    with pytest.raises(FetchError, match=r"key: did not come within 0\.05 s$"):
        await brief.run(asyncio.Event().wait, "key")
    with pytest.raises(FetchError, match="before that: 429"):
        await brief.run(Stutter(TransientError("429", wait_s=3600)), "key")


async def test_a_timeout_of_the_callers_own_stays_a_timeout() -> None:
    """Only the time of `Retries` becomes a FetchError."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await Retries().run(asyncio.Event().wait, "key")


async def test_waits_are_logged_grow_and_leave_the_global_generator_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Each wait is up to twice as long as the last; random numbers of augmentation do not depend on failures."""
    random.seed(7)
    state = random.getstate()
    with caplog.at_level("INFO", logger="asyncloader.datasets"):
        await Retries(first_wait_s=0.004, longest_wait_s=0.01).run(Stutter(*[TransientError("503")] * 3), "key")
    assert random.getstate() == state
    waits = [record.args[-1] for record in caplog.records]  # type: ignore[index]
    assert [low <= wait <= 2 * low for wait, low in zip(waits, (0.002, 0.004, 0.005), strict=True)] == [True] * 3
    assert caplog.messages[0].startswith("key: 503; try 2 of 6 follows in ")


def test_impossible_settings_are_refused() -> None:
    """Numbers that mean nothing are errors at construction."""
    for wrong in ({"tries": 0}, {"total_s": 0.0}, {"first_wait_s": 2.0, "longest_wait_s": 1.0}):
        with pytest.raises(ValueError, match="cannot be kept to"):
            Retries(**wrong)  # type: ignore[arg-type]
