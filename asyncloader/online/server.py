"""Server: a feed inside. Its calls come from any thread of this process, or from others by the door.

    producers   lease, settle, put ──┐
                                     ├──> Ledger, under one lock ──> answers, once the lock was let go
    loaders     step, state ─────────┘    those who wait, in turn

A call that cannot be answered waits, and is answered when another one has changed the ledger. Nobody is called back
with the lock held, and none of the user's code runs then: samples are copied behind it, and the source is read by a
thread. Handlers of signals wait meanwhile: a Ctrl-C comes before a change or after it, and leaves nothing
half done.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import secrets
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from time import monotonic
from typing import Any, SupportsFloat, TypeAlias

from asyncloader import identity, threads
from asyncloader.datasets.records import Pickles
from asyncloader.epochs import as_number
from asyncloader.errors import ConfigurationError, StateMismatchError
from asyncloader.online.door import Client, Door
from asyncloader.online.errors import FeedClosedError, closed
from asyncloader.online.forks import generation
from asyncloader.online.ledger import OUTCOMES, WAITS, Ledger, Rules, Unit
from asyncloader.online.link import VERSION, Item, Leased, Request
from asyncloader.online.runs import Runs, Seat
from asyncloader.online.source import Source, written
from asyncloader.online.stats import FeedStats, Stopwatch
from asyncloader.signals import HandlersWait

MOST_AHEAD = 1024
"""Units that a process puts before it hears of them."""

servers: weakref.WeakSet[FeedServer] = weakref.WeakSet()
"""Those of this process."""

SampleKey: TypeAlias = tuple[int, int, int, Any]
"""A sample as the key of itself: number of its unit, its place in that, its version, and the
sample. A plain tuple is pickled in a fifth of the time that a class of our own takes."""


def _decided(decide: Callable[..., Any]) -> Callable[..., None]:
    """Make a call of a method that decides with the lock held, and returns the answer."""

    @functools.wraps(decide)
    def call(server: FeedServer, request: Request, *arguments: Any) -> None:
        with Change(server):
            server._answer(request, decide(server, *arguments))

    return call


class FeedServer:
    """A feed inside: decides by its ledger, and has those wait who have to. In any thread.

    Args:
        source: The items to lease; None for no leases.
        rules: The rules of its ledger.
        group_size: Samples of a unit; None for single ones.
        lease_timeout: How long a lease lasts, in seconds; None for ever.

    Attributes:
        address: Tells the feed from others, in all processes.
        ledger: Decides.
        identity: What states belong to.
        clients: Those of other processes.
    """

    def __init__(self, source: Any, rules: Rules, group_size: int | None, lease_timeout: float | None) -> None:
        self.ledger: Ledger = Ledger(rules)
        self._runs = Runs(self.ledger)
        self.identity: dict[str, Any] = {"kind": "Feed", "group_size": group_size, "has_source": source is not None}
        self._group_size = group_size
        self._process = generation()
        self.address: str = secrets.token_hex(8)
        this = weakref.ref(self)
        self._source = None if source is None else Source(source, partial(_item_came, this), partial(_may_begin, this))
        self._lock = threading.Lock()
        self._afterwards: deque[Callable[[], object]] = deque()  # what is to be done before the lock is let go
        self._answered: list[Request] = []  # what is told when the lock was let go
        self._leasers: deque[Request] = deque()
        self._putters: deque[Request] = deque()
        self._readers: list[Request] = []
        self._watchers: dict[int | None, list[Request]] = {}  # by what they watch
        self._seen: Any = ()  # by all of them
        self._is_paused = False
        self._closed_by = ""
        self._error: Exception | None = None  # of the source
        self._trainer_waits, self._producers_wait = Stopwatch(), Stopwatch()
        self._timer: threading.Timer | None = None
        self._due = math.inf  # when it looks
        self._lease_timeout = lease_timeout or math.inf
        self._deadlines: dict[int, float] = {}  # of leases, the oldest first
        self._door: Door | None = None
        self.clients: weakref.WeakSet[Client] = weakref.WeakSet()
        self._begin_life()
        servers.add(self)
        threads.awaited.add(self)

    def _begin_life(self) -> None:
        """Begin anew, or with a state that was loaded: states name what they were taken of."""
        self._life, self._first_id = secrets.token_hex(8), self.ledger.next_id

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

    # --------------------------------------------------------------------------------------------------------- calls

    @property
    def version(self) -> int:
        """The version of the weights."""
        self.check_process()
        return self.ledger.version

    def call(self, request: Request, name: str, *arguments: Any) -> None:
        """Make one of the calls that follow."""
        try:
            getattr(self, name)(request, *arguments)
        except Exception as error:
            request.answer(None, error)

    def lease(self, request: Request) -> None:
        """Lease the next item."""
        self._wait(request, self._leasers, self._try_lease)

    @_decided
    def settle(self, lease: int, made: tuple[Any, int, Any, Any, bool] | None) -> bool:
        """Settle what is leased: by samples with version, cost, priority, and whether they are parts; or by none."""
        if made is None:
            self.ledger.drop(lease)
        else:
            self._check_open()
            self.ledger.running(lease)
            self.ledger.put(*self._checked(*made), lease)
        self._deadlines.pop(lease, None)
        return True

    @_decided
    def renew(self, lease: int) -> None:
        """Have the time limit of a lease begin again."""
        self.ledger.running(lease)
        self._limit(lease)

    def lost(self, request: Request, lease: int) -> None:
        """Wait until nobody would take what is made of a lease; the answer says why."""
        self._watch(request, lease, lambda: self.ledger.why_lost(lease) or WAITS)

    def version_changed(self, request: Request, version: int) -> None:
        """Wait until the weights have another version than this one, which is the answer."""

        def attempt() -> Any:
            if self.ledger.version != version:
                return self.ledger.version
            self._check_open()
            return WAITS

        self._watch(request, VERSION, attempt)

    @_decided
    def pause(self, is_paused: bool) -> None:
        """Lease nothing, from now on or no more."""
        self._is_paused = is_paused

    def put(self, request: Request, units: Iterable[tuple[Any, ...] | Exception]) -> None:
        """Put units, one after the other, as soon as there is room. Those that are wrong are left out.

        The answer is for how many more units of this process there is room, or the error of the first wrong unit.

        Whoever waits for room waits while weights are updated: the samples were made with those of before. But a state
        that was loaded meanwhile may have taken the version back.
        """
        left, errors = deque(units), list[Exception]()

        def attempt() -> Any:
            room = 0
            while left:
                try:
                    self._check_open()
                    unit = self._put_unit(left[0])
                    room = room or self.ledger.room
                    if not room:
                        return WAITS
                    self.ledger.put(*unit)
                    room -= 1
                except Exception as error:
                    errors.append(error.with_traceback(None))
                left.popleft()
            if errors:
                raise errors[0]
            return self._num_ahead()

        self._wait(request, self._putters, attempt)

    def _put_unit(self, unit: tuple[Any, ...] | Exception) -> tuple[list[Any], int, float, float]:
        if isinstance(unit, Exception):
            raise unit
        samples, version, is_default, cost, priority = unit
        return self._checked(samples, min(version, self.ledger.version) if is_default else version, cost, priority)

    def _num_ahead(self) -> int:
        """Return how many units a process may put before it hears of them: its share of the room there is."""
        if self.ledger.closed or not (room := self.ledger.room):
            return 0
        return min(MOST_AHEAD, max(1, room // max(1, len(self.clients))))

    @_decided
    def begin(self, seat: Seat, given: Callable[[], int]) -> int:
        """Give batches to an iterator from now on, when all seats have begun: first those that none was given.

        Args:
            seat: Where it is.
            given: Counts its batches that the consumer was given, without a lock.

        Returns:
            int: The number of the iterator.
        """
        number = self._runs.begin(seat, given)
        if self._door is not None and self.has_begun:  # until now a trainer may come after the main thread's end
            self._door.end_at_exit()
        return number

    @_decided
    def asked(self, reader: int, given: Callable[[], int]) -> None:
        """Note that a consumer asks for its next batch: those that all were given are trained."""
        self._runs.asked(reader, given)

    def dropped(self, reader: int, given: Callable[[], int]) -> None:
        """Note how many batches the consumer of an iterator was given in all. Also inside the garbage collector."""
        self._soon(partial(self._runs.count, reader, given))

    def leave(self, reader: int) -> None:
        """Note that the process of an iterator has ended."""
        self._soon(partial(self._runs.leave, reader))

    def step(self, request: Request, reader: int, number: int) -> None:
        """Take an iterator's part of a batch: keys of samples; None at the end. It is formed now if it is the next."""
        self._wait(request, self._readers, partial(self._part, reader, number))

    def state(self, request: Request, *where: int) -> None:
        """Take the state before a step of an iterator; of one that is given nothing, as the next one would begin."""
        state = self.write_state(*where)
        (units,) = state["units"]
        units["units"] = units["units"].copied()
        request.answer(state)

    def write_state(self, reader: int = -1, step: int = 0) -> dict[str, Any]:
        """Return a state with its units as pickles, which takes its time: others go on meanwhile."""
        with Change(self):
            number = self._runs.position(reader, step)
            write = self.ledger.state(number)
            life = self._life
            place = None if self._source is None else self._source.place()
        units = write()
        # As values, and no pickle: whoever trusts a file can tell by torch.load. In a tuple, which
        # torch.distributed.checkpoint does not look into, so the keys of two states are the same.
        return {
            "version": 1,
            "id": f"{life}-{number}",
            **self.identity,
            "life": life,
            "source": None if place is None else written(place),
            "units": ({**units, "units": Pickles(units["units"])},),
        }

    def load(self, request: Request, loaded: dict[str, Any]) -> None:
        """Go on from a state, in place of what there is.

        Raises:
            StateMismatchError: if the state is of something else, or would lose what was put.
        """
        identity.check(loaded, self.identity)
        (units,) = loaded["units"]
        units = {**units, "units": Pickles(units["units"]).copied()}  # the state stays as it is
        with Change(self):
            self._check_keeps_all(loaded["life"], units["next_id"])
            if self._source is not None:
                self._source.load_state_dict(loaded["source"])
            self.ledger.load(units)
            self._runs.end()
            self._deadlines.clear()
            self._begin_life()
            self._answer(request, None)

    @_decided
    def update(self, version: int) -> None:
        """Note that the weights were updated."""
        now = self.ledger.version
        if (number := _as_version(version)) is None or number < now:
            raise ValueError(f"version should be an integer that does not go back from {now}, but got {version!r}")
        self.ledger.set_version(number)

    def withdraw(self, request: Request) -> None:
        """Have a call that waits be answered now, by None: nothing has come of it."""
        with Change(self):
            for waiting in (self._leasers, self._putters, self._readers, self._watchers.get(request.watches, [])):
                if request in waiting:
                    waiting.remove(request)
                    self._answer(request, None)

    def give_back(self, lease: int, failed: bool, *made: Any) -> None:
        """Have what is leased be leased again. Also inside the garbage collector, while this thread has the lock."""
        self._soon(partial(self.ledger.give_back, lease, failed, *made))

    # ----------------------------------------------------------------------------------------------------- producers

    def _checked(
        self, samples: Any, version: int, cost: float | None, priority: float, in_parts: bool = False
    ) -> tuple[list[Any], int, float, float]:
        """Return the samples of a unit as a list, their version, their cost, and their priority.

        Raises:
            ValueError: for what no feed like this can take.
        """
        if self._group_size is None:
            samples = samples if in_parts else [samples]
        elif not isinstance(samples, (list, tuple)) or len(samples) != self._group_size:
            got = f"{len(samples)}" if isinstance(samples, (list, tuple)) else f"a {type(samples).__name__}"
            raise ValueError(f"a group is a list of {self._group_size} samples (group_size), but got {got}")
        number = _as_version(version)
        if number is None or not 0 <= number <= self.ledger.version:
            raise ValueError(
                f"version should be an integer from 0 to that of the feed, {self.ledger.version}, but got {version!r}"
            )
        checked = float(len(samples)) if cost is None else _as_float("cost", cost, least=0.0)
        if (most := self.ledger.rules.max_cost) is not None and (cost is None or checked > most):
            raise ValueError(f"cost should be at most max_cost, {most}, but got {cost!r}")
        return list(samples), number, checked, _as_float("priority", priority, least=-math.inf)

    def _try_lease(self) -> Any:
        ledger, source = self.ledger, self._source
        if source is None:
            raise ConfigurationError("there is nothing to lease: the feed was made without a source")
        if ledger.closed:
            raise self._closed_error()
        if self._is_paused:
            return WAITS
        unit = ledger.lease() if ledger.pending and not ledger.ended else None
        # After the end there may be items again: another loop may find that prefetched samples are too old by now.
        while unit is None and ledger.room and not (ledger.ended or ledger.source_over or source.waits):
            unit = self._lease_next(source)
        if unit is None or unit.lease is None:
            if ledger.is_settled:
                raise closed(self.address, "the source has ended, and all its items are settled")
            return WAITS
        self._limit(unit.lease)
        return Leased(self, Item(unit.lease, unit.id, unit.value, unit.version, unit.tries))

    def _limit(self, lease: int) -> None:
        """Have a lease end when its time is up, from now on."""
        if self._lease_timeout < math.inf:
            self._deadlines.pop(lease, None)  # so the oldest stay first
            self._deadlines[lease] = due = monotonic() + self._lease_timeout
            self._look_at(due)

    def _lease_next(self, source: Source) -> Unit | None:
        """Lease the next item; None if it is not there, or there is none."""
        try:
            item = source.draw()
        except StopIteration:
            self.ledger.source_over = True
            return None
        except Exception as error:
            why, kept = f"its source has raised {type(error).__name__}", error
            with contextlib.suppress(Exception):  # the frames that the error itself is raised through refer to this
                kept = copy.copy(error)
            self._close(why, kept)
            raise
        return None if item is WAITS else self.ledger.lease(item)

    def item_came(self) -> None:
        """Have those who wait for a lease look again. In the thread that reads the source."""
        with Change(self):
            assert self._source is not None
            self._source.waits = False

    def _check_open(self) -> None:
        if self.ledger.closed:
            raise self._closed_error()
        if self.ledger.ended:
            raise closed(self.address, "the feed takes no more: its source has ended, and the trainer was told so")

    def _closed_error(self) -> FeedClosedError:
        return closed(self.address, f"the feed takes no more: {self._closed_by}", self._error)

    # -------------------------------------------------------------------------------------------------------- batches

    @property
    def has_begun(self) -> bool:
        """Whether somebody takes batches, or has: since a state was loaded, if one was."""
        return self._runs.has_begun

    def _part(self, reader: int, number: int) -> Any:
        """Return an iterator's part of a batch as keys; None at the end.

        Raises:
            FeedClosedError: at the end, if an error of the source brought that.
        """
        units = self._runs.part(reader, number)
        if units is None and self._error is not None:
            raise self._closed_error()
        return units if units is None or units is WAITS else _keys_of(units)

    @_decided
    def why_no_keys(self, in_vain: bool) -> str:
        """Say what the next batch waits for; "" if that has to be in vain, and some producer has a lease."""
        ready, size, leased = self.ledger.num_ready, self.ledger.rules.size, self.ledger.num_running
        producers = f"producers have leases of {leased}" if leased else "no producer has a lease"
        producers += ", and it is paused" * self._is_paused
        if coming := self._runs.coming:
            producers = f"only {len(coming)} processes of the training have begun, and {producers}"
        elif in_vain and leased:
            return ""
        return f"its feed has {ready} of {size} samples or groups, and {producers}"

    def _check_keeps_all(self, life: str, next_id: int) -> None:
        """See that nothing is lost that waits, and was put without a lease, by a state of this life or another one."""
        first = max(self._first_id, next_id if life == self._life else 0)
        lost = sum(not unit.item and unit.id >= first for unit in self.ledger.units.values())
        if lost:
            raise StateMismatchError(
                "the number of samples, or groups, that were put or leased",
                next_id,
                self.ledger.next_id,
                f"{lost} that wait were put without leases, are not in the state, and would be lost: load it before "
                "anything is put",
            )

    # ------------------------------------------------------------------------------------------------ the end, and time

    def open_door(self) -> Door:
        """Have other processes reach the feed.

        Raises:
            FeedClosedError: if it is closed.
        """
        with Change(self):
            if self.ledger.closed:
                raise self._closed_error()
            if self._door is None:
                self._door = Door(self)
                if self.has_begun:
                    self._door.end_at_exit()
            return self._door

    @_decided
    def shut(self, reason: str) -> None:
        """Take no more samples, and lease no more items."""
        self._close(reason)

    def close(self, reason: str) -> None:
        """Take no more samples, and lease no more items. In a fork of the process, do nothing."""
        self._soon(partial(self._close, reason))

    def _close(self, reason: str, error: Exception | None = None) -> None:
        self.ledger.closed, self._closed_by, self._error = True, self._closed_by or reason, self._error or error
        if self._source is not None:
            self._source.close()
        if self._timer is not None:  # nothing is put any more
            self._timer.cancel()

    def end_with_program(self) -> None:
        """Close the feed if its loader has begun, and has ended with all who train: producers would wait for ever."""
        if self.has_begun:
            self.close("the program that trains comes to its end")

    def waiting_threads(self) -> list[threading.Thread | None]:
        """Return the threads that wait for room, or for leases."""
        return [request.thread for request in (*threads.copied(self._leasers), *threads.copied(self._putters))]

    def look(self, now: float) -> None:
        """Give leases back whose time is up."""
        with Change(self):
            for lease, due in list(self._deadlines.items()):
                if due > now:
                    break
                del self._deadlines[lease]
                self.ledger.give_back(lease, True)
            self._due = math.inf
            self._look_at(next(iter(self._deadlines.values()), math.inf))

    def _look_at(self, due: float) -> None:
        """Look when it is time, if not before."""
        if due < self._due:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = timer = threading.Timer(max(0.0, due - monotonic()), _look, (weakref.ref(self),))
            timer.name, timer.daemon, self._due = "asyncloader feed limits", True, due
            weakref.finalize(self, timer.cancel).atexit = False
            timer.start()

    @_decided
    def stats(self) -> FeedStats:
        """Say what became of the samples so far."""
        ledger = self.ledger
        return FeedStats(
            ledger.version,
            ledger.num_running,
            len(ledger.pending),
            ledger.num_ready,
            ledger.num_in_batches,
            {name: ledger.counts[name] for name in OUTCOMES},
            dict(sorted(ledger.ages.items())),
            len(self.clients),
            len(self._leasers) + len(self._putters),
            self._trainer_waits.total_s,
            self._producers_wait.total_s,
        )

    # ------------------------------------------------------------------------------------------------------- the lock

    def _wait(self, request: Request, waiting: Any, attempt: Callable[[], Any]) -> None:
        """Have a request be answered in its turn."""
        request.attempt = attempt
        with Change(self):
            waiting.append(request)

    def _watch(self, request: Request, watched: int, attempt: Callable[[], Any]) -> None:
        """Have a request be answered when a lease has ended, or what all of them watch has changed."""
        request.attempt, request.watches = attempt, watched
        with Change(self):
            if not self._try(request):
                self._watchers.setdefault(watched, []).append(request)

    def _tell_watchers(self) -> None:
        """Answer those whose lease has ended; look at all if one of them may have something new to see."""
        ledger = self.ledger
        ended, ledger.ended_leases = ledger.ended_leases, []
        seen = ledger.version, ledger.closed, ledger.ended, self._life
        for watched in ended if seen == self._seen else tuple(self._watchers):
            left = [request for request in self._watchers.pop(watched, ()) if not self._try(request)]
            if left:
                self._watchers[watched] = left
        self._seen = seen

    def _answer(self, request: Request, answer: Any, error: Exception | None = None) -> None:
        request.outcome = answer, error
        request.attempt = None  # which refers to the server
        self._answered.append(request)

    def _try(self, request: Request) -> bool:
        """Answer a request, if that is possible now."""
        try:
            if (answer := request.attempt()) is WAITS:
                return False
            self._answer(request, answer)
        except Exception as error:  # without the frames, which refer to the server
            self._answer(request, None, error.with_traceback(None))
        return True

    def _serve(self) -> None:
        """Answer all who can be. What one is given may be what another one has waited for."""
        self._tell_watchers()
        was_answered = True
        while was_answered:
            queues = [self._leasers, self._putters]
            while queues := [queue for queue in queues if queue]:
                queue = min(queues, key=lambda queue: queue[0].number)  # all of them need room
                if self._try(queue[0]):
                    queue.popleft()
                else:
                    queues.remove(queue)
            # Also if no producer was answered: one that asks in vain learns that the source has ended.
            # In place: whoever comes next has the list in hand, and waits for the lock.
            before = len(self._readers)
            self._readers[:] = [request for request in self._readers if not self._try(request)]
            was_answered = len(self._readers) < before

    def _soon(self, call: Callable[[], object]) -> None:
        """Have this be done with the lock held: now, or by who has it. In any thread, and in the garbage collector."""
        if self._process == generation():
            self._afterwards.append(call)
            with HandlersWait():
                if self._lock.acquire(blocking=False):
                    self.let_go()

    def let_go(self) -> None:
        """Serve those who wait, and let go of the lock; then tell who was answered."""
        is_mine = True
        while is_mine:
            try:
                while self._afterwards:
                    self._afterwards.popleft()()
                self._serve()
                self._producers_wait.turn(bool(self._leasers or self._putters))
                self._trainer_waits.turn(bool(self._readers) and self.ledger.done == self.ledger.formed)
            finally:
                answered, self._answered = self._answered, []
                self._lock.release()
            for request in answered:
                request.deliver()
            # What came while somebody had the lock, who did not see it any more, is done by that one, or now.
            is_mine = bool(self._afterwards) and self._lock.acquire(blocking=False)


