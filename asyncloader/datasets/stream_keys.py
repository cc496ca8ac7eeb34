"""The items of a stream as keys of samples: read once, ahead, on a thread of their own.

    stream ── a thread: read, number ──> Items ── next, arrived ──> StreamKeys: whoever reads the sampler
                    └ states of the stream, now and then ──> a place is told with the last state before it

The thread knows `Items` and the stream, and not who takes. So it ends when the iterator over the keys is dropped; but
one that waits in a stream that gives nothing stays there, as a daemon.
"""

from __future__ import annotations

import asyncio
import pickle
import queue
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple, NoReturn, TypeAlias

from asyncloader import threads
from asyncloader.async_face import resolved
from asyncloader.log import log
from asyncloader.protocols import is_resource, is_stateful, probe, put_back, reads_async

_FLAT = frozenset((bytes, str, int, float, bool, bytearray, type(None)))
_CONTAINERS = (list, tuple, set, frozenset, deque)
_STATE_SHARE = 50
"""States of a stream are taken for a fiftieth of the time at most."""
_END: Any = object()

StreamItem: TypeAlias = tuple[int, Any]
"""One item of a stream, as the key of a sample: its number among those of all ranks, and what the stream gave. Plain
tuples are pickled in a fifth of the time that a class of our own takes."""


class Place(NamedTuple):
    """A place in a stream: which item comes next.

    Attributes:
        number: Its number, of all ranks together.
        given: How many items the stream had given when its states were taken.
        states: The states of the stream and of its iterator, by name, pickled; empty for the stream's beginning.
    """

    number: int = 0
    given: int = 0
    states: bytes = b""


