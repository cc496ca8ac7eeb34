"""Ask servers before there is a loop, and so that this process can still be forked.

parent:  run_apart(function, urls) ── pickle ──> child: awaits function of each url ── pickle ──> results or error

For what a dataset has to know when it is made: how long its files are. Only obstore needs a child, which takes as long
as importing torch does; where all urls are of other kinds it is a thread. (:mod:`asyncloader.datasets.listing`, for one
call alone, imports nothing of ours.)
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import sys
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from asyncloader.datasets.listing import ask_child
from asyncloader.datasets.retry import FetchError
from asyncloader.datasets.source import Version, kind_of, path_of
from asyncloader.datasets.sources import Access, Sources

T = TypeVar("T")

_CHILD = """
import pickle, sys
sys.path[:] = pickle.load(sys.stdin.buffer)
from asyncloader.datasets.apart import serve
serve()
"""
_AT_ONCE = 32


def run_apart(
    function: Callable[..., Coroutine[Any, Any, T]], urls: Sequence[str], access: Access, *more: Sequence[Any]
) -> list[T]:
    """Return what a coroutine function returns for each url, run where it does this process no harm.

    The first error ends it all, and is raised.

    Args:
        function: A function of this package. Its arguments are Sources, a url, and the url's item of each of `more`.
        urls: The files to ask for.
        access: How the files are reached.
        more: Further arguments, a row each with one item for each url; can be pickled.

    Raises:
        FetchError: A process ended before it had an answer.
    """
    if not urls:
        return []
    calls = list(zip(urls, *more, strict=True))
    if all(kind_of(url) != "store" for url in urls):
        with ThreadPoolExecutor(1) as thread:  # the calling one may have a loop that runs
            return thread.submit(lambda: asyncio.run(_for_each(function, access, calls))).result()
    done = ask_child(_CHILD, (function, access, calls))
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
    call = pickle.load(sys.stdin.buffer)
    answer: tuple[Any, BaseException | None]
    try:
        answer = asyncio.run(_for_each(*call)), None
    except Exception as error:
        answer = None, _bare(error)
    pickle.dump(answer, sys.stdout.buffer)
    sys.stdout.flush()
    os._exit(0)


def versions_of(urls: Sequence[str], access: Access) -> list[Version]:
    """Return the versions that files have now, wherever they lie.

    Raises:
        FileNotFoundError: A file is not there.
        FetchError: A server does not tell the version.
    """
    versions = {url: Version.of_file(path_of(url)) for url in urls if kind_of(url) == "file"}
    away = [url for url in urls if url not in versions]
    versions.update(zip(away, run_apart(Sources.version, away, access), strict=True))
    return [versions[url] for url in urls]


async def _for_each(
    function: Callable[..., Coroutine[Any, Any, T]], access: Access, calls: Sequence[tuple[Any, ...]]
) -> list[T]:
    """Await a function of each url, a bounded number at once."""
    turns = asyncio.Semaphore(_AT_ONCE)

    async def one(call: tuple[Any, ...]) -> T:
        async with turns:
            return await function(sources, *call)

    async with contextlib.aclosing(Sources(access)) as sources:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(call)) for call in calls]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def _bare(error: Exception) -> Exception:
    """Return an error as it can be pickled: without causes of other libraries' classes."""
    error.__cause__ = error.__context__ = None
    with contextlib.suppress(Exception):
        pickle.loads(pickle.dumps(error))
        return error
    return FetchError(f"{type(error).__name__}: {error}")
