"""Server: a feed inside. Its calls come from any thread of this process, or from others by the door.

    producers   lease, settle, put ──┐                               ┌── answers, once the lock was let go
                                     ├──> Ledger, under one lock ────┤
    trainers    step, state ─────────┘    those who wait, in turn    └── spill, before an answer

A call that cannot be answered waits, and is answered when another one has changed the ledger. Nobody is called back
with the lock held, and none of the user's code runs then: samples are pickled before and behind it, and the source is
read by a thread. Handlers of signals wait meanwhile: a Ctrl-C comes before a change or after it, and leaves nothing
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
import zlib
from collections import deque
from collections.abc import Callable
from functools import partial
from os import PathLike
from time import monotonic
from typing import Any, SupportsFloat

from asyncloader import identity, threads
from asyncloader.datasets.records import Pickler, pickled
from asyncloader.errors import StateMismatchError
from asyncloader.online.door import Door
from asyncloader.online.errors import FeedClosedError, closed
from asyncloader.online.forks import generation
from asyncloader.online.keys import keys_of, other_has_begun
from asyncloader.online.ledger import NOTHING, Ledger, Rules, Unit
from asyncloader.online.link import Leased, Request
from asyncloader.online.ranks import RankPlace, Ranks, Run, Seat
from asyncloader.online.source import WAITS, Source, written
from asyncloader.online.spill import Kind, Spill
from asyncloader.online.stats import FeedStats, Stopwatch
from asyncloader.plain import as_text
from asyncloader.signals import HandlersWait


class FeedServer:
    """A feed inside: decides by its ledger, and has those wait who have to. In any thread.

    Args:
        source: The items to lease; None for no leases.
        rules: The rules of its ledger.
        group_size: Samples of a unit; None for single ones.
        lease_timeout: How long a lease lasts, in seconds; None for ever.
        spill: Folder that what is put is written to; None for none.
        num_replicas: Ranks that steps are dealt to; None for a loader of this process.
        step_timeout: How long ranks wait for a step, in seconds; None for ever.

    Attributes:
        ledger: Decides.
        run: What loaders take together now; None before, and after a state was loaded.
        identity: What states belong to.
    """

    def __init__(
        self,
        source: Any,
        rules: Rules,
        group_size: int | None,
        lease_timeout: float | None,
        spill: str | PathLike[str] | None,
        num_replicas: int | None,
        step_timeout: float | None,
    ) -> None:
        self.ledger = Ledger(rules)
        self.run: Run | None = None
        self._group_size, self._num_replicas = group_size, num_replicas
        self._process = generation()
        self._source = None if source is None else Source(source, partial(_item_came, weakref.ref(self)))
        self._lock = threading.Lock()
        self._afterwards: deque[Callable[[], object]] = deque()  # what is to be done before the lock is let go
        self._answered: list[Request] = []  # what is told when the lock was let go
        self._leasers: deque[Request] = deque()
        self._putters: deque[Request] = deque()
        self._readers: list[Request] = []
        self._closed_by = ""
        self._error: Exception | None = None  # of the source
        self._trainer_waits, self._producers_wait = Stopwatch(), Stopwatch()
        self._timer: threading.Timer | None = None
        self._due = math.inf  # when it looks
        self._lease_timeout, self._step_timeout = lease_timeout or math.inf, step_timeout or math.inf
        self._deadlines: dict[int, float] = {}  # of leases, the oldest first
        self._door: Door | None = None
        self._ranks = Ranks(num_replicas or 1)
        self._seats: dict[str, Seat] = {}
        self._first = 0  # the number of the run's first step among the batches of the ledger
        self._parts: dict[int, list[list[Unit]]] = {}  # of the steps of this run, by rank
        self._is_run_over = False
        self._loaded: tuple[str, set[int]] = ("", set())  # id of a state, and the ranks that have loaded it
        self.identity = {"kind": "Feed", "group_size": group_size, "has_source": source is not None}
        self._spill = None if spill is None else Spill(spill, self.identity)
        self._life = ""  # since it was made, or a state was loaded
        self._pushed = self._pushed_before = 0  # samples or groups that were put without a lease
        self._recover_all(0)
        threads.awaited.add(self)

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

    def settle(self, request: Request, lease: int, made: tuple[Any, int, Any, Any] | None) -> None:
        """Settle what is leased: by samples, with their version, cost and priority; or by none."""
        packed = b"" if made is None else self._packed(made[0])
        with Change(self):
            if made is None:
                self._drop(lease)
            else:
                self._check_open()
                unit = self.ledger.running(lease)
                content = self._checked(*made)
                self._write("item", unit.number, unit.item, packed, *content[1:])
                self.ledger.put(*content, lease)
            self._deadlines.pop(lease, None)
            self._answer(request, True)

    def put(
        self, request: Request, many: list[Any], made: tuple[int, bool], cost: float | None, priority: float
    ) -> None:
        """Put samples, or groups, one after the other; the answer is how many. Those before an error are put.

        Whoever waits for room waits while weights are updated: the samples were made with those of before. But a state
        that was loaded meanwhile may have taken the version back.
        """
        left, (version, is_default), request.so_far = deque([(each, self._packed(each)) for each in many]), made, 0

        def attempt() -> Any:
            while left:
                self._check_open()
                samples, packed = left[0]
                own = min(version, self.ledger.version) if is_default else version
                unit = self._checked(samples, own, cost, priority)
                if not self.ledger.has_room:
                    return WAITS
                self._write("put", self._pushed, NOTHING, packed, *unit[1:])
                self.ledger.put(*unit, number=self._pushed)
                self._pushed += 1
                left.popleft()
                request.so_far += 1
            return request.so_far

        self._wait(request, self._putters, attempt)

    def step(self, request: Request, key: str, rank: int, place: RankPlace, given: int, number: int | None) -> None:
        """Return the part of a rank in a step; and note how many steps its consumer was given.

        Args:
            request: Comes to the number of the run, and the keys of the samples; None in their place at the end.
            key: The reader's. It begins with its first call; when readers of all ranks have, a run begins.
            rank: The reader's.
            place: Where it goes on.
            given: So many steps, when it asks for another one; -1 if nobody has asked yet.
            number: Of the step; None to wait for none.
        """
        with Change(self):
            if (seat := self._seats.get(key)) is None:
                seat = self._seats[key] = self._ranks.begin(rank, place)
                if (run := self._ranks.run) is not None and run is seat.run:
                    self._begin_run(run)
            if given > seat.given:
                seat.given, seat.since = given, monotonic()
                self._look_at(seat.since + self._step_timeout)
            if self.run is seat.run is not None:
                self.ledger.finish(self._next_given())
            if number is None:
                self._answer(request, None)
        if number is not None:
            self._wait(request, self._readers, partial(self._part, seat, number))

    def state(self, request: Request, run: int, step: int) -> None:
        """Take the state before a step of a run; of one that is over, where the next begins: ranks may be in either.

        States that ranks take there are of one step, and have the same id, though more may be put between the two.
        """
        with Change(self):
            is_newest = self.run is not None and self.run.number == run
            number = self._first + step if is_newest else self._next_given()
            units = self.ledger.state(number)
            segment = 0 if self._spill is None else self._spill.segment
            life, pushed = self._life, self._pushed
            place = None if self._source is None else self._source.place()
        # As values, and no pickle: whoever trusts a file can tell by torch.load. In a tuple, which
        # torch.distributed.checkpoint does not look into, so the keys of two states are the same.
        taken = {
            "version": 1,
            "id": f"{life}-{number}",
            **self.identity,
            "life": life,
            "pushed": pushed,
            "segment": segment,
            "source": None if place is None else written(place),
            "units": ({**units, "units": _copied(units["units"])},),
        }
        request.answer(taken)

    def load(self, request: Request, rank: int, loaded: dict[str, Any]) -> None:
        """Go on from a state that all ranks load: when the first of them does.

        Raises:
            StateMismatchError: if the state is of something else, or would lose what was put.
        """
        identity.check(loaded, self.identity)
        (units,) = loaded["units"]
        units = {**units, "units": _copied(units["units"])}  # the state stays as it is
        with Change(self):
            before, ranks = self._loaded
            if before != loaded["id"] or rank in ranks:
                self._check_keeps_all(loaded)
                if self._source is not None and loaded["source"] is not None:
                    self._source.load_state_dict(loaded["source"])
                self.ledger.load(units)
                self.run, self._first = None, self.ledger.formed
                self._deadlines.clear()
                self._recover_all(loaded["pushed"])
                ranks = set()
            self._loaded = loaded["id"], ranks | {rank}
            self._answer(request, None)

    def update(self, request: Request, version: int) -> None:
        """Note that the weights were updated."""
        with Change(self):
            now = self.ledger.version
            if isinstance(version, bool) or not isinstance(version, int) or version < now:
                raise ValueError(f"version should be an integer that does not go back from {now}, but got {version!r}")
            self.ledger.set_version(version)
            self._answer(request, None)

    def withdraw(self, request: Request, *, failed: bool = False) -> None:
        """Have a call be answered now, by what it has come to so far. An item that it has leased is given back."""
        with Change(self):
            for waiting in (self._leasers, self._putters, self._readers):
                if request in waiting:
                    waiting.remove(request)
                    self._answer(request, request.so_far)
            if isinstance(leased := request.outcome[0], Leased):
                self.ledger.give_back(leased.lease, failed=failed)

    def give_back(self, lease: int, *, failed: bool) -> None:
        """Have what is leased be leased again. Also inside the garbage collector, while this thread has the lock."""
        self._soon(partial(self.ledger.give_back, lease, failed=failed))

    def leave(self, key: str) -> None:
        """Note that a reader is gone. Also inside the garbage collector, while this thread has the lock."""
        self._soon(partial(self._leave, key))

    def _leave(self, key: str) -> None:
        if (seat := self._seats.pop(key, None)) is not None:
            self._ranks.leave(seat)

    # ----------------------------------------------------------------------------------------------------- producers

    def _packed(self, samples: Any) -> bytes:
        return b"" if self._spill is None else pickled(samples)

    def _checked(
        self, samples: Any, version: int, cost: float | None, priority: float
    ) -> tuple[list[Any], int, float, float]:
        """Return the samples of a unit as a list, their version, their cost, and their priority.

        Raises:
            ValueError: for what no feed like this can take.
        """
        if self._group_size is None:
            samples = [samples]
        elif not isinstance(samples, (list, tuple)) or len(samples) != self._group_size:
            got = f"{len(samples)}" if isinstance(samples, (list, tuple)) else f"a {type(samples).__name__}"
            raise ValueError(f"a group is a list of {self._group_size} samples (group_size), but got {got}")
        if isinstance(version, bool) or not isinstance(version, int) or not 0 <= version <= self.ledger.version:
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
        return list(samples), version, cost, priority

    def _drop(self, lease: int) -> None:
        if self._spill is not None and self._spill.is_closed:
            raise self._closed_error()
        unit = self.ledger.running(lease)
        self._write("item", unit.number, unit.item, b"", 0, 0.0, 0.0)
        self.ledger.drop(lease)

    def _try_lease(self) -> Any:
        ledger, source = self.ledger, self._source
        assert source is not None
        if ledger.closed:
            raise self._closed_error()
        unit = ledger.lease() if ledger.pending and not ledger.ended else None
        # After the end there may be items again: another loop may find that prefetched samples are too old by now.
        while unit is None and ledger.has_room and not (ledger.ended or ledger.source_over or source.waits):
            unit = self._lease_next(source)
        if unit is None or unit.lease is None:
            if ledger.is_settled:
                raise closed(self.address, "the source has ended, and all its items are settled")
            return WAITS
        if self._lease_timeout < math.inf:
            self._deadlines[unit.lease] = due = monotonic() + self._lease_timeout
            self._look_at(due)
        return Leased(self, unit.lease, unit.id, unit.item, unit.version, unit.tries)

    def _lease_next(self, source: Source) -> Unit | None:
        """Lease the next item; None if it is not there, or there is none, or if its samples were put before a crash."""
        try:
            item = source.draw()
        except StopIteration:
            self.ledger.source_over = True
            return None
        except Exception as error:
            self._fail(source, error)
            raise
        if item is WAITS:
            return None
        unit = self.ledger.lease(item, source.drawn - 1)
        return None if self._recover(unit) else unit

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

    # --------------------------------------------------------------------------------------------------------- spill

    def _write(
        self, kind: Kind, number: int, item: Any, packed: bytes, version: int, cost: float, priority: float
    ) -> None:
        if self._spill is not None:
            self._spill.write(kind, number, _checksum(item), packed, version, cost, priority)

    def _recovered(self, kind: Kind, number: int) -> tuple[Any, int, tuple[int, float, float]] | None:
        """Return what was put before a crash: samples, or None for none; the item's checksum; version, cost, priority.

        What was put with a version that a resumed run has not come to is as if it had this run's version. The weights
        of that version are gone. The bound, and ages, know no samples from the future.
        """
        if self._spill is None or (found := self._spill.read(kind, number)) is None:
            return None
        record, samples = found
        content = min(record.version, self.ledger.version), record.cost, record.priority
        is_single = samples is not None and self._group_size is None
        return [samples] if is_single else samples, record.item, content

    def _recover(self, unit: Unit) -> bool:
        """Settle a lease by what was put for its item before a crash; return whether there was something."""
        if (found := self._recovered("item", unit.number)) is None:
            return False
        samples, item, content = found
        assert unit.lease is not None
        if item and (own := _checksum(unit.item)) and item != own:
            self.ledger.give_back(unit.lease, failed=False)
            raise StateMismatchError(
                f"item {unit.number} of the source", "another one, for which samples were spilled", unit.item,
                "Each run has a folder of its own to spill to.",
            )  # fmt: skip
        if samples is None:
            self.ledger.drop(unit.lease)
        else:
            self.ledger.put(samples, *content, unit.lease)
        return True

    def _recover_all(self, pushed: int) -> None:
        """Begin a life. Take what was put before a crash: without leases from a number on, and for items that wait."""
        self._pushed = pushed
        if self._spill is not None:
            for number in self._spill.numbers("put"):
                if number >= pushed and (found := self._recovered("put", number)) is not None:
                    self.ledger.put(found[0], *found[2], number=number)
                    self._pushed = number + 1
            self._pushed = max(self._pushed, self._spill.pushed)
            for _ in range(len(self.ledger.pending)):
                unit = self.ledger.lease()
                if not self._recover(unit):
                    assert unit.lease is not None
                    self.ledger.give_back(unit.lease, failed=False)
        self._life, self._pushed_before = secrets.token_hex(8), self._pushed

    # --------------------------------------------------------------------------------------------------------- steps

    @property
    def has_begun(self) -> bool:
        """Whether somebody takes batches, or has: since a state was loaded, if one was."""
        return self.run is not None

    def _begin_run(self, run: Run) -> None:
        self.ledger.finish(self._next_given())
        self.ledger.begin()
        self.run, self._first = run, self.ledger.formed
        self._parts, self._is_run_over = {}, False
        if self._door is not None:  # until now a trainer may come after the end of the main thread
            self._door.end_at_exit()

    def _next_given(self) -> int:
        """Return the number of the first batch that not all consumers were given."""
        return self._first + (0 if self.run is None else self.run.given)

    def _part(self, seat: Seat, number: int) -> Any:
        """Return the run, and the part of a rank in a step, which is formed now if it is the next; None at the end.

        Raises:
            RanksError: if ranks do not take the same steps.
            LoaderClosedError: if another reader of the rank has begun.
            FeedClosedError: at the end, if an error of the source brought that.
        """
        if seat.run is None:
            if seat.error is not None:
                raise seat.error
            if self._ranks.newest.get(seat.rank) is not seat:
                raise other_has_begun()
            return WAITS
        is_dealt = number < self.ledger.formed - self._first and self.run is seat.run
        if self._is_run_over and not is_dealt and self.run is seat.run:
            return seat.run.number, None
        if seat.error is not None and not is_dealt:
            raise seat.error
        if self.run is not seat.run:
            raise other_has_begun()
        if not self.ledger.can_answer(self._first + number):
            return WAITS
        if self._first + number >= self.ledger.formed:
            if self._error is not None:
                raise self._closed_error()
            self._is_run_over = True  # for all ranks, whatever comes now
            return seat.run.number, None
        if number not in self._parts:
            done = self.ledger.done - self._first
            self._parts = {each: parts for each, parts in self._parts.items() if each >= done}
            self._parts[number] = self.ledger.dealt(self.ledger.batch(self._first + number))
        return seat.run.number, keys_of(self._parts[number][seat.rank])

    def why_no_keys(self) -> str:
        """Return why there may be no further batch: no producer has a lease. "" while some producer has one."""
        with Change(self):
            ready, size = self.ledger.num_ready, self.ledger.rules.size
            is_made = bool(self.ledger.num_running)
        return "" if is_made else f"its feed has {ready} of {size} samples or groups, and no producer has a lease"

    # -------------------------------------------------------------------------------------------------------- states

    def _check_keeps_all(self, loaded: dict[str, Any]) -> None:
        is_own = loaded["life"] == self._life  # then it has what was put before
        first = max(self._pushed_before, loaded["pushed"] if is_own else 0)
        end = self._pushed if self._spill is None else loaded["pushed"]  # from there on they are read from the folder
        lost = sum(unit.item is NOTHING and first <= unit.number < end for unit in self.ledger.units.values())
        if lost:
            raise StateMismatchError(
                "the number of samples, or groups, that were put without leases",
                loaded["pushed"],
                self._pushed,
                f"{lost} that wait are not in the state, and would be lost: load it before anything is put, or have "
                "the feed spill them",
            )

    def trim(self, saved: dict[str, Any]) -> None:
        """Delete what was spilled, and is not needed to go on from a state."""
        identity.check(saved, self.identity)
        with Change(self):
            if self._spill is not None:
                source = saved["source"]
                self._spill.trim(saved["segment"], 0 if source is None else source["drawn"], self._pushed)

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
        if self._spill is not None:
            self._spill.close()
        self._end_limits()
        if self._num_replicas is None and self._door is not None:  # otherwise ranks come for what is there
            self._door.close()

    def _end_limits(self) -> None:
        """Look no more, because nothing is put any more; but for ranks, which come for what is there."""
        if self._timer is not None and self._num_replicas is None:
            self._timer.cancel()

    def end_with_program(self) -> None:
        """Close the feed if its loader has begun, and has ended with all who train: producers would wait for ever."""
        if self.has_begun and self._num_replicas is None:
            self._soon(partial(self._close, "the program that trains comes to its end"))

    def end_untrained(self) -> None:
        """Close the feed if its loader has not begun, and nobody is left who could have it begin."""
        if not self.has_begun and self._num_replicas is None:
            self._soon(partial(self._close, "the program comes to its end, and has not trained on this feed"))

    def waiting_threads(self) -> list[threading.Thread | None]:
        """Return the threads that wait for room, or for leases."""
        return [request.thread for request in (*threads.copied(self._leasers), *threads.copied(self._putters))]

    def look(self, now: float) -> None:
        """Give leases back whose time is up, and end a run whose ranks have waited for too long."""
        with Change(self):
            for lease, due in list(self._deadlines.items()):
                if due > now:
                    break
                del self._deadlines[lease]
                self.ledger.give_back(lease, failed=True)
            self._due = math.inf
            self._look_at(min(next(iter(self._deadlines.values()), math.inf), self._look_at_ranks(now)))

    def _look_at(self, due: float) -> None:
        """Look when it is time, if not before."""
        if due < self._due:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = timer = threading.Timer(max(0.0, due - monotonic()), _look, (weakref.ref(self),))
            timer.name, timer.daemon, self._due = "asyncloader feed limits", True, due
            weakref.finalize(self, timer.cancel).atexit = False
            timer.start()

    def _look_at_ranks(self, now: float) -> float:
        waiting = self._ranks.waiting(self.ledger.formed - self._first)
        if self._is_run_over:  # only whoever begins the next one waits
            waiting = [seat for seat in waiting if seat.run is None]
        if not waiting or self._step_timeout == math.inf:
            return math.inf
        if now < (due := waiting[0].since + self._step_timeout):
            return due
        ready, size, running = self.ledger.num_ready, self.ledger.rules.size, self.ledger.num_running
        producers = f"{ready} of {size} samples or groups are there, {running} are leased"
        self._ranks.time_out(waiting, self._step_timeout, producers)
        return now  # others may have waited as long

    def stats(self) -> FeedStats:
        """Return what became of the samples so far."""
        with Change(self):
            waits = self._trainer_waits.total_s, self._producers_wait.total_s
            return FeedStats.of(self.ledger, len(self._leasers) + len(self._putters), *waits)

    # ------------------------------------------------------------------------------------------------------- the lock

    def _wait(self, request: Request, waiting: Any, attempt: Callable[[], Any]) -> None:
        """Have a request be answered in its turn."""
        request.attempt = attempt
        with Change(self):
            waiting.append(request)

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


def _item_came(server: weakref.ref[FeedServer]) -> None:
    if (alive := server()) is not None:
        alive.item_came()


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


def _checksum(item: Any) -> int:
    """Return what tells an item from others; 0 for one that is no plain data."""
    text = as_text(item)
    return zlib.crc32(text.encode()) if isinstance(text, str) else 0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) or isinstance(value, SupportsFloat)  # which takes 10 us


def _checked_cost(cost: Any) -> float:
    if not _is_number(cost) or not 0 <= (checked := float(cost)) < math.inf:
        raise ValueError(f"cost should be a number of at least 0, but got {cost!r}")
    return checked
