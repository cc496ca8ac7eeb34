"""Decide which worker does which batch, and which batch is handed over next. No loop, no clock, no process.

    planned(keys)  ────>  ┌────────────────────────────────────────────┐ ──> outbox: tickets by worker
    returned, ready ───>  │ unsent -> in flight -> parked -> delivered │ ──> delivered: items in order
    exhausted, vacated ─> │                                            │ ──> ("replace", worker), Fail
    joined, leaving, lost │                                            │ ──> window, read_until, is_finished
    assign ────────────>  └────────────────────────────────────────────┘ ──> ("dismiss", worker)

A batch is in exactly one of four places: *unsent* (read from the sampler, no worker has it), *in flight* (a worker
has its ticket), *parked* (its outcome is here, but an earlier batch is missing), or gone: *delivered* or *void* (an
iterable dataset ended before it, or its error was handed over at once).

Workers come and go, for map-style datasets: `joined` takes one in, `leaving` lets one finish what it has in hand, and
`lost` has others do the tickets of a worker that is gone through no fault of its batches.

The engine reports events by method calls, as many as have come at a time, and then has tickets given out by one
`assign`. It empties `outbox` and `delivered`, and carries out the actions that are returned. Only the scheduler
knows order, window and retries. All calls come from one loop thread; in the tests Hypothesis makes them.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

from asyncloader.engine.actions import VOID, Action, Cause, Fail, Ticket, Vacate
from asyncloader.engine.roster import Roster
from asyncloader.engine.run_ahead import BATCH_OVERHEAD_BYTES, RunAhead
from asyncloader.observe.record import Record
from asyncloader.options import Options

_batch = attrgetter("batch")


class Scheduler:
    """The state of one run. Called from the loop thread only.

    Args:
        options: The options of the run, which begins with `num_at_start` workers, numbered from 0; others that join
            have any number.
        first: Number of the first batch; more than 0 in a run that goes on with an earlier one.
        next_worker: The worker that gets the first ticket under static scheduling; by default first % num_at_start.
        runs_ahead: Read beyond the window while workers would stand idle, as long as what is ahead of the consumer is
            estimated below `max_buffered_bytes`.

    Attributes:
        num_workers: How many workers take tickets, or have come to the end of their data.
        window: Batches in flight or waiting at a time, beyond which only run-ahead reads.
        read_until: A consumer that waits may read the sampler on, until it has read so many batches in all.
        delivered: Batches whose turn has come, or errors in their places, for the consumer.
        outbox: By worker, tickets that it has been given, and was not sent yet.
        roster: The workers, with `in_flight`, their tickets, and `active`, those that take tickets or still have some.
        run_ahead: Is told what batches take, and how large they are.
        are_up: All workers have opened the dataset. Written by the engine; nothing is run ahead of before.
        planned_count: Batches that were read, those before the run included.
        gone_count: Batches that were delivered or are void; in order this is the number of the awaited batch.
        void_count: Batches that are void.
    """

    num_workers: int
    in_flight: dict[int, dict[int, Ticket]]
    active: set[int]

    def __init__(
        self,
        options: Options,
        *,
        first: int = 0,
        next_worker: int | None = None,
        runs_ahead: bool = True,
    ) -> None:
        self._options = options
        self.num_workers = num_workers = options.num_at_start
        self._prefetch = options.prefetch
        self._window_asked = num_workers * self._prefetch
        self._static = options.scheduling == "static" or options.is_iterable
        self._in_order = options.in_order
        self._by_turns = self._static and options.in_order
        self._overlaps = options.tickets_at_once > 0
        self.roster: Roster = Roster(num_workers, first if next_worker is None else next_worker)
        self.in_flight, self.active = self.roster.in_flight, self.roster.active
        self.delivered: list[Any] = []
        self.outbox: defaultdict[int, list[Ticket]] = defaultdict(list)
        self._idle: set[int] = set()  # workers that have returned their last ticket since the last look
        self._unsent: deque[Ticket] = deque()  # in order
        self._again: list[tuple[int, Ticket]] = []  # a heap by batch, of those that workers had: all before the unsent
        self._parked: dict[int, Any] = {}
        self.planned_count: int = first
        self.gone_count: int = first
        self.void_count: int = 0
        self._plan_ended = False
        self._parked_bytes = 0
        self.run_ahead: RunAhead = RunAhead(options, is_allowed=runs_ahead)
        self.are_up = False
        self.window: int = self._count_window()
        self.read_until: int = first + self.window

    def __repr__(self) -> str:
        loads = ",".join(str(len(tickets)) for _, tickets in sorted(self.in_flight.items()))
        return (
            f"<Scheduler planned={self.planned_count} unsent={len(self._unsent) + len(self._again)} "
            f"in_flight=[{loads}] "
            f"parked={len(self._parked)} gone={self.gone_count}>"
        )

    # ------------------------------------------------------------------------------------------------- events

    def planned(self, batches: Iterable[Any]) -> None:
        """The consumer read these batches of keys from the sampler; for VOID nothing is to be done."""
        batch, unsent = self.planned_count, self._unsent
        for keys in batches:
            if keys is VOID:
                self.ready(batch, VOID)
            else:
                unsent.append(Ticket(batch, keys))
            batch += 1
        self.planned_count = batch

    def plan_ended(self) -> None:
        """The sampler has no more batches."""
        self._plan_ended = True

    def returned(self, worker: int, batch: int) -> Ticket:
        """The worker is done with this ticket; the outcome of its batch follows in `ready`."""
        if (ticket := self.in_flight[worker].pop(batch, None)) is None:
            raise AssertionError(f"worker {worker} returned {batch}, which it did not have: {self!r}")
        if ticket.is_suspect:
            self.roster.held.discard(worker)
        return ticket

    def measured(self, worker: int, ticket: Ticket, record: Record, nbytes: int) -> None:
        """The worker has returned this ticket, perhaps with others before it: told once for all of them.

        Args:
            worker: The worker.
            ticket: The last of them.
            record: The worker's notes about it.
            nbytes: How large its batch is; 0 for what is no batch, less than 0 if nobody knows: then none is run ahead
                of.
        """
        if not self.in_flight[worker]:
            self._idle.add(worker)
        self.run_ahead.returned(record.busy_s, record.wait_s, ticket.is_prompt)
        self.run_ahead.sized(nbytes)

    def ready(self, batch: int, item: Any, nbytes: int = 0) -> None:
        """The outcome of a batch, whose ticket was returned, can be handed over.

        Args:
            batch: Number of the batch.
            item: The batch, or the error in its place; VOID for neither.
            nbytes: How large it is.
        """
        parked = self._parked
        if batch != self.gone_count and self._in_order:
            weight = (nbytes if nbytes > 0 else 0) + BATCH_OVERHEAD_BYTES
            parked[batch] = item, weight
            self._parked_bytes += weight
            return
        while True:
            self.gone_count += 1
            if item is VOID:
                self.void_count += 1  # which frees a place in the window
            else:
                self.delivered.append(item)
            if not parked or (following := parked.pop(self.gone_count, None)) is None:
                return
            item, weight = following
            self._parked_bytes -= weight

    def exhausted(self, worker: int) -> None:
        """The worker's iterable dataset has ended: what the worker still has is void."""
        self.roster.retire(worker)
        for ticket in self._take_all(worker):
            self.ready(ticket.batch, VOID)

    def vacated(self, gone: Vacate) -> list[Action]:
        """A worker has no process any more. Its tickets are tried again, given up or left out, as the options say.

        Where no other process takes its place, the worker held the state of an iterable dataset: it takes no more
        tickets, and one error names those that it had. Where another one comes, now or later, the worker goes on
        getting tickets, which wait in `outbox` until they can be sent. What was not sent to the worker is not blamed.

        Args:
            gone: The worker, and how it ended.
        """
        worker, was_ready = gone.worker, gone.was_ready
        if worker not in self.active:
            return []
        policy = self._options.on_timeout if gone.hung else self._options.on_crash
        self._vacate(gone)
        if policy == "raise" or not gone.replaceable:
            return self._give_up(gone)
        if self._overlaps and was_ready and not gone.hung and len(tickets := self.in_flight[worker]) > 1:
            was_ready = False
            for ticket in tickets.values():
                ticket.is_suspect = True
        return self._replace(gone, policy, blames_first=was_ready)

    def joined(self, worker: int) -> None:
        """A worker has come, or one that was leaving stays after all: from now on it takes tickets."""
        if self.roster.takes(worker):
            raise AssertionError(f"worker {worker} has joined twice: {self!r}")
        self.roster.join(worker)
        self._resize(1)

    def leaving(self, worker: int) -> None:
        """The worker is to go: it finishes what it has in hand, gets nothing more, and is dismissed after that."""
        if self.roster.takes(worker):
            self.roster.leave(worker)
            self._resize(-1)

    def lost(self, worker: int) -> None:
        """The worker went, through no fault of its tickets: others do these. No ticket is blamed, no retry counted."""
        if worker in self.active:
            if self.roster.takes(worker):
                self._resize(-1)
            self._queue(self._forget(worker))

    def stopped(self) -> list[Ticket]:
        """No worker can be had any more: give up everything that has no outcome yet."""
        lost, self._unsent, self._again = [*(ticket for _, ticket in self._again), *self._unsent], deque(), []
        for worker in tuple(self.active):
            lost += self._forget(worker)
        return sorted(lost, key=_batch)

    # ------------------------------------------------------------------------------------------------ answers

    @property
    def is_finished(self) -> bool:
        """Whether everything that was planned has been delivered, and nothing more will be planned."""
        return self._plan_ended and self.gone_count == self.planned_count

    def awaited(self) -> Ticket | None:
        """Return the ticket that the consumer waits for: the first in order that a worker has.

        None if no worker has one, or the batch whose turn it is was made, and is being pinned.
        """
        in_flight = [ticket for tickets in self.in_flight.values() for ticket in tickets.values()]
        first = [ticket for _, ticket in self._again[:1]] or [*self._unsent][:1]
        if self._in_order and all(ticket.batch > self.gone_count for ticket in (*in_flight, *first)):
            return None
        return min(in_flight, key=_batch, default=None)

    # ---------------------------------------------------------------------------------------------- decisions

    def assign(self) -> list[Action]:
        """Give unsent tickets to workers, in order, as far as one takes them; dismiss those that leave and are done."""
        actions: list[Action] = []
        for worker in [worker for worker in self.roster.leaving if not self.in_flight[worker]]:
            self._forget(worker)
            actions.append(("dismiss", worker))
        if not self.active and self.num_workers:  # every worker has come to the end of its data, or is lost for good
            self._plan_ended = True
            for ticket in self.stopped():
                self.ready(ticket.batch, VOID)
            return actions
        if self._give_again():  # what lies behind these comes after them
            self._give_new()
        self._idle.clear()
        if self.planned_count >= self.read_until and not (self._unsent or self._again):
            self._maybe_run_ahead()
        return actions

    def _give_new(self) -> None:
        """Give tickets that nobody has had."""
        unsent, roster = self._unsent, self.roster
        if self._by_turns:
            while unsent and (chosen := roster.take_turn()) is not None:
                self._give(chosen, unsent.popleft())
        elif unsent:
            loads, most = roster.loads(), self._most
            while unsent and loads and loads[0][0] < most:
                count, worker = loads[0]
                self._give(worker, unsent.popleft())
                heapq.heapreplace(loads, (count + 1, worker))

    def _give_again(self) -> bool:
        """Give tickets that workers were lost with; whether those after them can be given, too."""
        again = self._again
        passed_over: list[tuple[int, Ticket]] = []
        while again:
            ticket = again[0][1]
            if (chosen := self._choose(ticket)) is not None:
                heapq.heappop(again)
                self._give(chosen, ticket)
            elif self._static and ticket.is_suspect:
                passed_over.append(heapq.heappop(again))  # it waits for its own worker, and holds up no other
            else:
                break
        is_done = not again
        for entry in passed_over:
            heapq.heappush(again, entry)
        return is_done

    def _give(self, worker: int, ticket: Ticket) -> None:
        tickets = self.in_flight[worker]
        ticket.is_prompt = worker in self._idle and not tickets
        ticket.worker = worker
        tickets[ticket.batch] = ticket
        self.outbox[worker].append(ticket)

    def _choose(self, ticket: Ticket) -> int | None:
        """Return who gets a ticket that was lost with a worker; it holds one for a suspect."""
        roster, is_suspect = self.roster, ticket.is_suspect
        if self._static and roster.takes(worker := ticket.worker):
            chosen = None if worker in roster.held or (is_suspect and self.in_flight[worker]) else worker
        elif self._by_turns and not is_suspect:
            chosen = roster.take_turn()
        else:
            loads = roster.loads()
            chosen = loads[0][1] if loads and loads[0][0] < (1 if is_suspect else self._most) else None
        if is_suspect and chosen is not None:
            roster.held.add(chosen)
        return chosen

    @property
    def _most(self) -> int:
        """How many tickets a worker has at once, where it is given one for having the fewest."""
        return self.window // max(1, len(self.roster.takers)) if self._static else self.run_ahead.queue_depth

    def _maybe_run_ahead(self) -> None:
        """Ask for more tickets if a worker would stand idle because the awaited batch is slow.

        The scheduler asks for one round of tickets, or for batches of microseconds for as many as hide the latency of
        asking, and for no more until the consumer has read that far. A consumer that does not wait does not read: then
        training is what is slow. Nothing is asked for before all workers are up, for some may be slow to start, and
        others would read on without end; a first batch that is slow is one like others.
        """
        run_ahead = self.run_ahead
        if not self.are_up or self._plan_ended or not run_ahead.is_possible:
            return
        loads = self.roster.loads()
        if not loads or loads[0][0] >= run_ahead.low:
            return
        ahead = self.planned_count - self.gone_count
        rounds = run_ahead.rounds(self.num_workers, self.window, ahead, len(self._parked), self._parked_bytes)
        self.read_until = self.planned_count + max(0, rounds) * self.num_workers

    # -------------------------------------------------------------------------------------------------- workers

    def _resize(self, change: int) -> None:
        self.num_workers += change
        self.window = self._count_window()

    def _count_window(self) -> int:
        """Return how many batches there may be: tickets for all workers, and not too few where each has several."""
        return self.run_ahead.window(self.num_workers, self._prefetch, self._window_asked)

    def _vacate(self, gone: Vacate) -> None:
        """Note that the worker has no process, and take back tickets that were not sent to it."""
        worker = gone.worker
        self.roster.held.discard(worker)
        self._queue(self.in_flight[worker].pop(ticket.batch) for ticket in self.outbox.pop(worker, ()))

    def _recall(self, worker: int) -> list[Ticket]:
        """Take all that the worker has, in the order in which it got it."""
        self.outbox.pop(worker, None)
        tickets, self.in_flight[worker] = self.in_flight[worker], {}
        return list(tickets.values())

    def _forget(self, worker: int) -> list[Ticket]:
        """Let go of the worker; return what it had."""
        self.roster.retire(worker)
        tickets = self._recall(worker)
        del self.in_flight[worker]
        return tickets

    def _successor(self, gone: Vacate) -> list[Action]:
        """Have the worker's place filled, unless it is wanted no more."""
        return [] if gone.worker in self.roster.leaving else [("replace", gone.worker, gone.rest_s)]

    def _take_all(self, worker: int) -> list[Ticket]:
        """Take what the worker has, and what it was to be given again."""
        again, self._again = [ticket for _, ticket in sorted(self._again)], []
        self._queue(ticket for ticket in again if not (self._static and ticket.worker == worker))
        return self._recall(worker) + [ticket for ticket in again if self._static and ticket.worker == worker]

    def _queue(self, tickets: Iterable[Ticket]) -> None:
        """Have tickets sent before all that is behind them."""
        for ticket in tickets:
            heapq.heappush(self._again, (ticket.batch, ticket))

    def _replace(self, gone: Vacate, policy: str, *, blames_first: bool) -> list[Action]:
        """Have the worker's tickets done by another process, but perhaps for the one it was at."""
        tickets = self._recall(gone.worker)
        if self._overlaps:
            tickets.sort(key=_batch)
        actions = self._successor(gone)
        if tickets and blames_first:
            # Tickets are taken in order, so blame the first. Where several overlap, those of a worker that died are
            # suspects; after a hang the first is the awaited one, or holds up the successor that has it.
            actions += self._blame(tickets.pop(0), policy, gone.cause)
        self._queue(tickets)
        return actions

    def _blame(self, ticket: Ticket, policy: str, cause: Cause) -> list[Action]:
        ticket.tries += 1
        if policy == "skip" or ticket.tries > self._options.max_retries:
            return [Fail([ticket], cause, at_once=False, leave_out=policy == "skip")]
        self._queue([ticket])
        return []

    def _give_up(self, gone: Vacate) -> list[Action]:
        worker, replaceable = gone.worker, gone.replaceable
        tickets = self._recall(worker) if replaceable else self._take_all(worker)
        actions = self._successor(gone) if replaceable else []
        if not replaceable:
            self.roster.retire(worker)
        if tickets or not (replaceable or self.is_finished):
            actions.append(Fail(tickets, gone.cause, at_once=True))
        for ticket in tickets:
            self.ready(ticket.batch, VOID)
        return actions
