"""A user's script, run until it begins to read from a loader, or until some of its steps have been timed."""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch.utils.data

from asyncloader.cli.measure import Patience
from asyncloader.loader import DataLoader

_LONGEST_S = 20.0  # of timing steps
_TORCHS = torch.utils.data.DataLoader


class _Found(BaseException):
    """Ends the script, with the loader and the seconds of a step; not an Exception, which scripts catch."""


class _Timed(Iterator[Any], AsyncIterator[Any], AbstractContextManager[Any], AbstractAsyncContextManager[Any]):
    """Batches of a script's loader, for some steps.

    Args:
        loader: The loader that the script iterates over.
        batches: Its batches.
        steps: How many steps are timed.
    """

    def __init__(self, loader: torch.utils.data.DataLoader[Any], batches: Any, steps: int) -> None:
        self._loader = loader
        self._batches = batches
        self._left = steps
        self._times: list[float] = []
        self._given_at: float | None = None
        self._until = time.perf_counter() + _LONGEST_S

    def __next__(self) -> Any:
        self._end_step()
        try:
            with Patience():
                batch = next(self._batches)
        except StopIteration:
            self._stop()
        self._given_at = time.perf_counter()
        return batch

    async def __anext__(self) -> Any:
        self._end_step()
        try:
            with Patience():
                batch = await anext(self._batches)
        except StopAsyncIteration:
            self._stop()
        self._given_at = time.perf_counter()
        return batch

    def _end_step(self) -> None:
        now = time.perf_counter()
        if self._given_at is not None:
            self._times.append(now - self._given_at)
        if len(self._times) == self._left or now > self._until:
            self._stop()

    def __exit__(self, *exc: object) -> None:
        self._batches.close()

    async def __aexit__(self, *exc: object) -> None:
        await self._batches.aclose()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_batches"], name)

    def _stop(self) -> None:
        if hasattr(self._batches, "close"):
            self._batches.close()
        del self._batches
        raise _Found(self._loader, statistics.median(self._times) if self._times else None)


@contextlib.contextmanager
def first_loader(
    script: Path, arguments: Sequence[str], *, steps: int
) -> Iterator[tuple[torch.utils.data.DataLoader[Any] | None, float | None]]:
    """Run a script until so many of its steps were timed.

    The script's output goes to stderr. Everything that the script does before its first batch is done. Inside the block
    the script is the main module, with its arguments: workers that are not forked import it.

    Args:
        script: The file.
        arguments: The script's arguments, for ``sys.argv``.
        steps: How many of its steps are timed.

    Yields:
        The loader, None if the script has ended without asking one; and how long a step takes, the median, in seconds,
        None if none was timed.
    """
    main, argv, path = sys.modules["__main__"], sys.argv, sys.path[:]
    module = ModuleType("__main__")
    module.__file__ = str(script.resolve())
    sys.modules["__main__"] = module
    sys.argv = [str(script), *arguments]
    sys.path[:0] = [str(script.parent.resolve())]
    found: Any = None, None
    try:
        with _timing(steps), contextlib.redirect_stdout(sys.stderr):
            exec(compile(script.read_bytes(), module.__file__, "exec"), module.__dict__)
    except _Found as error:
        found = error.args
    except SystemExit:
        pass
    try:
        yield found
    finally:
        sys.modules["__main__"], sys.argv, sys.path[:] = main, argv, path


@contextlib.contextmanager
def _timing(steps: int) -> Iterator[None]:
    """Have all loaders time their steps."""
    own = _TORCHS.__iter__, DataLoader.__iter__, DataLoader.__aiter__
    inside = False

    def begin(loader: Any) -> Any:
        nonlocal inside
        if inside:  # ours calls torch's
            return own[0](loader)
        inside = True
        try:
            return _Timed(loader, own[isinstance(loader, DataLoader)](loader), steps)
        finally:
            inside = False

    def abegin(loader: Any) -> Any:
        return _Timed(loader, own[2](loader), steps)

    patch = mock.patch.object
    with (
        patch(_TORCHS, "__iter__", begin),
        patch(DataLoader, "__iter__", begin),
        patch(DataLoader, "__aiter__", abegin),
    ):
        yield
