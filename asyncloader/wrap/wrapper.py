"""Loaders around loaders: the protocol, and what all wrappers have in common.

    LoaderWrapper ── iter ──> IteratorWrapper ── next ──> the batch that comes first
         │                        │    held: batches that were pulled ahead, each with the state before it
       loader ────── iter ──> its iterator

A loader, to a wrapper, is anything that can be iterated over, by ``for`` or by ``async for``. Whatever else the loader
has (``__len__``, ``set_epoch``, ``stats``, ``close``, ``dataset``, ``batch_size``, ...) the wrapper has too. Of an
iterator, a wrapper asks two more things if the iterator has them:

- ``state_dict()``, or else that of its loader. A batch that is held was given by the iterator, but not to training. So
  the wrapper takes the state before each batch, and its own state is the one before the first batch that it holds.
- ``is_ready()``: whether the next batch is there. A batch that is not there is not waited for ahead. Iterators that
  cannot say are waited for.
"""

from __future__ import annotations

import asyncio
import copy
import os
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, TypeVar, cast

from asyncloader.errors import LoaderClosedError
from asyncloader.protocols import answers_of
from asyncloader.run.base_iterator import ASYNC_FOR, FOR, ClosableIterator, check_face, check_owner

T_co = TypeVar("T_co", covariant=True)


def _nobody() -> None:
    """Stand for an iterator that is not there."""


