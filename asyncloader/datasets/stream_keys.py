"""The items of a stream as keys of samples: read once, ahead, on a thread of their own.

    stream ── a thread: read, count, shuffle by windows ──> Items ── next, arrived ──> whoever reads the sampler
                    └ states of the stream, now and then ──> a position is told with the last state before it

The thread knows `Items` and the stream, and not who takes. So it ends when the iterator over the keys is dropped; but
one that waits in a stream that gives nothing stays there, as a daemon.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
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
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from asyncloader import threads
from asyncloader.protocols import is_resource, is_stateful, probe, put_back
from asyncloader.samplers.shuffle import Shuffle

log = logging.getLogger("asyncloader")

_FLAT = frozenset((bytes, str, int, float, bool, bytearray, type(None)))
_CONTAINERS = (list, tuple, set, frozenset, deque)
_MOST_FAILURES = 100
"""A stream that raises so often in a row, and gives nothing in between, is not asked again."""
_STATE_SHARE = 50
"""States of a stream are taken for a fiftieth of the time at most."""


class Raised:
    """An error of the stream, in place of an item.

    Pickled, and so a copy each time: a stream may raise one object time and again; and an exception keeps the frames
    that it is raised through, and with them the iterator over batches, which would never end.

    Args:
        error: The exception. One that would end a worker, as SystemExit does, becomes an error like any other, and so
            does one that cannot be pickled: the user's class may refuse anything.
        number: The number of the item.
    """

    def __init__(self, error: BaseException, number: int) -> None:
        frames = "".join(traceback.format_tb(error.__traceback__))
        self._notes = [*getattr(error, "__notes__", ()), f"Raised by the stream in place of item {number}:\n{frames}"]
        bare = error.with_traceback(None)
        try:
            self._pickled = pickle.dumps(bare)
            can_travel = isinstance(pickle.loads(self._pickled), Exception)
        except BaseException:
            can_travel = False
        if not can_travel:
            self._pickled = pickle.dumps(RuntimeError(_words(bare)))

    def __repr__(self) -> str:
        return repr(self.error)

    @property
    def error(self) -> BaseException:
        """The exception, made anew, with the frames of the stream as a note."""
        error: BaseException = pickle.loads(self._pickled)
        BaseException.__setattr__(error, "__notes__", list(self._notes))
        return error


StreamItem: TypeAlias = tuple[int, Any]
"""One item of a stream, as the key of a sample: its number among those of all ranks, and what the stream gave, or
`Raised`. Plain tuples are pickled in a fifth of the time that a class of our own takes."""


class Told(NamedTuple):
    """A state of the stream.

    Attributes:
        given: How many items the stream had given before.
        pickled: The states of the stream and of its iterator, by name.
    """

    given: int
    pickled: bytes


class Place(NamedTuple):
    """A place in a stream: which item comes next.

    Attributes:
        number: Its number, of all ranks together.
        is_over: Whether it is no item, but the end of an epoch.
        told: The last state of the stream before, or None.
    """

    number: int = 0
    is_over: bool = False
    told: Told | None = None


class Reading(NamedTuple):
    """Which part of a stream is read, and how.

    Attributes:
        stream: An iterable, an async iterable, or a function that returns one.
        shuffle: Items of a window whose order is random; 0 for the stream's own order.
        key: Seeds that order: seed and epoch.
        place: Where it begins, for all ranks.
        rank: Which of the ranks takes these items.
        num_replicas: How many ranks there are.
        most_items: How many are read ahead.
        most_bytes: How many bytes are.
        was_read: The stream was read before.
        before: Weak references to what may still be read of it; of a function that returns a stream, none.
    """

    stream: Any
    shuffle: int
    key: tuple[int, int]
    place: Place
    rank: int
    num_replicas: int
    most_items: int
    most_bytes: int
    was_read: bool = False
    before: tuple[Callable[[], Items | None], ...] = ()

    @property
    def first(self) -> int:
        """The number of the first item that this rank takes."""
        return self.place.number + self.rank

    def window(self, number: int) -> int:
        """Return how many items of the stream come before the window of this one."""
        return number - number % self.shuffle if self.shuffle else number


class Items:
    """Items that were read and not taken: one thread puts, and whoever reads the sampler takes.

    A taker looks before it waits, and what it leaves for the thread to see is there before it looks:

      1. The taker finds too little. 2. The thread appends, and sees nobody who waits. 3. The taker says that it waits,
         looks again, and finds it.
      1. The taker finds too little, says that it waits, looks again. 2. The thread appends, and wakes it.

    Attributes:
        reading: The part of the stream that is read.
        room: Tells the thread that there may be room again; anything but True, that it is to end.
        told: States of the stream, the oldest that may be needed first.
        is_over: Whether these are the last.
        failure: What is raised behind the last of them, in place of the end.
        takers: Weak references to whoever takes, and for whom: the end of each goes into `room`.
        is_read: A thread reads the stream.
        reader: Held by the thread that does: the start of another one may have been interrupted.
        is_left: Whether nobody will take more.
        ended: The thread uses the stream no more.
    """

    is_read = is_left = False

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.takers: tuple[Any, ...] = ()
        self.ended = threading.Event()
        self._pid = os.getpid()
        self.room: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.reader = threading.Lock()
        self.told: deque[Told] = deque([reading.place.told] if reading.place.told is not None else [])
        self.is_over = reading.place.is_over
        self.failure: Raised | None = None
        self._items: deque[StreamItem] = deque()
        self._next = reading.first  # the number of the item that is given next
        # The items that the thread takes for waiting: bytes of each, bytes in all, and the number of the first.
        self._sizes: deque[int] = deque()
        self._bytes = 0
        self._sized = reading.first
        self._room_at = sys.maxsize  # when this item is next, there is room, which the thread waits for
        # Takers that wait. No lock of Python's is held by both sides: handlers of signals may raise in one's functions.
        self._waiters: deque[Any] = deque()
        self._tells: deque[tuple[int, Callable[[], object]]] = deque()

    # ------------------------------------------------------------------------------------------------ whoever takes

    def leave(self) -> None:
        """Have nothing more be read. Finalizers may call it."""
        self.is_left = True
        self.room.put(None)

    @property
    def has_taker(self) -> bool:
        """Whether more may be taken."""
        return not self.is_left and all(taker() is not None for taker in self.takers)

    def wait_ended(self) -> None:
        """Wait until a thread that reads for nobody has come back from the stream."""
        if self._pid == os.getpid() and self.reader.locked() and not self.has_taker:
            self.ended.wait()

    def take(self) -> StreamItem:
        """Return the next item, when it is there.

        The handler of a signal may raise after any call of a function in here. So an item is taken by an assignment,
        behind which there is nothing but ``return``.

        Raises:
            StopIteration: at the end.
            Exception: The stream cannot be read to its end.
        """
        self._let_go()
        if not self._items:
            self._wait()
        item = self._items[0]
        after = item[0] + self.reading.num_replicas
        self._next = after
        return item

    def _wait(self) -> None:
        waiter = threading.Lock()
        waiter.acquire()
        self._waiters.append(waiter)
        try:
            while not self._items:
                if self.is_over:
                    raise StopIteration if self.failure is None else self.failure.error
                self.room.put(True)
                waiter.acquire()  # until the thread releases it
        finally:
            with suppress(ValueError):
                self._waiters.remove(waiter)

    def arrived(self, count: int, tell: Callable[[], object]) -> bool:
        """Return whether so many, or the end, can be had without waiting; if not, ``tell`` is called when they can."""
        self._let_go()
        if self._has(count):
            return True
        waits = count, tell
        self._tells.append(waits)
        if self._has(count):
            try:
                self._tells.remove(waits)
            except ValueError:  # the thread has it in hand
                return False
            return True
        self.room.put(True)
        return False

    def _has(self, count: int) -> bool:
        return self.is_over or len(self._items) >= count

    def _let_go(self) -> None:
        """Let go of what was taken."""
        items = self._items
        while items and items[0][0] < self._next:
            del items[0]
        if self._next >= self._room_at:
            self._room_at = sys.maxsize
            self.room.put(True)

    def place(self, taken: int | None = None) -> Place:
        """Return the place after so many items of this rank, as if all ranks had taken so many; by default, now."""
        reading = self.reading
        number = self._next - reading.rank if taken is None else reading.place.number + taken * reading.num_replicas
        is_over = self.is_over and not [item for item in tuple(self._items) if item[0] >= number]
        before = [told for told in tuple(self.told) if told.given <= reading.window(number)]
        return Place(number, is_over, before[-1] if before else None)

    # --------------------------------------------------------------------------------------------------- the thread

    def _is_full(self) -> bool:
        """Whether nothing is to be read for the moment: so much is there, without what was taken since."""
        while self._sizes and self._sized < self._next:
            self._bytes -= self._sizes.popleft()
            self._sized += self.reading.num_replicas
        if self._fits():
            return False
        wanted = len(self._waiters)  # whatever the bounds are
        for told_of, _ in tuple(self._tells):
            wanted = max(wanted, told_of)
        return len(self._sizes) > wanted

    def _fits(self) -> bool:
        return len(self._sizes) < self.reading.most_items and self._bytes < self.reading.most_bytes

    def must_wait(self) -> bool:
        """Whether there is no room; then `room` tells when half of what is there was taken."""
        if self._fits() or not self._is_full():
            return False
        self._room_at = self._sized + (len(self._sizes) + 1) // 2 * self.reading.num_replicas
        return self._is_full()

    def wait_room(self) -> bool:
        """Wait until there is room; return whether anybody will take more."""
        while self.must_wait() or not self.room.empty():
            if self.room.get() is not True:
                return False
        return True

    def put(self, items: list[StreamItem], *, is_over: bool = False) -> None:
        """Have these be taken; perhaps there are no more."""
        for item in items:
            value = item[1]
            nbytes = sys.getsizeof(value) if type(value) in _FLAT else size_of(value)
            self._sizes.append(nbytes)
            self._bytes += nbytes
            self._items.append(item)
        self.is_over = is_over
        if self._waiters or self._tells:
            self._wake()

    def _wake(self) -> None:
        for waiter in tuple(self._waiters):
            if waiter.locked():
                waiter.release()
        for _ in range(len(self._tells)):
            count, tell = self._tells.popleft()
            if self._has(count):
                tell()
            else:
                self._tells.append((count, tell))

    def keep(self, told: Told) -> None:
        """Keep a state of the stream; the older ones, but for the last that may be needed, go."""
        self.told.append(told)
        first = self.reading.window(self._next - self.reading.rank)
        while len(self.told) > 1 and self.told[1].given <= first:
            self.told.popleft()

    def give_up(self, error: Exception) -> None:
        """Have this be raised behind what was read: the epoch would be short otherwise, in silence under "skip"."""
        error.add_note(f"The stream has raised {_MOST_FAILURES} errors in a row, and is not read on.")
        self.failure = Raised(error, self._items[-1][0] + self.reading.num_replicas if self._items else self._next)
        self.put([], is_over=True)

    def fail(self, error: BaseException) -> None:
        """Nothing more can be read, because of this, which the next item raises."""
        number = self._items[-1][0] + self.reading.num_replicas if self._items else self._next
        self.put([(number, Raised(error, number))], is_over=True)


class StreamKeys:
    """Iterates over the items of a stream that one rank is given, from the first `next` on.

    Args:
        make: Returns what is read.
        begun: Is told of that, once or again: a handler of a signal may raise before the stream is read.
    """

    def __init__(self, make: Callable[[], Items], begun: Callable[[Items], object]) -> None:
        self._make = make
        self._begun = begun
        self._made: Items | None = None
        self._consumer: Callable[[], Any] = _nobody

    def _begin(self) -> Items:
        items = self._made
        if items is None:
            items = self._make()
            ends = [each for each in (self, self._consumer()) if each is not None]
            items.takers = tuple(
                weakref.ref(each, items.room.put) for each in ends
            )  # compiled: no handler raises there
            self._made = items
        if not items.is_read:
            self._begun(items)
            if not items.is_over:
                threads.start(partial(_read, items), "asyncloader stream", partial(items.room.put, None))
            items.is_read = True
        return items

    def __iter__(self) -> Iterator[StreamItem]:
        return self

    def __next__(self) -> StreamItem:
        items = self._made
        if items is None or not items.is_read:
            items = self._begin()
        return items.take()

    def arrived(self, count: int, tell: Callable[[], object]) -> bool:
        """Whether so many items are there: see :class:`asyncloader.protocols.ArrivingKeys`."""
        return self._begin().arrived(count, tell)

    def end_with(self, consumer: object) -> None:
        """Read nothing more when this is dropped: see :class:`asyncloader.protocols.EndsWithConsumer`."""
        self._consumer = weakref.ref(consumer)

    def leave(self) -> None:
        """Read nothing more."""
        if self._made is not None:
            self._made.leave()


def _nobody() -> None:
    """Stand for a consumer that is not known."""


class _Dealer:
    """Makes keys of what the stream gives: counts, shuffles, and leaves out what is another rank's, or was given.

    Args:
        reading: The part of the stream that is read.

    Attributes:
        count: How many items the stream has given.
    """

    def __init__(self, reading: Reading) -> None:
        self.count = 0 if reading.place.told is None else reading.place.told.given
        self._reading = reading
        self._first, self._ranks = reading.first, reading.num_replicas
        self._begin = reading.window(reading.place.number)
        self._window: list[Any] = []
        self._failures = 0  # since the last item

    def may_go_on(self) -> bool:
        """Count an error of the stream; return whether the stream may be asked again."""
        self._failures += 1
        return self._failures < _MOST_FAILURES

    def add(self, value: Any) -> list[StreamItem]:
        """Return what there is to give out after another item."""
        number = self.count
        self.count = number + 1
        if type(value) is not Raised:
            self._failures = 0
        if number < self._begin:
            return []
        if not (shuffle := self._reading.shuffle):
            return [(number, value)] if self._is_own(number) else []
        self._window.append(value)
        return self.rest() if len(self._window) == shuffle else []

    def rest(self) -> list[StreamItem]:
        """Return what is left of a window."""
        window, self._window = self._window, []
        if not window:
            return []
        first = self.count - len(window)
        order = Shuffle(len(window), *self._reading.key, first)(np.arange(len(window)))
        return [(number, window[at]) for number, at in enumerate(order.tolist(), first) if self._is_own(number)]

    def _is_own(self, number: int) -> bool:
        return number >= self._first and (number - self._first) % self._ranks == 0


class _States:
    """Takes states of a stream, now and then.

    Args:
        stream: May have a state.
        iterator: Over it, which may have one too.

    Attributes:
        are_there: Whether there are states.
    """

    def __init__(self, stream: Any, iterator: Any) -> None:
        things = {"stream": stream, "iterator": iterator} if stream is not iterator else {"stream": stream}
        self._things = {name: thing for name, thing in things.items() if is_stateful(thing)}
        self.are_there = bool(self._things)
        self._due_at = perf_counter()

    def take(self, count: int) -> Told | None:
        """Return the state after so many items, if one is due."""
        if (began := perf_counter()) < self._due_at:
            return None
        try:
            told = Told(count, pickle.dumps({name: thing.state_dict() for name, thing in self._things.items()}))
        except Exception:
            log.warning(
                "The state of the stream could not be taken: to resume from here, what it has given since the last one "
                "is read again.",
                exc_info=True,
            )
            self.are_there = False
            return None
        now = perf_counter()
        self._due_at = now + _STATE_SHARE * (now - began)
        return told


def _read(items: Items) -> None:
    """Read the stream until it ends, or nobody takes from it any more. In a thread of its own."""
    if not items.reader.acquire(blocking=False):
        return
    try:
        for before in items.reading.before:  # a stream has one position
            if (other := before()) is not None:
                other.wait_ended()
        if items.has_taker:
            _read_from_place(items)
    except BaseException as error:
        if isinstance(error, SystemExit) and threads.is_ending:
            raise
        if items.is_over or not items.has_taker:
            log.warning("The stream has raised an error after its last item.", exc_info=True)
        else:
            items.fail(error)
    finally:
        items.ended.set()


def _read_from_place(items: Items) -> None:
    reading = items.reading
    stream, told = open_stream(reading.stream), reading.place.told
    states = {} if told is None else pickle.loads(told.pickled)
    put_back(stream, states.get("stream"))
    if hasattr(type(stream), "__aiter__"):
        asyncio.run(_read_async(items, stream, states))
    else:
        _read_plain(items, stream, states)


def _read_plain(items: Items, stream: Any, states: dict[str, Any]) -> None:
    iterator = iter(stream)
    if "iterator" in states:
        iterator.load_state_dict(states["iterator"])
    dealer, keeper = _Dealer(items.reading), _States(stream, iterator)
    while items.wait_room():
        try:
            value = next(iterator)
        except StopIteration:
            _end(items, dealer)
            return
        except Exception as error:
            if not dealer.may_go_on():
                items.give_up(error)
                return
            value = Raised(error, dealer.count)
        _hand_over(items, value, dealer, keeper)


async def _read_async(items: Items, stream: Any, states: dict[str, Any]) -> None:
    async with stream if is_resource(stream) else nullcontext():
        await _read_opened(items, stream, states)


async def _read_opened(items: Items, stream: Any, states: dict[str, Any]) -> None:
    iterator = aiter(stream)
    if "iterator" in states:
        iterator.load_state_dict(states["iterator"])
    dealer, keeper, room = _Dealer(items.reading), _States(stream, iterator), asyncio.Event()
    here, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    threads.start(partial(_forward, items, here, room, task), "asyncloader stream room")
    try:
        while True:
            while items.must_wait():
                await room.wait()
                room.clear()
            try:
                value = await anext(iterator)
                value = await value if inspect.isawaitable(value) else value
            except StopAsyncIteration:
                _end(items, dealer)
                return
            except Exception as error:
                if not dealer.may_go_on():
                    items.give_up(error)
                    return
                value = Raised(error, dealer.count)
            _hand_over(items, value, dealer, keeper)
    except asyncio.CancelledError:
        if not items.is_left:
            raise
    finally:
        items.room.put(False)  # for `_forward`
        if hasattr(iterator, "aclose"):
            await iterator.aclose()


def _forward(items: Items, loop: asyncio.AbstractEventLoop, room: asyncio.Event, task: asyncio.Task[None]) -> None:
    """Tell an async stream's loop of room, and of the end."""
    with suppress(RuntimeError):  # the loop was closed
        while (news := items.room.get()) is True:
            loop.call_soon_threadsafe(room.set)
        if news is not False:  # nobody takes any more
            items.is_left = True
            loop.call_soon_threadsafe(task.cancel)


def _hand_over(items: Items, value: Any, dealer: _Dealer, keeper: _States) -> None:
    """Have what follows from another item of the stream be taken; keep the stream's state, if one is due."""
    dealt = dealer.add(value)
    if keeper.are_there and (told := keeper.take(dealer.count)) is not None:
        items.keep(told)
    if dealt:
        items.put(dealt)


def _end(items: Items, dealer: _Dealer) -> None:
    """Have the rest be taken: the stream has ended."""
    if items.reading.was_read and not dealer.count:
        log.warning(
            "The stream has given nothing, and was read before. If it is an iterator, which gives its items once, give "
            "ParallelMap a function that makes it."
        )
    items.put(dealer.rest(), is_over=True)


def _words(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException as other:
        return f"{type(error).__name__}, whose text raised {type(other).__name__}"


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
    if depth and isinstance(value, _CONTAINERS):
        return sum(size_of(each, depth - 1) for each in value)
    attributes = value if isinstance(value, dict) else probe(value, "__dict__")
    if depth and isinstance(attributes, dict):
        return sum(size_of(each, depth - 1) for each in attributes.values())
    return sys.getsizeof(value, 0)
