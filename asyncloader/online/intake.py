"""Intake: the producers' side of a feed. Leases, puts, and how producers wait for room.

Whatever changes the ledger wakes those who can go on by it, after the lock was let go. So nobody waits for what is
there, and nobody is called back with the lock held. Handlers of signals wait meanwhile: a Ctrl-C comes before a change,
after it, or in the user's code, and leaves nothing half done.
"""

from __future__ import annotations

import math
import os
import secrets
import threading
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from os import PathLike
from time import monotonic
from typing import Any, SupportsFloat

from asyncloader.errors import ConfigurationError
from asyncloader.online.errors import FeedClosedError, FeedFullError, closed
from asyncloader.online.forks import generation
from asyncloader.online.lease import Leased, LeaseRequest, Leases
from asyncloader.online.ledger import Ledger, Rules, Unit
from asyncloader.online.source import WAITS, PlainSource, StreamSource, source_of
from asyncloader.online.spill import Kind, Spill
from asyncloader.online.stats import Stopwatch
from asyncloader.online.time_limit import TimeLimit
from asyncloader.online.waiters import TaskWaiter, ThreadWaiter, Waiters, first, wake_all
from asyncloader.signals import HandlersWait

_LOOK_S = 0.1  # so often the main thread looks for signals while it waits for a source that another thread reads


