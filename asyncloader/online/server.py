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
import io
import math
import pickle
import secrets
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from time import monotonic
from typing import Any, SupportsFloat, TypeAlias

from asyncloader import identity, threads
from asyncloader.datasets.records import Pickler
from asyncloader.epochs import as_number
from asyncloader.errors import StateMismatchError
from asyncloader.online.door import Door
from asyncloader.online.errors import FeedClosedError, closed
from asyncloader.online.forks import generation
from asyncloader.online.ledger import NOTHING, WAITS, Ledger, Rules, Unit
from asyncloader.online.link import VERSION, Leased, Request
from asyncloader.online.runs import Runs, Seat
from asyncloader.online.source import Source, written
from asyncloader.online.stats import FeedStats, Stopwatch
from asyncloader.signals import HandlersWait

servers: weakref.WeakSet[FeedServer] = weakref.WeakSet()
"""Those of this process."""

SampleKey: TypeAlias = tuple[int, int, int, Any]
"""A sample as the key of itself: number of its unit, its place in that, its version, and the
sample. A plain tuple is pickled in a fifth of the time that a class of our own takes."""


class FeedServer:
    """A feed inside: decides by its ledger, and has those wait who have to. In any thread.

    Args:
        source: The items to lease; None for no leases.
        rules: The rules of its ledger.
        group_size: Samples of a unit; None for single ones.
        lease_timeout: How long a lease lasts, in seconds; None for ever.

    Attributes:
        ledger: Decides.
        identity: What states belong to.
    """

    def __init__(self, source: Any, rules: Rules, group_size: int | None, lease_timeout: float | None) -> None:
        self.ledger: Ledger = Ledger(rules)
        self._runs = Runs(self.ledger)
        self.identity: dict[str, Any] = {"kind": "Feed", "group_size": group_size, "has_source": source is not None}
        self._group_size = group_size
        self._process = generation()
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

    def settle(self, request: Request, lease: int, made: tuple[Any, int, Any, Any, bool] | None) -> None:
        """Settle what is leased: by samples with version, cost, priority, and whether they are parts; or by none."""
        with Change(self):
            if made is None:
                self.ledger.drop(lease)
            else:
                self._check_open()
                self.ledger.running(lease)
                self.ledger.put(*self._checked(*made), lease)
            self._deadlines.pop(lease, None)
            self._answer(request, True)

    def hand_over(self, request: Request, lease: int, partial: Any) -> None:
        """Have what is leased be leased again, as something that is partly made."""
        with Change(self):
            self.ledger.running(lease)
            self.ledger.give_back(lease, failed=False, partial=partial)
            self._deadlines.pop(lease, None)
            self._answer(request, True)

    def renew(self, request: Request, lease: int) -> None:
        """Have the time limit of a lease begin again."""
        with Change(self):
            self.ledger.running(lease)
            self._limit(lease)
            self._answer(request, None)

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

    def pause(self, request: Request, is_paused: bool) -> None:
        """Lease nothing, from now on or no more."""
        with Change(self):
            self._is_paused = is_paused
            self._answer(request, None)

    def put(self, request: Request, units: list[tuple[Any, int, bool, float | None, float]]) -> None:
        """Put units, one after the other, as far as there is room: for one at least, or an error.

        The answer is how many are in, and the error of the one that follows. What comes after that is not looked at.

        Whoever waits for room waits while weights are updated: the samples were made with those of before. But a state
        that was loaded meanwhile may have taken the version back.
        """
        request.num_producers = len(units)

        def attempt() -> Any:
            for count, (samples, version, is_default, cost, priority) in enumerate(units):
                try:
                    self._check_open()
                    own = min(version, self.ledger.version) if is_default else version
                    unit = self._checked(samples, own, cost, priority)
                except Exception as error:
                    return count, _portable(error)
                if not self.ledger.has_room:
                    return (count, None) if count else WAITS
                self.ledger.put(*unit)
            return len(units), None

        self._wait(request, self._putters, attempt)

    def begin(self, request: Request, seat: Seat, given: Callable[[], int]) -> None:
        """Give batches to an iterator from now on, when all seats have begun: first those that none was given.

        Args:
            request: The answer is the number of the iterator.
            seat: Where it is.
            given: Counts its batches that the consumer was given, without a lock.
        """
        with Change(self):
            self._answer(request, self._runs.begin(seat, given))
            if self._door is not None and self.has_begun:  # until now a trainer may come after the main thread's end
                self._door.end_at_exit()

    def asked(self, request: Request, reader: int, given: Callable[[], int]) -> None:
        """Note that a consumer asks for its next batch: those that all were given are trained."""
        with Change(self):
            self._runs.asked(reader, given)
            self._answer(request, None)

    def leave(self, reader: int) -> None:
        """Note that the process of an iterator has ended."""
        with Change(self):
            self._runs.leave(reader)

    def step(self, request: Request, reader: int, number: int) -> None:
        """Take an iterator's part of a batch: keys of samples; None at the end. It is formed now if it is the next."""
        self._wait(request, self._readers, partial(self._part, reader, number))

    def state(self, request: Request, reader: int = -1, step: int = 0) -> None:
        """Take the state before a step of an iterator; of one that is given nothing, as the next one would begin."""
        with Change(self):
            number = self._runs.position(reader, step)
            write = self.ledger.state(number)
            life = self._life
            place = None if self._source is None else self._source.place()
        units = write()
        # As values, and no pickle: whoever trusts a file can tell by torch.load. In a tuple, which
        # torch.distributed.checkpoint does not look into, so the keys of two states are the same.
        state = {
            "version": 1,
            "id": f"{life}-{number}",
            **self.identity,
            "life": life,
            "source": None if place is None else written(place),
            "units": ({**units, "units": _copied(units["units"])},),
        }
        request.answer(state)

    def load(self, request: Request, loaded: dict[str, Any]) -> None:
        """Go on from a state, in place of what there is.

        Raises:
            StateMismatchError: if the state is of something else, or would lose what was put.
        """
        identity.check(loaded, self.identity)
        (units,) = loaded["units"]
        units = {**units, "units": _copied(units["units"])}  # the state stays as it is
        with Change(self):
            self._check_keeps_all(loaded["life"], units["next_id"])
            if self._source is not None:
                self._source.load_state_dict(loaded["source"])
            self.ledger.load(units)
            self._runs.end()
            self._deadlines.clear()
            self._begin_life()
            self._answer(request, None)

    def update(self, request: Request, version: int) -> None:
        """Note that the weights were updated."""
        with Change(self):
            now = self.ledger.version
            if (number := _as_version(version)) is None or number < now:
                raise ValueError(f"version should be an integer that does not go back from {now}, but got {version!r}")
            self.ledger.set_version(number)
            self._answer(request, None)

    def withdraw(self, request: Request) -> None:
        """Have a call that waits be answered now, by None: nothing has come of it."""
        with Change(self):
            for waiting in (self._leasers, self._putters, self._readers, self._watchers.get(request.watches, [])):
                if request in waiting:
                    waiting.remove(request)
                    self._answer(request, None)

    def give_back(self, lease: int, *, failed: bool) -> None:
        """Have what is leased be leased again. Also inside the garbage collector, while this thread has the lock."""
        self._soon(partial(self.ledger.give_back, lease, failed=failed))

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
        most, order = self.ledger.rules.max_cost, self.ledger.rules.order
        if most is not None and (cost is None or _checked_cost(cost) > most):
            raise ValueError(f"cost should be at most max_cost, {most}, but got {cost!r}")
        cost = float(len(samples)) if cost is None else _checked_cost(cost)
        if not _is_number(priority) or math.isnan(priority := float(priority)):
            raise ValueError(f"priority should be a number, but got {priority!r}")
        if priority and order != "priority":
            raise ValueError(f'priority is for order="priority": with {order!r} it has no effect')
        return list(samples), number, cost, priority

    def _try_lease(self) -> Any:
        ledger, source = self.ledger, self._source
        assert source is not None
        if ledger.closed:
            raise self._closed_error()
        if self._is_paused:
            return WAITS
        unit = ledger.lease() if ledger.pending and not ledger.ended else None
        # After the end there may be items again: another loop may find that prefetched samples are too old by now.
        while unit is None and ledger.has_room and not (ledger.ended or ledger.source_over or source.waits):
            unit = self._lease_next(source)
        if unit is None or unit.lease is None:
            if ledger.is_settled:
                raise closed(self.address, "the source has ended, and all its items are settled")
            return WAITS
        self._limit(unit.lease)
        return Leased(self, unit.lease, unit.id, unit.value, unit.version, unit.tries)

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
            self._fail(source, error)
            raise
        return None if item is WAITS else self.ledger.lease(item)

    def _fail(self, source: Source, error: Exception) -> None:
        """Close the feed, because its source has raised."""
        self._error, self.ledger.closed = error, True
        with contextlib.suppress(Exception):  # the frames that the error itself is raised through refer to the server
            self._error = copy.copy(error)
        self._closed_by = f"its source has raised {type(error).__name__}"
        source.close()
        self._end_limits()

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

    @property
    def address(self) -> str:
        """Tells it from other feeds, in other processes as well, once there is a door."""
        return str(id(self)) if self._door is None else self._door.path

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

    def why_no_keys(self, request: Request, in_vain: bool) -> None:
        """Say what the next batch waits for; "" if that has to be in vain, and some producer has a lease."""
        with Change(self):
            ready, size, leased = self.ledger.num_ready, self.ledger.rules.size, self.ledger.num_running
            producers = f"producers have leases of {leased}" if leased else "no producer has a lease"
            producers += ", and it is paused" * self._is_paused
            if coming := self._runs.coming:
                producers = f"only {len(coming)} processes of the training have begun, and {producers}"
            why = f"its feed has {ready} of {size} samples or groups, and {producers}"
            self._answer(request, "" if in_vain and leased and not coming else why)

    def _check_keeps_all(self, life: str, next_id: int) -> None:
        """See that nothing is lost that waits, and was put without a lease, by a state of this life or another one."""
        first = max(self._first_id, next_id if life == self._life else 0)
        lost = sum(unit.item is NOTHING and unit.id >= first for unit in self.ledger.units.values())
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

    def shut(self, request: Request, reason: str) -> None:
        """Take no more samples, and lease no more items."""
        self.close(reason)
        request.answer(None)

    def close(self, reason: str) -> None:
        """Take no more samples, and lease no more items."""
        if self._process == generation():
            with Change(self):
                self._close(reason)

    def _close(self, reason: str) -> None:
        self._closed_by = self._closed_by or reason
        self.ledger.closed = True
        if self._source is not None:
            self._source.close()
        self._end_limits()
        if self._door is not None:
            self._door.close()

    def _end_limits(self) -> None:
        """Look no more, because nothing is put any more."""
        if self._timer is not None:
            self._timer.cancel()

    def end_with_program(self) -> None:
        """Close the feed if its loader has begun, and has ended with all who train: producers would wait for ever."""
        if self.has_begun:
            self._soon(partial(self._close, "the program that trains comes to its end"))

    def end_untrained(self) -> None:
        """Close the feed if its loader has not begun, and nobody is left who could have it begin."""
        if not self.has_begun:
            self._soon(partial(self._close, "the program comes to its end, and has not trained on this feed"))

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
                self.ledger.give_back(lease, failed=True)
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

    def stats(self, request: Request) -> None:
        """Say what became of the samples so far."""
        with Change(self):
            handles = 0 if self._door is None else self._door.num_connections
            waits = self._trainer_waits.total_s, self._producers_wait.total_s
            waiting = sum(request.num_producers for request in (*self._leasers, *self._putters))
            self._answer(request, FeedStats.of(self.ledger, handles, waiting, *waits))

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
        vars(request).pop("attempt", None)  # which refers to the server
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
                queue = min(queues, key=_came)  # all of them need room
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