class Items:
    """Items that were read and not taken: a thread reads them, and one thread at a time takes them, by `StreamKeys`.

    The two share no lock of Python's, in whose functions a handler of a signal may raise, but queues. Who waits says so
    before it looks, and what it waits for is there before the other side looks for it:

      1. The taker finds too little. 2. The thread puts, and finds nobody who asks. 3. The taker asks, looks again, and
         finds it.
      1. The taker finds too little, asks, looks again. 2. The thread puts, finds who asks, and tells.

    Args:
        rank: Which of the ranks takes these items.
        num_replicas: How many ranks there are.
        max_items: How many items are read ahead.
        max_bytes: How many bytes are.

    Attributes:
        coming: Iterates over the items, and waits for each.
        given: How many items the stream has given.
        next: The number of the item that is taken next.
        is_left: Nobody will take more.
        wake: Has the thread look for room again, or see that it is left.
        is_kept: Whether somebody may take at the end of the program who has not begun yet.
        thread: The thread that reads.
    """

    rank: int
    num_replicas: int
    is_left: bool
    given: int
    next: int
    first: int

    def __init__(self, rank: int = 0, num_replicas: int = 1, *, max_items: int, max_bytes: int) -> None:
        self.rank, self.num_replicas = rank, num_replicas
        self._max_items, self._max_bytes = max_items, max_bytes
        self.is_left = self._is_over = False
        self.is_kept: Callable[[], bool] = bool
        self._failure: Exception | None = None  # is raised behind the last item
        self._queue: queue.SimpleQueue[StreamItem | None] = queue.SimpleQueue()
        self.coming: Iterator[StreamItem] = iter(self._queue.get, None)
        self._sizes: deque[int] = deque()  # of the items that the thread takes for waiting
        self._bytes = 0
        self._asked: deque[tuple[int, Callable[[], object]]] = deque()
        self._room_at = -1  # with so few items waiting there is room, for which the thread waits
        self.room: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self.wake: Callable[[], object] = partial(self.room.put, True)
        self._takers: list[Any] = []
        self._claim = threading.Lock()
        self.thread: threading.Thread | None = None
        self._before: list[Items] = []
        self.go_to(Place())

    def go_to(self, place: Place) -> None:
        """Begin at a place, before anything is read."""
        self.begin = place
        self.given = place.given
        self.next = self.first = place.number + self.rank
        self._states: deque[tuple[int, bytes]] = deque()

    def start(self, stream: Any, readings: list[Items]) -> None:
        """Start the thread. Once more does no harm: an interrupt may come between the start and its note.

        Args:
            stream: An iterable, an async iterable, or a function that returns one.
            readings: What may still be read of the stream. It has one position, so those that nobody takes from any
                more are waited for. A function returns another stream each time.
        """
        before = [each for each in readings if each is not self and (each.thread is None or each.thread.is_alive())]
        readings[:] = [*before, self]
        self._before = before if is_stream(stream) else []
        threads.start(partial(_read, self, stream), "asyncloader stream", self._end_with_program)

    # ------------------------------------------------------------------------------------------------ whoever takes

    def end_with(self, taker: object) -> None:
        """Read nothing more when this object is dropped."""
        self._takers.append(weakref.ref(taker, self.leave))

    def leave(self, _: object = None) -> None:
        """Read nothing more. Finalizers may call it."""
        self._takers.clear()  # which refer to this object
        if not self.is_left:
            self.is_left = True
            self.wake()

    def _end_with_program(self) -> object:
        if self.is_kept():
            return threads.LATER
        self.leave()
        return None

    def make_room(self) -> None:
        """Have the thread read on, if it waits for room and there is some."""
        if self._queue.qsize() <= self._room_at:
            self.wake()

    def arrived(self, count: int, tell: Callable[[], object]) -> bool:
        """Return whether so many, or the end, can be had without waiting; if not, ``tell`` is called when they can."""
        self.make_room()
        if self._has(count):
            return True
        asks = count, tell
        self._asked.append(asks)
        if self._has(count):
            try:
                self._asked.remove(asks)
            except ValueError:  # the thread has it in hand
                return False
            return True
        self.wake()  # there may have to be room for more than the bounds allow
        return False

    def _has(self, count: int) -> bool:
        return self._is_over or self._queue.qsize() >= count

    def raise_end(self) -> NoReturn:
        """Raise what comes behind the last item: once an error of the stream, if there was one.

        Whoever finds the end within a batch has a short one, and no rank has more items than so many batches: a state
        of then is behind all items, also if another rank was given one more.
        """
        error, self._failure = self._failure, None
        if error is None and not self.is_left:
            self.next = max(self.next, self.given + self.rank)
        try:
            raise StopIteration if error is None else error
        finally:
            del error  # whose frames have this one

    def place(self, taken: int | None = None) -> Place:
        """Return the place after so many items of this rank, as if all ranks had taken so many; by default, now."""
        number = self.next - self.rank if taken is None else self.begin.number + taken * self.num_replicas
        states = [state for state in tuple(self._states) if state[0] <= number]
        return Place(number, *(states[-1] if states else (self.begin.given, self.begin.states)))

    # --------------------------------------------------------------------------------------------------- the thread

    def may_begin(self) -> bool:
        """Return whether the stream is to be read, when those who read it for nobody have come back from it.

        False as well if a thread reads it already.
        """
        if not self._claim.acquire(blocking=False):
            return False
        self.thread = threading.current_thread()
        for each in self._before:
            if each.is_left and each.thread is not None:
                each.thread.join()
        self._before = []
        return not self.is_left

    def must_wait(self) -> bool:
        """Whether there is no room; then `wake` is called when half of what is there was taken."""
        if self.is_left or not self._is_full():
            self._room_at = -1
            return False
        self._room_at = len(self._sizes) // 2
        return self._is_full()

    def _is_full(self) -> bool:
        if not self._has_more_than(0):
            return False
        while len(self._sizes) > self._queue.qsize():  # what was taken since
            self._bytes -= self._sizes.popleft()
        return self._has_more_than(max((count for count, _ in tuple(self._asked)), default=0))

    def _has_more_than(self, wanted: int) -> bool:
        """Whether the bounds are reached, and more items than are wanted are there."""
        count = len(self._sizes)
        return count > wanted and (count >= self._max_items or self._bytes >= self._max_bytes)

    def put(self, item: StreamItem) -> None:
        """Have an item be taken."""
        nbytes = size_of(item[1])
        self._sizes.append(nbytes)
        self._bytes += nbytes
        self._queue.put(item)
        if self._asked:
            self._tell()

    def end(self, failure: Exception | None = None) -> None:
        """There are no more, perhaps because of an error of the stream."""
        self._failure = failure
        self.wake = self.room.empty  # there is nobody to wake: the task of an async stream has the error, and frames
        self._is_over = True
        self._queue.put(None)
        self._tell()

    def _tell(self) -> None:
        for _ in range(len(self._asked)):
            count, tell = self._asked.popleft()
            if self._has(count):
                tell()
            else:
                self._asked.append((count, tell))

    def keep(self, states: bytes) -> None:
        """Keep states of the stream; the older ones, but for the last that may be needed, go."""
        self._states.append((self.given, states))
        while len(self._states) > 1 and self._states[1][0] <= self.next - self.rank:
            self._states.popleft()