class Intake:
    """The producers' side of a feed.

    Args:
        source: The items to lease; None for no leases.
        rules: The rules of its ledger.
        group_size: Samples of a unit; None for single ones.
        lease_timeout: How long a lease lasts, in seconds; None for ever.
        spill: Folder that what is put is written to; None for none.

    Attributes:
        address: The address of the socket at which handles reach it, which has no file.
    """

    def __init__(
        self,
        source: Any,
        rules: Rules,
        group_size: int | None,
        lease_timeout: float | None,
        spill: str | PathLike[str] | None,
    ) -> None:
        self.group_size = group_size
        self.address = f"\0asyncloader-feed-{os.getpid()}-{secrets.token_hex(8)}"
        self._process = generation()
        self._ledger = Ledger(rules)
        self._source = None if source is None else source_of(source, partial(_item_came, weakref.ref(self)))
        self._pushed = 0  # samples or groups that were put without a lease
        self._lock = threading.Lock()
        self._handlers = HandlersWait()  # of who has the lock
        self._called_out_in = 0  # the thread that is in the source, with the lock held
        self._afterwards: deque[Callable[[], object]] = deque()  # what is to be done before the lock is let go
        self._woken: list[Callable[[], object]] = []  # wake-ups for when the lock is let go
        self._leasers: Waiters = {}
        self._putters: Waiters = {}
        self._readers: Waiters = {}
        self._tells: list[Callable[[], object]] = []  # of readers that do not wait
        self._closed_by = ""
        self._error: BaseException | None = None  # of the source
        self._trainer_waits, self._producers_wait = Stopwatch(), Stopwatch()
        self._somebody_waited = False  # and stopwatches run
        self._limit = None if lease_timeout is None else TimeLimit(self, lease_timeout)
        self._spill = None if spill is None else Spill(spill)
        self._recover_all(0)

    def lease(self) -> LeaseRequest:
        """Wait for the next item of the source, in ``async with`` or, in a thread, in ``with``.

        The block is given an :class:`AsyncLease` or a :class:`Lease`. If it ends without samples, the item is leased
        again; if an error or nothing at all ended it, that counts as a failure.

        Raises:
            FeedClosedError: if there will be no more items, on entering the block.
            ConfigurationError: if the feed has no source.
        """
        self._check_source()
        return LeaseRequest(self)

    def leases(self) -> Leases:
        """Iterate over leases, with ``async for`` or, in a thread, with ``for``, until there will be no more items.

        Each lease is for an ``async with`` block, or a ``with`` block, in this task or thread or another one. If the
        feed is closed meanwhile, a put raises FeedClosedError, which ends the block and goes no further.

        Raises:
            ConfigurationError: if the feed has no source.
        """
        self._check_source()
        return Leases(self)

    def put(
        self, samples: Any, *, version: int | None = None, cost: float | None = None, priority: float = 0.0
    ) -> Coroutine[Any, Any, Any]:
        """Put a sample, or the list of a group, that was made without a lease; wait until there is room.

        Args:
            samples: One sample; with ``group_size`` a list of so many.
            version: The version of the weights that made them, the oldest of them; by default that of the feed at the
                call, not when there is room.
            cost: The cost of all of them, tokens for example; by default their number.
            priority: With ``order="priority"``: those with more come first.

        Raises:
            FeedClosedError: if the feed is closed.
            ValueError: if the feed cannot take them.
        """
        return self._until(self._putting([samples], version, cost, priority), self._putters)

    def put_many(self, many: Iterable[Any], *, version: int | None = None) -> Coroutine[Any, Any, Any]:
        """Put many samples, or groups, one after the other: see `put`. Those before an error are put."""
        return self._until(self._putting(list(many), version, None, 0.0), self._putters)

    def put_nowait(
        self, samples: Any, *, version: int | None = None, cost: float | None = None, priority: float = 0.0
    ) -> None:
        """Put a sample, or a group, without waiting: see `put`. In any thread.

        Raises:
            FeedFullError: if there is no room.
        """
        putting = self._putting([samples], version, cost, priority)
        with Change(self):
            if self._putters or putting() is None:
                raise FeedFullError(f"there are {len(self._ledger.units)} samples or groups that are not trained yet")

    def put_sync(
        self,
        samples: Any,
        *,
        version: int | None = None,
        cost: float | None = None,
        priority: float = 0.0,
        timeout: float | None = None,
    ) -> None:
        """Put a sample, or a group, from a thread, which waits until there is room: see `put`.

        Args:
            samples: As in `put`.
            version: As in `put`.
            cost: As in `put`.
            priority: As in `put`.
            timeout: How long to wait, in seconds; None for ever.

        Raises:
            FeedFullError: if there was no room in time.
        """
        if self._until_sync(self._putting([samples], version, cost, priority), self._putters, timeout) is None:
            raise FeedFullError(f"there was no room for another sample within {timeout} s")

    def _putting(
        self, many: list[Any], version: int | None, cost: float | None, priority: float
    ) -> Callable[[], object | None]:
        """Return what puts these, as far as there is room, with the lock held; the function returns None if not all."""
        left = deque(many)
        # Whoever waits for room waits while weights are updated: the sample was made with those of before.
        made_with = self._ledger.version if version is None else version

        def put() -> object | None:
            while left:
                self._check_open()
                # A state that was loaded meanwhile may have taken the version back.
                own = min(made_with, self._ledger.version) if version is None else made_with
                unit = self._checked(left[0], own, cost, priority)
                if not self._ledger.has_room:
                    return None
                self._write("put", self._pushed, unit)
                self._ledger.put(*unit, number=self._pushed)
                self._pushed += 1
                left.popleft()
            return True

        return put

    def _checked(
        self, samples: Any, version: int, cost: float | None, priority: float
    ) -> tuple[list[Any], int, float, float]:
        """Return the samples of a unit as a list, their version, their cost, and their priority.

        Raises:
            ValueError: for what no feed like this can take.
        """
        if self.group_size is None:
            samples = [samples]
        elif not isinstance(samples, (list, tuple)) or len(samples) != self.group_size:
            got = f"{len(samples)}" if isinstance(samples, (list, tuple)) else f"a {type(samples).__name__}"
            raise ValueError(f"a group is a list of {self.group_size} samples (group_size), but got {got}")
        if isinstance(version, bool) or not isinstance(version, int) or not 0 <= version <= self._ledger.version:
            raise ValueError(
                f"version should be an integer from 0 to that of the feed, {self._ledger.version}, but got {version!r}"
            )
        most, order = self._ledger.rules.max_cost, self._ledger.rules.order
        if most is not None and (cost is None or _checked_cost(cost) > most):
            raise ValueError(f"cost should be at most max_cost, {most}, but got {cost!r}")
        cost = float(len(samples)) if cost is None else _checked_cost(cost)
        if (priority := _checked_priority(priority)) and order != "priority":
            raise ValueError(f'priority is for order="priority": with {order!r} it has no effect')
        return list(samples), version, cost, priority

    def check_process(self) -> None:
        """See that this is not a fork's copy of the feed: the trainer would hear nothing of what is put there.

        Raises:
            RuntimeError: if it is.
        """
        if self._process != generation():
            raise RuntimeError(
                "this feed is in another process, of which this one is a fork: call feed.handle() there, and give the "
                "handle to this process"
            )

    def _check_source(self) -> None:
        if self._source is None:
            raise ConfigurationError("there is nothing to lease: the feed was made without a source")

    def _try_lease(self, take: Callable[[Leased], object]) -> Unit | None:
        ledger = self._ledger
        self._check_open()
        unit = ledger.lease() if ledger.pending else None
        assert self._source is not None
        while unit is None and ledger.has_room and not (ledger.source_over or self._source.waits):
            unit = self._lease_next(self._source)
        if unit is None and ledger.is_settled:
            raise closed(self.address, "the source has ended, and all its items are settled")
        if unit is not None:
            assert unit.lease is not None
            if self._limit is not None:
                self._limit.begin(unit.lease)
            take(Leased(unit.id, unit.item, unit.version, unit.tries, unit.lease))
        return unit

    def _lease_next(self, source: PlainSource | StreamSource) -> Unit | None:
        """Lease the next item; None if it is not there, or there is none, or if its samples were put before a crash."""
        ledger = self._ledger
        try:
            item = source.draw(self._call_source)
        except StopIteration:
            ledger.source_over = True
            return None
        except Exception as error:
            self._fail(error)
            raise
        if item is WAITS:
            return None
        unit = ledger.lease(item, source.drawn - 1)
        return None if self._recover(unit) else unit

    def _call_out(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a call of the user's code returns, with the lock held: it cannot use the feed.

        A signal may interrupt it. When it has returned, that waits until the lock is let go.
        """
        _, results, error = self._let_in(call, *arguments)
        if error is not None:
            raise error
        return results[0]

    def _call_source(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a call of the source's code returns. If it is interrupted, an item may be lost: the feed ends."""
        has_begun, results, error = self._let_in(call, *arguments)
        if error is not None:
            if has_begun and not isinstance(error, Exception):
                self._fail(error)
            raise error
        return results[0]

    def _let_in(self, call: Callable[..., Any], *arguments: Any) -> tuple[bool, list[Any], BaseException | None]:
        self._called_out_in = threading.get_ident()
        try:
            return self._handlers.let_in(call, *arguments)
        finally:
            self._called_out_in = 0

    def _fail(self, error: BaseException) -> None:
        """Close the feed, because its source has raised."""
        assert self._source is not None
        self._error, self._ledger.closed = error, True
        self._closed_by = f"its source has raised {type(error).__name__}"
        self._source.close()

    def _recover(self, unit: Unit) -> bool:
        """Settle a lease by what was put for its item before a crash; return whether there was something."""
        found: Any = ... if self._spill is None else self._spill.read("item", unit.number)
        if found is ...:
            return False
        assert unit.lease is not None
        if found is None:
            self._ledger.drop(unit.lease)
        else:
            self._ledger.put(*self._as_of_now(*found), unit.lease)
        return True

    def _as_of_now(
        self, samples: list[Any], version: int, cost: float, priority: float
    ) -> tuple[list[Any], int, float, float]:
        """Return what was put with a version that a resumed run has not come to as if it had this run's version.

        The weights of that version are gone. The bound, and ages, know no samples from the future.
        """
        return samples, min(version, self._ledger.version), cost, priority

    def _recover_all(self, pushed: int) -> None:
        """Take what was put before a crash, and after a state: without leases from a number on, and for its items."""
        self._pushed = pushed
        if self._spill is None:
            return
        for number in self._spill.numbers("put"):
            if number >= pushed:
                self._ledger.put(*self._as_of_now(*self._spill.read("put", number)), number=number)
                self._pushed = number + 1
        self._pushed = max(self._pushed, self._spill.pushed)
        for _ in range(len(self._ledger.pending)):
            unit = self._ledger.lease()
            if not self._recover(unit):
                assert unit.lease is not None
                self._ledger.give_back(unit.lease, failed=False)

    def _write(self, kind: Kind, number: int, content: Any) -> None:
        if self._spill is not None:
            self._spill.write(kind, number, content)

    def wait_lease(self, take: Callable[[Leased], object]) -> None:
        """Wait for a lease, in a thread, and have it taken, whatever comes then."""
        self._until_sync(partial(self._try_lease, take), self._leasers, None)

    async def await_lease(self, take: Callable[[Leased], object]) -> None:
        """Wait for a lease, and have it taken, whatever comes then."""
        await self._until(partial(self._try_lease, take), self._leasers)

    def put_leased(self, lease: int, samples: Any, version: int, cost: float | None, priority: float) -> None:
        """Put what was made under a lease."""
        with Change(self):
            self._check_open()
            unit = self._ledger.running(lease)
            content = self._checked(samples, version, cost, priority)
            self._write("item", unit.number, content)
            self._ledger.put(*content, lease)

    async def aput_leased(self, lease: int, samples: Any, version: int, cost: float | None, priority: float) -> None:
        """Put what was made under a lease: there is nothing to wait for here."""
        self.put_leased(lease, samples, version, cost, priority)

    def drop_leased(self, lease: int, cost: float | None) -> None:
        """Settle what is leased without samples."""
        cost = None if cost is None else _checked_cost(cost)
        with Change(self):
            if self._spill is not None and self._spill.is_closed:
                raise self._closed_error()
            self._write("item", self._ledger.running(lease).number, None)
            self._ledger.drop(lease, cost)

    def give_back(self, lease: int, *, failed: bool) -> None:
        """Give a lease back, in any thread; also inside the garbage collector, while this thread has the lock."""
        self._soon(partial(self._ledger.give_back, lease, failed=failed))

    # ------------------------------------------------------------------------------------------------------ waiting

    async def _until(self, attempt: Callable[[], Any], waiters: Waiters, *, in_turn: bool = True) -> Any:
        """Return what an attempt returns, with the lock held, when that is not None. Attempts are made in turn."""
        waiter = None
        try:
            while True:
                with Change(self):
                    if (waiter is not None or not waiters or not in_turn) and (found := attempt()) is not None:
                        return found
                    waiters[waiter := TaskWaiter()] = None
                await waiter.future
        except BaseException:
            self._soon(partial(waiters.pop, waiter, None))  # which wakes another one, if this one was woken
            raise

    def _until_sync(
        self, attempt: Callable[[], Any], waiters: Waiters, timeout: float | None, *, in_turn: bool = True
    ) -> Any:
        """Do as `_until`, in a thread; return None if that takes too long. Seconds."""
        deadline = None if timeout is None else monotonic() + timeout
        waiter = None
        try:
            while True:
                with Change(self):
                    if (waiter is not None or not waiters or not in_turn) and (found := attempt()) is not None:
                        return found
                    waiters[waiter := ThreadWaiter()] = None
                if not waiter.wait(None if deadline is None else max(0.0, deadline - monotonic())):
                    break
        except BaseException:
            self._soon(partial(waiters.pop, waiter, None))
            raise
        self._soon(partial(waiters.pop, waiter, None))
        return None

    def _soon(self, call: Callable[[], object]) -> None:
        """Have this be done with the lock held: now, or by who has it. In any thread, and in the garbage collector."""
        self._afterwards.append(call)
        with HandlersWait():
            if self._lock.acquire(blocking=False):
                self.let_go()

    def let_go(self) -> None:
        """Let go of the lock; wake those who can go on."""
        is_mine = True
        while is_mine:
            try:
                while self._afterwards:
                    self._afterwards.popleft()()
                wakes = self._wakes()
            finally:
                self._lock.release()
            # Where a loop was closed in this moment, what woke its task is another one's turn. Whoever has the lock by
            # now will see to that, and to what is to be done.
            is_mine = (wake_all(wakes) or bool(self._afterwards)) and self._lock.acquire(blocking=False)

    def _wakes(self) -> list[Callable[[], object]]:
        """Return what wakes those who can go on, with the lock held; to be called without it."""
        wakes, self._woken = self._woken, []
        if not (self._leasers or self._putters or self._tells or self._readers or self._somebody_waited):
            return wakes
        ledger = self._ledger
        if self._leasers or self._putters:
            room = max(0, ledger.rules.limit - len(ledger.units))
            no_items = ledger.source_over or (self._source is not None and self._source.waits)
            items = len(ledger.pending) + (0 if no_items else room)
            everybody = len(self._leasers) + len(self._putters)
            wakes += first(self._leasers, everybody if ledger.is_settled else items)
            wakes += first(self._putters, everybody if ledger.closed or ledger.ended else room)
        if (self._tells or self._readers) and (ledger.can_take() or ledger.is_over):
            wakes += first(self._readers, len(self._readers))
            wakes += self._tells
            self._tells.clear()
        self._somebody_waited = bool(self._leasers or self._putters or self._tells or self._readers)
        self._producers_wait.turn(bool(self._leasers or self._putters))
        self._trainer_waits.turn(bool(self._tells or self._readers) and ledger.done == ledger.formed)
        return wakes

    def _check_open(self) -> None:
        if self._ledger.closed:
            raise self._closed_error()
        if self._ledger.ended:
            raise closed(self.address, "the feed takes no more: its source has ended, and the trainer was told so")

    def _closed_error(self) -> FeedClosedError:
        return closed(self.address, f"the feed takes no more: {self._closed_by}", self._error)


def _item_came(feed: weakref.ref[Intake]) -> None:
    """Have those who wait for a lease look again. In the thread that reads the source."""
    if (alive := feed()) is not None:
        with Change(alive):
            assert alive._source is not None
            alive._source.waits = False


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) or isinstance(value, SupportsFloat)  # which takes 10 us


