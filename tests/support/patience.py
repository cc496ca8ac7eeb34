"""How long tests wait for what is certain to happen, on machines that do other things as well."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
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