class StreamKeys:
    """Iterates over the items of a stream that one rank is given, from the first `next` on.

    Args:
        items: What is taken.
        begin: Starts the reading, once or again: a handler of a signal may raise before it has begun.
    """

    def __init__(self, items: Items, begin: Callable[[], object]) -> None:
        self._items, self._begin = items, begin
        self._has_begun = False
        self._held: StreamItem | None = None  # until it is given: an interrupt may come in between
        items.end_with(self)

    def _start(self) -> None:
        if not self._has_begun:
            self._begin()
            self._has_begun = True

    def __iter__(self) -> Iterator[StreamItem]:
        return self

    def __next__(self) -> StreamItem:
        items = self._items
        if self._held is None:
            self._start()
            items.make_room()
            # Not `next`: an interrupt between its end and the assignment would lose what it has returned.
            for self._held in items.coming:
                break
        item = self._held
        if item is None:
            items.raise_end()
        items.next = item[0] + items.num_replicas
        self._held = None
        return item

    def arrived(self, count: int, tell: Callable[[], object]) -> bool:
        """Whether so many items are there: see :class:`asyncloader.protocols.ArrivingKeys`."""
        self._start()
        return self._items.arrived(count - (self._held is not None), tell)

    def end_with(self, consumer: object) -> None:
        """Read nothing more when this is dropped: see :class:`asyncloader.protocols.ArrivingKeys`."""
        self._items.end_with(consumer)

    def leave(self) -> None:
        """Read nothing more."""
        self._items.leave()


class _Reader:
    """Numbers what an iterator over a stream gives, and takes states of both now and then.

    Args:
        items: Take what is this rank's, and was not given before.
        stream: May have a state.
        iterator: Over it, which may have one too.
        state: Where the iterator begins, if it has one.
    """

    def __init__(self, items: Items, stream: Any, iterator: Any, state: Any) -> None:
        if state is not None:
            iterator.load_state_dict(state)
        self._items = items
        things = {"stream": stream} if stream is iterator else {"stream": stream, "iterator": iterator}
        self._stateful = {name: thing for name, thing in things.items() if is_stateful(thing)}
        self._due_at = perf_counter()

    def add(self, value: Any) -> None:
        """Hand over another item of the stream."""
        items = self._items
        number = items.given
        items.given = number + 1
        if self._stateful:
            self._keep_state()
        if number >= items.first and (number - items.first) % items.num_replicas == 0:
            items.put((number, value))

    def _keep_state(self) -> None:
        """Keep the state after the last item, if one is due."""
        if (began := perf_counter()) < self._due_at:
            return
        try:
            states = pickle.dumps({name: thing.state_dict() for name, thing in self._stateful.items()})
        except Exception:
            log.warning(
                "The state of the stream could not be taken: to resume from here, what it has given since the last one "
                "is read again.",
                exc_info=True,
            )
            self._stateful = {}
            return
        self._items.keep(states)
        self._due_at = perf_counter() + _STATE_SHARE * (perf_counter() - began)