def _checked_cost(cost: Any) -> float:
    if not _is_number(cost) or not 0 <= (checked := float(cost)) < math.inf:
        raise ValueError(f"cost should be a number of at least 0, but got {cost!r}")
    return checked


def _checked_priority(priority: Any) -> float:
    if not _is_number(priority) or math.isnan(checked := float(priority)):
        raise ValueError(f"priority should be a number, but got {priority!r}")
    return checked


class Change:
    """A change of a feed, with its lock held: ``with Change(feed):``. Wakes those who can go on by it.

    Handlers of signals wait from before the lock is taken until those were woken.

    Args:
        feed: Is changed.
    """

    __slots__ = ("_feed", "_handlers")

    def __init__(self, feed: Intake) -> None:
        self._feed = feed
        self._handlers = HandlersWait()

    def __enter__(self) -> None:
        """Take the lock.

        Raises:
            RuntimeError: if this thread has it, or this process is a fork.
        """
        feed = self._feed
        feed.check_process()
        if (thread := feed._called_out_in) and thread == threading.get_ident():
            raise RuntimeError(
                "a source that is read under the lock of its feed cannot use the feed: give the feed a function that "
                "returns the source, which is then read in a thread of its own"
            )
        self._handlers.begin()
        while not feed._lock.acquire(timeout=_LOOK_S):
            self._handlers.end()
            self._handlers.begin()
        feed._handlers = self._handlers

    def __exit__(self, *exc_info: object) -> None:
        try:
            self._feed.let_go()
        finally:
            self._handlers.end()
