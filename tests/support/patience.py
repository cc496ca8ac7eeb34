"""How long tests wait for what is certain to happen, on machines that do other things as well."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

from asyncloader import BatchTimeoutError

TRIES = 3
PATIENCE_S = 50.0  # less than pytest waits for a test


def wait_until(condition: Callable[[], Any]) -> None:
    """Wait for what is certain to happen, in another thread or process, to which the processor is left."""
    deadline, pause_s = time.monotonic() + PATIENCE_S, 0.001
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(pause_s)
        pause_s = min(1.1 * pause_s, 0.05)


class Stopwatch:
    """A clock that stands still while the machine keeps a process from running.

    A thread that could run, but has no processor, waits for other programs: Linux counts that time for each thread.
    The sum for all threads of the processes, since the beginning, is taken off. So the time is never longer than for
    a process that has the machine to itself.

    Args:
        pids: The processes; this one, where there are none.
    """

    def __init__(self, *pids: int) -> None:
        self._pids = pids or ("self",)
        self._delays = self._delays_now()
        self._begun = time.monotonic()

    def seconds(self) -> float:
        """Return the time since the beginning."""
        return time.monotonic() - self._begun - self.delayed_s()

    def delayed_s(self) -> float:
        """Return what has been taken off."""
        return sum(delay - self._delays.get(thread, 0) for thread, delay in self._delays_now().items()) / 1e9

    def _delays_now(self) -> dict[str, int]:
        found = {}
        for pid in self._pids:
            for thread in Path(f"/proc/{pid}/task").glob("*/schedstat"):
                with contextlib.suppress(OSError):  # it has ended
                    found[str(thread)] = int(thread.read_text().split()[1])
        return found


async def until(condition: Callable[[], Any]) -> None:
    """Wait for the same without holding up the loop."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def patiently(batches: Iterator[Any]) -> Iterator[Any]:
    """Take what is left of an epoch whose loader has a short timeout: a batch that is later is asked for again."""
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except BatchTimeoutError:
            continue
        yield batch


def hung(batches: Iterator[Any], words: str) -> BatchTimeoutError:
    """Return the error about a batch that hangs, which has these words.

    An error that comes earlier is about a worker that other work on the machine keeps from coming so far.
    """
    while True:
        try:
            batch = next(batches)
        except BatchTimeoutError as error:
            if words in str(error):
                return error
        else:
            raise AssertionError(f"it does not hang: {batch}")


async def patiently_async(batches: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """Take what is left as `patiently` does, by the other face."""
    while True:
        try:
            batch = await anext(batches)
        except StopAsyncIteration:
            return
        except BatchTimeoutError:
            continue
        yield batch