class IteratorWrapper(ClosableIterator):
    """An iterator around another one. By itself it only takes batches ahead; others say what becomes of each.

    Several threads may take batches from one, or several tasks of one loop: each batch goes to exactly one of them. As
    with our own iterators, the first call of a run decides whether it is read by ``for`` or by ``async for``. An
    interrupt, or a task that is cancelled, while a batch is waited for or worked on, loses no batch.

    Args:
        inner: The iterator within.
        prefetch: How many batches are taken ahead, of those that are ready.
        takes_states: Take the state of the iterator before each batch, if it has one.

    Attributes:
        source: What has the state: the iterator within, or its loader.
        held: The batches that were taken of the iterator and not given: what `receive` has made of each, and the error
            that is raised in its place, or None. At the end of the data the error is StopAsyncIteration.
        states: The state before each of these, and before the batch that is being taken; None where none is taken.
        over: Makes what is raised from now on, when the data are at their end, or this was closed; None before.
        on_end: Is called when it is over.
    """

    on_end: Callable[[], object] = staticmethod(_nobody)
    source: Any

    def __init__(self, inner: Any, prefetch: int = 0, *, takes_states: bool = True) -> None:
        self._inner = self.source = inner
        self._feed = answers_of(inner)
        self._prefetch = prefetch
        self._takes_states = takes_states
        self._pid = os.getpid()
        self._turn, self._turn_of_tasks = threading.Lock(), asyncio.Lock()
        self._in_async_for = False
        self.held: deque[tuple[Any, BaseException | None]] = deque()
        self.states: deque[Any] = deque()
        self._taken: list[Any] = []  # the batch that `receive` is at
        self._after_end: list[Any] = []  # the state after the end, if that was taken ahead of another iterator's begin
        self.begin()

    # ------------------------------------------------------------------------------------------ what a wrapper may do

    def begin(self) -> None:
        """Begin a run: at the beginning, and when the iterator within has begun another one."""
        self.held.clear()
        self.states.clear()
        self._taken.clear()
        self._after_end.clear()
        self._face = ""  # the first call decides
        self.over: Callable[[], BaseException] | None = None

    async def prepare(self) -> None:
        """Do what is due before the next batch is given: at the end, one is held at least."""
        if not self.held:
            await self.pull()
        while len(self.held) <= self._prefetch and _is_ready(self._inner):
            await self.pull()

    def receive(self, batch: Any) -> Any:
        """Return what is made of a batch that was taken. Whoever is interrupted here does it again."""
        return batch

    def give(self, received: Any) -> Any:
        """Return the batch for training of what `receive` has made of it."""
        return received

    def advance(self) -> None:
        """Note that the first batch that is held was given."""
        del self.held[0], self.states[0]

    # ------------------------------------------------------------------------------------------------------ iterating

    def __next__(self) -> Any:
        self._enter(FOR)
        with self._turn:
            self._in_async_for = False
            try:
                self._step().send(None)
            except StopIteration as done:  # whatever `_step` awaits here has blocked this thread, and is there
                return done.value
            except StopAsyncIteration:
                raise StopIteration from None
            raise RuntimeError("a wrapper has awaited something in a `for` loop, which has no event loop")

    async def __anext__(self) -> Any:
        self._enter(ASYNC_FOR)
        async with self._turn_of_tasks:
            self._in_async_for = True
            return await self._step()

    def _enter(self, face: str) -> None:
        """Look whether a call may go on, by this face. Before the lock: a fork has not the thread that may hold it."""
        check_owner(self._pid)
        check_face(self._face, face)
        self._face = face

    async def _step(self) -> Any:
        if self.over is None:
            await self.prepare()
        if self.over is not None:  # also where it was closed in another thread meanwhile
            raise self.over()
        received, error = self.held[0]
        batch = self.give(received) if error is None else None
        self.advance()
        if error is None:
            return batch
        if isinstance(error, StopAsyncIteration):
            self.end(StopAsyncIteration)
            self.states.clear()
            self.states.extend(self._after_end)
        try:
            raise error
        finally:
            del error  # a traceback that refers to this frame would keep the iterator alive

    async def pull(self) -> None:
        """Take the next batch of the iterator within, and hold it; or the error in its place, or the end."""
        if len(self.states) == len(self.held):  # otherwise somebody was interrupted in here
            has_state = self._takes_states and hasattr(self.source, "state_dict")
            self.states.append(self.source.state_dict() if has_state else None)
        try:
            if not self._taken:
                self._taken.append(await self._take())
            received, raised = self.receive(self._taken[0]), None
        except Exception as error:
            received, raised = None, _without_our_frames(error)
        self._taken.clear()
        self.held.append((received, raised))
        del raised

    def keep_state_after_end(self) -> None:
        """Take the state after the end, if that is held: another iterator begins, of which the loader speaks then."""
        has_end = any(isinstance(error, StopAsyncIteration) for _, error in tuple(self.held))
        if has_end and not self._after_end and _first(self.states) is not None:
            self._after_end[:] = [self.source.state_dict()]

    async def _take(self) -> Any:
        if self._in_async_for:
            return await anext(self._inner)
        for batch in self._feed:
            return batch
        raise StopAsyncIteration

    # ------------------------------------------------------------------------------------------------- the rest of it

    def is_ready(self) -> bool:
        """Whether the next batch is there."""
        return bool(self.held) or _is_ready(self._inner)

    @property
    def state_dict(self) -> Callable[[], Any]:
        """Returns the state as of the batches that were given. It is not there if there is none within."""
        return partial(_state, self.states, self.source.state_dict)

    def end(self, over: Callable[[], BaseException]) -> None:
        """Give nothing any more, and let go of what is held. States stay those of the batches that were given."""
        self.over = self.over or over
        self.held.clear()
        self._taken.clear()
        self.on_end()

    def leave(self) -> None:
        """End the run as `close` does, without waiting for the iterator within."""
        self.end(partial(LoaderClosedError, "this iterator was closed; call iter(loader) for a new one"))

    def close(self) -> None:
        """End the run and let go of everything."""
        self.leave()
        if hasattr(self._inner, "close"):
            self._inner.close()

    async def aclose(self) -> None:
        """End the run as `close` does, without blocking the loop."""
        self.leave()
        if hasattr(self._inner, "aclose"):
            await self._inner.aclose()

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class LoaderWrapper(Generic[T_co]):
    """A loader around another one: its iterators are around those of that loader.

    Args:
        loader: Any loader, or wrapper, or iterable, asynchronous ones too.
        wrap: Makes the iterator around another one, or returns that other one.

    Example:
        >>> class Halved(IteratorWrapper):
        ...     def receive(self, batch):
        ...         return batch / 2
        >>> loader = LoaderWrapper(DataLoader(dataset, num_workers=2), Halved)
    """

    def __init__(self, loader: Any, wrap: Callable[[Any], Any]) -> None:
        self.loader = loader
        self._wrap = wrap
        # The states of iterators that are there and not at their ends; of the last one in any case, as after a `break`.
        self._states: dict[weakref.ref[IteratorWrapper], deque[Any]] = {}

    def __iter__(self) -> Iterator[T_co]:
        return cast(Iterator[T_co], self._begin(iter))

    def __aiter__(self) -> AsyncIterator[T_co]:
        return cast(AsyncIterator[T_co], self._begin(aiter))

    def _begin(self, begin: Callable[[Any], Any]) -> Any:
        for each in self._alive():
            if each.over is None:
                each.keep_state_after_end()
        inner = begin(self.loader)
        for reference in tuple(self._states):
            if (iterator := reference()) is not None and iterator._inner is inner:
                iterator.begin()  # with persistent workers, one iterator begins run after run
                return iterator
            if iterator is None or iterator.over is not None:
                del self._states[reference]
        iterator = self._wrap(inner)
        if iterator is not inner:
            iterator.source = inner if hasattr(inner, "state_dict") else self.loader
            drop = partial(_drop, self._states)
            reference = weakref.ref(iterator, drop)
            self._states[reference], iterator.on_end = iterator.states, partial(drop, reference)
        return iterator

    def _alive(self) -> list[IteratorWrapper]:
        return [iterator for each in tuple(self._states) if (iterator := each()) is not None]

    @property
    def state_dict(self) -> Callable[[], Any]:
        """Returns the state as of the batches that the newest iterator that is there, and not at its end, has given."""
        *_, (iterator, states) = (_nobody, ()), *self._states.items()
        newest = self.loader if (found := iterator()) is None else found
        return partial(_state, states, newest.state_dict)

    def load_state_dict(self, state: Any) -> None:
        """Have the next iterator go on from a state."""
        self.loader.load_state_dict(state)
        for iterator in self._alive():
            iterator.leave()
        self._states.clear()

    def close(self) -> None:
        """Close the iterators that there are, and the loader."""
        for iterator in self._alive():
            iterator.close()
        if hasattr(self.loader, "close"):
            self.loader.close()

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not made yet
            raise AttributeError(name)
        return getattr(self.loader, name)