def _came(requests: deque[Request]) -> int:
    return requests[0].number


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


def _copied(units: list[Any]) -> list[Any]:
    """Return a copy of units, in which views of tensors are cut out of the memory around them.

    One unit after the other, so that other threads of the interpreter have their turn; what units share stays shared.
    """
    file, copies = io.BytesIO(), []
    pickler, unpickler = Pickler(file, protocol=5), pickle.Unpickler(file)
    for unit in units:
        file.seek(0)
        pickler.dump(unit)
        file.truncate()
        file.seek(0)
        copies.append(unpickler.load())
    return copies


def _portable(error: Exception) -> Exception:
    """Return an error that can travel with others, without the frames that it was raised in."""
    if type(error) in (ValueError, FeedClosedError):
        return error.with_traceback(None)
    return RuntimeError(f"{type(error).__name__}: {error}")


def _as_version(value: Any) -> int | None:
    """Return an integer of any kind as Python's own, since states have it; None if it is none."""
    return None if isinstance(value, bool) else as_number(value)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) or isinstance(value, SupportsFloat)  # which takes 10 us


def _checked_cost(cost: Any) -> float:
    if not _is_number(cost) or not 0 <= (checked := float(cost)) < math.inf:
        raise ValueError(f"cost should be a number of at least 0, but got {cost!r}")
    return checked
