"""The error tree, and the words in it."""

from __future__ import annotations

import errno
import pickle
import signal
from typing import Any

import pytest

import asyncloader
from asyncloader import AsyncLoaderError, BatchTimeoutError, ConfigurationError, WorkerDiedError, WorkerError
from asyncloader.errors import (
    LoaderClosedError,
    WorkerStartError,
    could_not_start,
    describe_death,
    describe_keys,
    died,
    timed_out,
)


@pytest.mark.parametrize(
    ("error", "bases"),
    [
        (ConfigurationError, (AsyncLoaderError, ValueError)),
        (LoaderClosedError, (AsyncLoaderError, RuntimeError)),
        (BatchTimeoutError, (AsyncLoaderError, TimeoutError, RuntimeError)),
        (WorkerError, (AsyncLoaderError, RuntimeError)),
        (WorkerStartError, (WorkerError,)),
        (WorkerDiedError, (WorkerError,)),
    ],
)
def test_errors_are_torchs_and_ours(error: type[Exception], bases: tuple[type[Exception], ...]) -> None:
    """Whoever catches torch's errors catches ours; whoever wants ours alone has one base."""
    assert issubclass(error, bases)
    assert error.__name__ in asyncloader.errors.__doc__


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ([1, 2], "[1, 2]"),
        ((1, 2), "[1, 2]"),
        (7, "7"),
        ("name", "'name'"),
        (["a", ("b", 1)], "['a', ('b', 1)]"),
        (list(range(8)), "[0, 1, 2, 3, 4, 5, 6, 7]"),
        (list(range(1000)), "[0, 1, 2, 3, 4, 5, ..., 999] (1000 indices)"),
        (["x" * 1000], f"['{'x' * 196}...]"),
        ([], "[]"),
    ],
)
def test_keys_are_described_briefly(keys: Any, text: str) -> None:
    """However many there are, and however long."""
    assert describe_keys(keys) == text


@pytest.mark.parametrize(
    ("exitcode", "words"),
    [
        (
            -signal.SIGKILL,
            "DataLoader worker (pid 12) is killed by signal: Killed (SIGKILL). The usual cause is the kern",
        ),
        (
            -signal.SIGSEGV,
            "DataLoader worker (pid 12) is killed by signal: Segmentation fault (SIGSEGV). A native library",
        ),
        (-signal.SIGBUS, "Please try to raise your shared memory limit."),
        (-signal.SIGTERM, "Another process sent it; or the worker closed its connections to the main process"),
        (-200, "DataLoader worker (pid 12) is killed by signal: 200. Another"),
        (3, "DataLoader worker (pid 12) exited unexpectedly with exit code 3."),
        (0, "DataLoader worker (pid 12) exited unexpectedly with exit code 0."),
        (None, "DataLoader worker (pid(s) 12) exited unexpectedly."),
    ],
)
def test_a_death_is_described_in_torchs_words(exitcode: int | None, words: str) -> None:
    """With the likely cause."""
    assert words in describe_death(12, exitcode)


def test_a_death_names_what_it_cost() -> None:
    """Indices, batches behind them, tries, last words."""
    error = died(12, -9, [[1, 2], [3, 4]], 3, "Fatal Python error")
    assert (error.pid, error.exitcode, error.keys, error.output) == (12, -9, [[1, 2], [3, 4]], "Fatal Python error")
    for words in ("indices [1, 2]", "behind it: [3, 4]", "tried 3 times", "Fatal Python error"):
        assert words in str(error)
    assert "indices" not in str(died(12, -9, [], 1, ""))


def test_a_timeout_without_a_worker() -> None:
    """Nobody has the batch: it may not even have been planned."""
    error = timed_out(2.5)
    assert str(error).startswith("DataLoader timed out after 2.5 seconds. No worker has the awaited batch: ")
    assert (error.timeout_s, error.keys, error.pid, error.stack) == (2.5, None, None, "")


@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.EMFILE, "ulimit -n"), (errno.ENFILE, "ulimit -n"), (errno.EAGAIN, "ulimit -u"), (5, "")],
)
def test_a_system_without_room(number: int, words: str) -> None:
    """What to do about it."""
    error = could_not_start(OSError(number, "no"))
    assert isinstance(error, WorkerStartError)
    assert words in str(error)


@pytest.mark.parametrize(
    "error", [died(12, -9, [[1]], 2, "out"), timed_out(1.0, [1], 0, 12, "stack"), LoaderClosedError("x")]
)
def test_errors_can_be_pickled(error: Exception) -> None:
    """They may come to a trainer's parent process, as from a rank to its launcher."""
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))