def _read(items: Items, source: Any) -> None:
    """Read a stream until it ends or raises, or nobody takes from it any more. In a thread of its own."""
    try:
        if items.may_begin():
            stream = open_stream(source)
            states = pickle.loads(items.begin.states) if items.begin.states else {}
            put_back(stream, states.get("stream"))
            if reads_async(stream):
                asyncio.run(_read_async(items, stream, states.get("iterator")))
            else:
                _read_plain(items, stream, states.get("iterator"))
            items.end()
    except BaseException as error:
        if isinstance(error, SystemExit) and threads.is_ending:
            raise
        if not items.is_left:
            items.end(_as_failure(error, items.given))
        elif not isinstance(error, asyncio.CancelledError):
            log.warning("A stream that nobody reads any more has raised an error.", exc_info=True)


def _read_plain(items: Items, stream: Any, state: Any) -> None:
    iterator = iter(stream)
    reader = _Reader(items, stream, iterator, state)
    while not items.is_left:
        if items.must_wait():
            items.room.get()
        elif (value := next(iterator, _END)) is _END:
            return
        else:
            reader.add(value)


async def _read_async(items: Items, stream: Any, state: Any) -> None:
    room = asyncio.Event()
    items.wake = partial(_wake, items, room, asyncio.get_running_loop(), asyncio.current_task())
    async with stream if is_resource(stream) else nullcontext():
        iterator = aiter(stream)
        reader = _Reader(items, stream, iterator, state)
        try:
            while not items.is_left:
                if items.must_wait():
                    await room.wait()
                    room.clear()
                elif (value := await anext(iterator, _END)) is _END:
                    return
                else:
                    reader.add(await resolved(value))
        finally:
            if hasattr(iterator, "aclose"):
                await iterator.aclose()


def _wake(items: Items, room: asyncio.Event, loop: asyncio.AbstractEventLoop, task: Any) -> None:
    """Have an async stream be read on, or be left: one that waits for ever is cancelled, once."""

    def wake() -> None:
        room.set()
        if items.is_left and not task.cancelling():
            task.cancel()

    with suppress(RuntimeError):  # the loop was closed
        loop.call_soon_threadsafe(wake)


def _as_failure(error: BaseException, number: int) -> Exception:
    """Return an error of a stream as what is raised in place of the item of a number.

    One that would end a worker or a task, as SystemExit does, or be taken for the end of the stream, becomes an error
    like any other, and so does one that refuses a note.
    """
    note = f"Raised by the stream in place of item {number}; it is not read on."
    with suppress(Exception):
        error.add_note(note)
        if isinstance(error, Exception) and not isinstance(error, (StopIteration, StopAsyncIteration)):
            return error
    said = "".join(traceback.format_exception_only(error)).strip()
    return RuntimeError(f"{said}\n{note}")


def open_stream(stream: Any) -> Any:
    """Return what is iterated over: the stream, or what it returns if it is a function."""
    return stream if is_stream(stream) else stream()


def is_stream(thing: Any) -> bool:
    """Whether it can be iterated over, by ``for`` or by ``async for``."""
    return hasattr(type(thing), "__iter__") or hasattr(type(thing), "__aiter__")


def gives_once(stream: Any) -> bool:
    """Whether it is known to be an iterator that cannot begin anew: a generator, `map`, an open file.

    Iterators of the user's classes may begin anew in their ``__iter__``.
    """
    kind = type(stream)
    is_iterator = hasattr(kind, "__next__") or hasattr(kind, "__anext__")
    return is_iterator and kind.__module__.partition(".")[0] in sys.stdlib_module_names


def size_of(value: Any, depth: int = 4) -> int:
    """Return about how many bytes a value takes: it, and what is in its containers and attributes."""
    if type(value) in _FLAT:
        return sys.getsizeof(value)
    if isinstance(nbytes := probe(value, "nbytes"), int):
        return nbytes
    attributes = value if isinstance(value, dict) else probe(value, "__dict__")
    inner = value if isinstance(value, _CONTAINERS) else attributes.values() if isinstance(attributes, dict) else ()
    return sys.getsizeof(value, 0) + (sum(size_of(each, depth - 1) for each in inner) if depth else 0)
