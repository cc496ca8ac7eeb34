"""Decide which worker does which batch, and which batch is handed over next. No loop, no clock, no process.

    planned(keys)  ──>  ┌────────────────────────────────────────────┐ ──> Send(worker, ticket)
    returned, ready ──> │ unsent -> in flight -> parked -> delivered │ ──> Deliver(outcome)
    exhausted, died,    │                                            │ ──> Read(until), Replace(worker), Finish()
    hung, rested ─────> │                                            │
    joined, left, lost  └────────────────────────────────────────────┘ ──> Window(size), Dismiss(worker)

A batch is in exactly one of four places: *unsent* (read from the sampler, no worker has it), *in flight* (a worker
has its ticket), *parked* (its outcome is here, but an earlier batch is missing), or gone: *delivered* or *void* (an
iterable dataset ended before it, or its error was handed over at once).

Workers come and go, for map-style datasets: `joined` takes one in, `left` lets one finish what it has in hand, `lost`
has others do what a worker had that went through no fault of its batches. What a batch costs here does not depend on
how many workers there are (:mod:`asyncloader.engine.roster`).

Events come in as method calls, decisions go out as lists of actions which the session carries out. The scheduler alone
knows sequence numbers, order, window and retries. It belongs to one loop thread. Hypothesis drives it in the tests.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from typing import Any, Literal

from asyncloader.engine.actions import (
    PART,
    VOID,
    Action,
    Cause,
    Deliver,
    Dismiss,
    Fail,
    Finish,
    Read,
    Replace,
    Send,
    Ticket,
    Window,
)
from asyncloader.engine.roster import Roster
from asyncloader.engine.run_ahead import RunAhead


class Scheduler:
    """The state of one run. Called from the loop thread only.

    Args:
        num_workers: Workers at the beginning, numbered from 0. Others that join may have any number.
        num_expected: Workers that were asked for, where some of them are yet to join.
        prefetch_factor: Batches in flight or waiting, for each worker.
        scheduling: "static" sends batch i to worker i % num_workers; "dynamic" to the one with least to do.
        in_order: Deliver by sequence number; otherwise as they come.
        max_buffered_bytes: Read beyond the window while workers would stand idle, as long as what is ahead of the
            consumer is estimated below this many bytes. 0 for never.
        on_crash: What becomes of the ticket that a dead worker was at: "retry", "raise" or "skip".
        on_timeout: The same for a worker that hung and was killed; "raise" never comes here.
        max_retries: How often a ticket is sent again before it is given up.
        overlapping: Tickets that a worker has in work at once; 0 if it does one after the other.
        first: Sequence number of the first ticket; more than 0 in a run that goes on with an earlier one.
        next_worker: Who gets the first ticket, under static scheduling; by default worker first % num_workers.

    Attributes:
        num_workers: Who takes tickets, or has come to the end of its data.
        window: Batches in flight or waiting at a time, beyond which only run-ahead reads.
        roster: The workers, with `in_flight`, their tickets, and `active`, who takes tickets or has some in hand still.
        resting: Who is without a process for a moment.
        planned_count: Batches that were read, those before the run included.
        gone_count: Of these, delivered or void; in order it is the sequence number that is awaited.
        void_count: Of these, void.
    """

    def __init__(
        self,
        *,
        num_workers: int,
        prefetch_factor: int,
        scheduling: Literal["static", "dynamic"] = "static",
        in_order: bool = True,
        max_buffered_bytes: int = 0,
        on_crash: Literal["raise", "retry", "skip"] = "retry",
        on_timeout: Literal["raise", "retry", "skip"] = "raise",
        max_retries: int = 2,
        overlapping: int = 0,
        first: int = 0,
        next_worker: int | None = None,
        num_expected: int = 0,
    ) -> None:
        self.num_workers = num_workers
        self._prefetch_factor = prefetch_factor
        self.window = num_workers * prefetch_factor
        self._window_asked = max(num_workers, num_expected) * prefetch_factor
        self._static = scheduling == "static"
        self._in_order = in_order
        self._on_crash = on_crash
        self._on_timeout = on_timeout
        self._max_retries = max_retries
        self._overlapping = overlapping
        self.roster = Roster(num_workers, first if next_worker is None else next_worker)
        self.in_flight, self.active = self.roster.in_flight, self.roster.active
        self.resting: set[int] = set()
        self._unsent: list[tuple[int, Ticket]] = []  # a heap by sequence number
        # By worker, what was in work at once when its process died: to be done one by one, before anything else.
        self._suspects: dict[int, deque[Ticket]] = {}
        self._parked: dict[int, Any] = {}
        self.planned_count = first
        self.gone_count = self._first = first
        self.void_count = 0
        self._plan_ended = False
        self._finished = False
        self._read_until = first + self.window
        self._parked_bytes = 0
        self._run_ahead = RunAhead(max_buffered_bytes if in_order else 0, overlapping)

    def __repr__(self) -> str:
        loads = ",".join(str(len(tickets)) for _, tickets in sorted(self.in_flight.items()))
        return (
            f"<Scheduler planned={self.planned_count} unsent={len(self._unsent)} in_flight=[{loads}] "
            f"parked={len(self._parked)} gone={self.gone_count}>"
        )

    # ------------------------------------------------------------------------------------------------- events

    def planned(self, batches: Iterable[Any]) -> list[Action]:
        """The consumer read these batches of keys from the sampler; for VOID nothing is to be done."""
        actions: list[Action] = []
        for keys in batches:
            seq = self.planned_count
            self.planned_count += 1
            if keys is VOID:
                actions += self.ready(seq, VOID)
            else:
                heapq.heappush(self._unsent, (seq, Ticket(seq, keys)))
        return actions + self._assign()

    def plan_ended(self) -> list[Action]:
        """The sampler has no more batches."""
        self._plan_ended = True
        return self._maybe_finish()

    def returned(self, worker: int, seq: int, busy_s: float = 0.0, wait_s: float = 0.0) -> list[Action]:
        """The worker is done with this ticket; its outcome follows in `ready`.

        Args:
            worker: Who did it.
            seq: Of the ticket.
            busy_s: Seconds of work that it took.
            wait_s: Seconds that the worker had waited for it.
        """
        roster = self.roster
        if (ticket := roster.take_back(worker, seq)) is None:
            raise AssertionError(f"worker {worker} returned {seq}, which it did not have: {self!r}")
        self._run_ahead.returned(busy_s, wait_s, ticket.is_prompt)
        actions = self._maybe_dismiss(worker) if worker in roster.leaving else []
        return actions + self._assign(idle=worker) if self._unsent or self._suspects else actions

    def ready(self, seq: int, outcome: Any, nbytes: int = 0) -> list[Action]:
        """The outcome of a returned ticket can be handed over.

        Args:
            seq: Of the ticket.
            outcome: What is handed over.
            nbytes: How large it is; 0 for what is no batch, less than 0 if nobody knows: then none is run ahead of.
        """
        nbytes = self._run_ahead.sized(nbytes)
        if not self._in_order:
            return self._leave(outcome, [])
        if seq != self.gone_count:
            self._parked[seq] = (outcome, nbytes)
            self._parked_bytes += nbytes
            return self._maybe_run_ahead()
        actions = self._leave(outcome, [])
        while (parked := self._parked.pop(self.gone_count, None)) is not None:
            self._parked_bytes -= parked[1]
            self._leave(parked[0], actions)
        return actions or self._maybe_run_ahead()

    def again(self, seq: int, keys: Any) -> list[Action]:
        """Have a returned ticket, whose outcome was not ready, done once more, with these keys."""
        self._queue([Ticket(seq, keys)])
        return self._assign()

    def exhausted(self, worker: int, seq: int) -> list[Action]:
        """The worker's iterable dataset ended before this ticket: it, and what the worker has behind it, is void."""
        self.resting.discard(worker)
        self.roster.retire(worker)
        actions: list[Action] = []
        for ticket in self._take_all(worker):
            actions += self.ready(ticket.seq, VOID)
        return actions + self._assign()

    def died(
        self,
        worker: int,
        cause: Cause | None = None,
        *,
        replaceable: bool = True,
        was_ready: bool = True,
        rests: bool = False,
        unsent: Iterable[int] = (),
    ) -> list[Action]:
        """The worker's process ended. What it was at is tried again, given up or left out, as ``on_crash`` says.

        A worker that cannot be replaced (it held the state of an iterable dataset) takes no more tickets, and what it
        had in flight is named in one error. One that was not ready had begun with nothing, and with what is unsent no
        worker has. One that rests gets its process later (`rested`), one at the end of its data none.
        """
        if worker not in self.active:
            return []
        self._vacate(worker, rests and replaceable, unsent)
        if self._on_crash == "raise" or not replaceable:
            return self._give_up(worker, replaceable, cause)
        if self._overlapping and was_ready and len(self.in_flight[worker]) > 1:
            was_ready = worker not in self.roster.leaving  # otherwise whoever gets these finds out which is to blame
            if was_ready:
                self._suspects[worker] = deque(sorted(self.roster.take_all(worker), key=lambda ticket: ticket.seq))
                self.roster.hold(worker)
        return self._replace(worker, self._on_crash, was_ready, cause)

    def hung(
        self, worker: int, cause: Cause | None = None, *, rests: bool = False, unsent: Iterable[int] = ()
    ) -> list[Action]:
        """The worker was killed, for a batch did not come in time: what it was at fares as ``on_timeout`` says."""
        self._vacate(worker, rests, unsent)
        return self._replace(worker, self._on_timeout, True, cause)

    def rested(self, worker: int) -> list[Action]:
        """The worker has a process again."""
        self.resting.discard(worker)
        if worker not in self._suspects:
            self.roster.release(worker)
        return self._assign()

    def joined(self, worker: int) -> list[Action]:
        """A worker has come, or one that was leaving stays after all: from now on it takes tickets."""
        if self.roster.takes(worker):
            raise AssertionError(f"worker {worker} has joined twice: {self!r}")
        self.roster.join(worker)
        return [self._resize(1), *self._assign()]

    def left(self, worker: int) -> list[Action]:
        """The worker is to go: it finishes what it has in hand, gets nothing more, and is dismissed after that."""
        if not self.roster.takes(worker):
            return []
        self.roster.leave(worker)
        return [self._resize(-1), *self._maybe_dismiss(worker), *self._assign()]

    def lost(self, worker: int) -> list[Action]:
        """The worker went, through no fault of what it had: others do that. Nobody is blamed, no retry is counted."""
        if worker not in self.active:
            return []
        actions: list[Action] = [self._resize(-1)] if self.roster.takes(worker) else []
        self._queue(self._forget(worker))
        return actions + self._assign()

    def stopped(self) -> list[Ticket]:
        """No worker can be had any more: give up everything that has no outcome yet."""
        lost, self._unsent = [ticket for _, ticket in self._unsent], []
        for worker in tuple(self.active):
            lost += self._forget(worker)
        return sorted(lost, key=lambda ticket: ticket.seq)

    # ------------------------------------------------------------------------------------------------ answers

    def awaited(self) -> Ticket | None:
        """Return the ticket that the consumer waits for: the first in order that a worker has."""
        in_flight = [ticket for tickets in self.in_flight.values() for ticket in tickets.values()]
        return min(in_flight, key=lambda ticket: ticket.seq, default=None)

    def is_finishing(self) -> bool:
        """Whether the ticket whose turn it is was returned, and nothing but its outcome is missing."""
        first_unsent = self._unsent[0][0] if self._unsent else self.planned_count
        suspects = [ticket.seq for tickets in self._suspects.values() for ticket in tickets]
        in_flight = self.awaited()
        first = min([first_unsent, *suspects] if in_flight is None else [first_unsent, in_flight.seq, *suspects])
        return self._in_order and self.gone_count < first

    def validate(self) -> None:
        """Check what must hold between any two events."""
        flying = [seq for tickets in self.in_flight.values() for seq in tickets]
        unsent = [seq for seq, _ in self._unsent]
        unsent += [ticket.seq for suspects in self._suspects.values() for ticket in suspects]
        everywhere = [*flying, *unsent, *self._parked]
        assert len(everywhere) == len(set(everywhere)), f"a batch is in two places: {self!r}"
        if self._in_order:
            assert all(seq >= self.gone_count for seq in everywhere), f"a batch came back after delivery: {self!r}"
            assert self.gone_count not in self._parked, f"a batch is parked that could go: {self!r}"
        assert self._parked_bytes == sum(nbytes for _, nbytes in self._parked.values())
        assert self.gone_count + len(self._parked) + len(flying) + len(unsent) <= self.planned_count
        assert self.resting | self._suspects.keys() == {w for w in self.active if self.roster.is_held(w)}
        self.roster.validate()

    # ---------------------------------------------------------------------------------------------- decisions

    def _assign(self, idle: int | None = None) -> list[Action]:
        """Give unsent tickets to workers, in order, as far as one takes them; ``idle`` has just finished something."""
        actions: list[Action] = []
        if not self.active and self.num_workers:  # every worker has come to the end of its data, or is lost for good
            self._plan_ended = True
            unsent, self._unsent = self._unsent, []
            for seq, _ in sorted(unsent):
                actions += self.ready(seq, VOID)
            return actions + self._maybe_finish()
        for worker in tuple(self._suspects) if self._suspects else ():
            actions += self._assign_suspect(worker)
        while self._unsent:
            ticket = self._unsent[0][1]
            chosen = self._choose(ticket)
            if chosen is None:
                break
            heapq.heappop(self._unsent)
            ticket.is_prompt = chosen == idle and not self.in_flight[chosen]
            self.roster.give(chosen, ticket)
            actions.append(Send(chosen, ticket))
        return actions + self._maybe_run_ahead()

    def _assign_suspect(self, worker: int) -> list[Action]:
        if self.in_flight[worker] or worker in self.resting:
            return []
        suspects = self._suspects[worker]
        if not suspects:
            del self._suspects[worker]
            self.roster.release(worker)
            return self._maybe_dismiss(worker) if worker in self.roster.leaving else []
        ticket = suspects.popleft()
        ticket.is_prompt = False
        self.roster.give(worker, ticket)
        return [Send(worker, ticket)]

    def _choose(self, ticket: Ticket) -> int | None:
        roster = self.roster
        if self._static and ticket.worker >= 0 and roster.takes(ticket.worker):  # sent again after a crash
            return None if roster.is_held(ticket.worker) else ticket.worker
        if self._static and self._in_order:
            return roster.take_turn(self._prefetch_factor)
        if (least := roster.least()) is None:
            return None
        most = self.window // roster.num_takers if self._static else self._run_ahead.queue_depth
        return least[0] if least[1] < most else None

    def _maybe_run_ahead(self) -> list[Action]:
        """Ask for more tickets if a worker would stand idle because the awaited batch is slow.

        One round of tickets, or for batches of microseconds as many as hide the latency of asking, and no more until
        the consumer has read that far. One that does not wait does not read: then training is what is slow. Nor is
        anything read before the first batch: all consumers wait for that, also for workers that are slow to start.
        """
        run_ahead = self._run_ahead
        if self.gone_count == self._first:
            return []
        if self.planned_count < self._read_until or self._unsent or self._plan_ended or not run_ahead.is_possible:
            return []
        if (least := self.roster.least()) is None or least[1] >= run_ahead.low:
            return []
        ahead = self.planned_count - self.gone_count
        rounds = run_ahead.rounds(self.num_workers, self.window, ahead, len(self._parked), self._parked_bytes)
        self._read_until = self.planned_count + max(0, rounds) * self.num_workers
        return [Read(self._read_until)] if rounds > 0 else []

    # -------------------------------------------------------------------------------------------------- workers

    def _resize(self, change: int) -> Window:
        self.num_workers += change
        self.window = self._run_ahead.window(self.num_workers, self._prefetch_factor, self._window_asked)
        return Window(self.window)

    def _vacate(self, worker: int, rests: bool, unsent: Iterable[int]) -> None:
        """Note that the worker has no process, and take back tickets that were not sent to it."""
        tickets = [ticket for seq in sorted(unsent) if (ticket := self.roster.take_back(worker, seq)) is not None]
        self._put_back(worker, tickets)
        if rests and worker not in self.roster.leaving:  # then nobody takes its place
            self.resting.add(worker)
            self.roster.hold(worker)

    def _forget(self, worker: int) -> list[Ticket]:
        """Let go of the worker; return what it had, and what it was to be given again one by one."""
        self.resting.discard(worker)
        self.roster.retire(worker)
        return [*self.in_flight.pop(worker).values(), *self._suspects.pop(worker, ())]

    def _maybe_dismiss(self, worker: int) -> list[Action]:
        """Let a worker that is leaving go, if it has nothing in hand."""
        has_more = self.in_flight[worker] or (worker in self._suspects and worker not in self.resting)
        return [] if has_more else self._dismiss(worker)

    def _dismiss(self, worker: int) -> list[Action]:
        self._queue(self._forget(worker))
        return [Dismiss(worker)]

    def _successor(self, worker: int) -> list[Action]:
        """Have the worker's place filled, unless that is to wait, or it is wanted no more."""
        if worker in self.roster.leaving:
            return self._dismiss(worker)
        return [] if worker in self.resting else [Replace(worker)]

    def _take_all(self, worker: int) -> list[Ticket]:
        """Take what the worker has, and what it was to be given again."""
        lost = [*self.roster.take_all(worker), *self._suspects.pop(worker, ())]
        again = [ticket for _, ticket in self._unsent if self._static and ticket.worker == worker]
        unsent, self._unsent = self._unsent, []
        self._queue([ticket for _, ticket in unsent if not (self._static and ticket.worker == worker)])
        return lost + again

    def _put_back(self, worker: int, tickets: list[Ticket]) -> None:
        """Have tickets, in ascending order, sent again before all that is behind them."""
        if worker in self._suspects:
            self._suspects[worker].extendleft(reversed(tickets))
        else:
            self._queue(tickets)

    def _queue(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            heapq.heappush(self._unsent, (ticket.seq, ticket))

    def _replace(self, worker: int, policy: str, was_ready: bool, cause: Cause | None) -> list[Action]:
        """Have the worker's tickets done by another process, but perhaps for the one it was at."""
        lost = self.roster.take_all(worker)
        if self._overlapping:
            lost.sort(key=lambda ticket: ticket.seq)
        actions = self._successor(worker)
        if lost and was_ready:
            # Tickets are taken in order, so blame the first. Overlapping tickets of a worker that died are suspects and
            # never get here; after a hang the first is the awaited one, or holds up the successor that has it.
            actions += self._blame(lost.pop(0), policy, cause)
        self._put_back(worker, lost)
        return actions + self._assign()

    def _blame(self, ticket: Ticket, policy: str, cause: Cause | None) -> list[Action]:
        ticket.tries += 1
        if policy == "skip" or ticket.tries > self._max_retries:
            return [Fail([ticket], at_once=False, leave_out=policy == "skip", cause=cause)]
        self._put_back(ticket.worker, [ticket])
        return []

    def _give_up(self, worker: int, replaceable: bool, cause: Cause | None) -> list[Action]:
        lost = self.roster.take_all(worker) if replaceable else self._take_all(worker)
        actions = self._successor(worker) if replaceable else []
        if not replaceable:
            self.roster.retire(worker)
        if lost or not (replaceable or self._finished):
            actions.append(Fail(lost, at_once=True, cause=cause))
        for ticket in lost:
            actions += self.ready(ticket.seq, VOID)
        return actions + self._assign()

    def _leave(self, outcome: Any, actions: list[Action]) -> list[Action]:
        self.gone_count += 1
        if outcome is VOID:
            self.void_count += 1
            actions.append(Read(self._read_until))  # a void ticket frees its place in the window
        elif outcome is not PART:
            actions.append(Deliver(outcome))
        actions += self._maybe_finish()
        return actions

    def _maybe_finish(self) -> list[Action]:
        if self._plan_ended and not self._finished and self.gone_count == self.planned_count:
            self._finished = True
            return [Finish()]
        return []