class Change:
    """A change of a feed, with its lock held: ``with Change(server):``. Those who can go on by it are told.

    Handlers of signals wait from before the lock is taken until they were.

    Args:
        server: Is changed.
    """

    __slots__ = ("_handlers", "_server")

    def __init__(self, server: FeedServer) -> None:
        self._server = server
        self._handlers = HandlersWait()

    def __enter__(self) -> None:
        self._server.check_process()
        self._handlers.begin()
        self._server._lock.acquire()

    def __exit__(self, *exc_info: object) -> None:
        try:
            self._server.let_go()
        finally:
            self._handlers.end()


def _look(server: weakref.ref[FeedServer]) -> None:
    if (alive := server()) is not None:
        alive.look(monotonic())


def _may_begin(reference: weakref.ref[FeedServer]) -> bool:
    """Whether a thread that is left at the end of the main one may still begin to train on a feed."""
    server = reference()
    return server is not None and not server.has_begun and bool(threads.waited_for())


def _item_came(server: weakref.ref[FeedServer]) -> None:
    if (alive := server()) is not None:
        alive.item_came()


def _keys_of(units: Iterable[Unit]) -> list[SampleKey]:
    return [(unit.id, index, unit.version, sample) for unit in units for index, sample in enumerate(unit.samples)]


def _as_version(value: Any) -> int | None:
    """Return an integer of any kind as Python's own, since states have it; None if it is none."""
    return None if isinstance(value, bool) else as_number(value)


def _as_float(name: str, value: Any, *, least: float) -> float:
    if type(value) in (int, float) or isinstance(value, SupportsFloat):  # which takes 10 us
        number = float(value)
        if least <= number < math.inf:
            return number
    raise ValueError(f"{name} should be a number of at least {least}, but got {value!r}")
