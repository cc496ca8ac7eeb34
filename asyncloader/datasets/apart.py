"""Ask servers before there is a loop, and so that this process can still be forked.

parent:  run_apart(function, urls) ── pickle ──> child: asyncio.run(function(urls)) ── pickle ──> result or error

For what a dataset has to know when it is made: how long its files are. Only obstore needs a child, which takes as long
as importing torch does; where all urls are of other kinds it is a thread. (:mod:`asyncloader.datasets.listing`, for one
call alone, imports nothing of ours.)
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import cloudpickle

from asyncloader.datasets.retry import FetchError
from asyncloader.datasets.streams import Access, Sources, Version, kind_of, path_of

T = TypeVar("T")

_CHILD = """
import pickle, sys
sys.path[:] = pickle.load(sys.stdin.buffer)
from asyncloader.datasets.apart import serve
serve()
"""
_AT_ONCE = 32


def run_apart(function: Callable[..., Coroutine[Any, Any, T]], urls: Sequence[str], *args: Any) -> T:
    """Return what a coroutine function returns, run where it does this process no harm; raise what it raises.

    Args:
        function: One of the package's, importable by its name.
        urls: What it asks for, its first argument.
        args: The others; can be pickled.

    Raises:
        FetchError: A process ended before it had an answer.
    """
    if all(kind_of(url) != "store" for url in urls):
        with ThreadPoolExecutor(1) as thread:  # the calling one may have a loop that runs
            return thread.submit(lambda: asyncio.run(function(urls, *args))).result()
    request = pickle.dumps(sys.path) + cloudpickle.dumps((function, (urls, *args)))
    done = subprocess.run([sys.executable, "-c", _CHILD], input=request, capture_output=True, check=False)
    if done.returncode:
        said = done.stderr.decode()[-2000:]
        raise FetchError(f"a process that asked the servers ended with code {done.returncode}: {said}")
    result, error = pickle.loads(done.stdout)
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


def serve() -> None:
    """Answer the request on standard input, in the child, and end at once.

    An interpreter that ends as ever, while threads of obstore's are at work, is aborted now and then.
    """
    function, args = pickle.load(sys.stdin.buffer)
    answer: tuple[Any, BaseException | None]
    try:
        answer = asyncio.run(function(*args)), None
    except Exception as error:
        answer = None, _bare(error)
    pickle.dump(answer, sys.stdout.buffer)
    sys.stdout.flush()
    os._exit(0)


def versions_of(urls: Sequence[str], access: Access) -> list[Version]:
    """Return the versions that files have now, wherever they lie.

    Raises:
        FileNotFoundError: One is not there.
        FetchError: It cannot be found out.
    """
    versions = {url: Version.of_file(path_of(url)) for url in urls if kind_of(url) == "file"}
    if away := [url for url in urls if url not in versions]:
        versions.update(zip(away, run_apart(_versions, away, access), strict=True))
    return [versions[url] for url in urls]


@contextlib.asynccontextmanager
async def opened(access: Access) -> AsyncGenerator[Sources, None]:
    """Open clients for a while."""
    sources = Sources(access)
    try:
        yield sources
    finally:
        await sources.close()


async def for_each(function: Callable[[Any], Coroutine[Any, Any, T]], items: Sequence[Any]) -> list[T]:
    """Await a function of each item, a bounded number at once; the first error ends all."""
    turns = asyncio.Semaphore(_AT_ONCE)

    async def one(item: Any) -> T:
        async with turns:
            return await function(item)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(item)) for item in items]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def _versions(urls: Sequence[str], access: Access) -> list[Version]:
    async with opened(access) as sources:
        return await for_each(sources.version, urls)


def _bare(error: Exception) -> Exception:
    """Return an error as it can be pickled: without causes of other libraries' classes."""
    error.__cause__ = error.__context__ = None
    with contextlib.suppress(Exception):
        pickle.loads(pickle.dumps(error))
        return error
    return FetchError(f"{type(error).__name__}: {error}")