def _without_our_frames(error: Exception) -> Exception:
    """Leave out those of `pull` and of what it has called: they refer to the iterator, which holds the error.

    `pull` itself keeps no part of the traceback either: since Python 3.12 that refers to its frame in any case.
    """
    trace = error.__traceback__ and error.__traceback__.tb_next
    return error.with_traceback(trace and trace.tb_next)


def _is_ready(iterator: Any) -> bool:
    return not hasattr(iterator, "is_ready") or iterator.is_ready()


def _state(states: Sequence[Any], within: Callable[[], Any]) -> Any:
    """Return the state before the first batch that is held; that of the loader or iterator within if none is.

    Another thread may take batches meanwhile. So what is held is looked at again when the state within is there: it may
    be that of a batch that is held by now.
    """
    if (before := _first(states)) is None:
        state = within()
        if (before := _first(states)) is None:
            return state
    return copy.deepcopy(before)


def _first(states: Sequence[Any]) -> Any:
    return next(iter(tuple(states)), None)  # a copy: no other thread can change it in between


def _drop(states: dict[weakref.ref[IteratorWrapper], deque[Any]], gone: weakref.ref[IteratorWrapper]) -> None:
    """Forget the states of an iterator that is gone, or at its end, unless there are no others."""
    if len(states) > 1:
        states.pop(gone, None)
