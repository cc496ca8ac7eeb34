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

What a worker had that died is done again by its next process, one ticket at a time and before anything else: so it is
found out which of several that overlapped kills a worker.

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
from asyncloader.engine.run_ahead import RunAhead
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
        in_flight: By worker, its tickets by number: of those that take tickets, or have some in hand and leave.
        takers: Workers that take tickets. The first of them has the turn.
        run_ahead: Is told what batches take, and how large they are.
        are_up: All workers have opened the dataset. Written by the engine; nothing is run ahead of before.
        planned_count: Batches that were read, those before the run included.
        gone_count: Batches that were delivered or are void; in order this is the number of the awaited batch.
        void_count: Batches that are void.
    """

    num_workers: int

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
        self._static = options.scheduling == "static" or options.is_iterable
        self._in_order = options.in_order
        self._by_turns = self._static and options.in_order
        self._overlaps = options.tickets_at_once > 0
        self.in_flight: dict[int, dict[int, Ticket]] = {worker: {} for worker in range(num_workers)}
        self.takers: deque[int] = deque(range(num_workers))
        self.takers.rotate(-(first if next_worker is None else next_worker))
        self.delivered: list[Any] = []
        self.outbox: defaultdict[int, list[Ticket]] = defaultdict(list)
        self._idle: set[int] = set()  # workers that have returned their last ticket since the last look
        self._unsent: deque[Ticket] = deque()  # in order
        self._again: dict[int, list[Ticket]] = {}  # by worker, what it was lost with, in order: until that is made
        self._parked: dict[int, Any] = {}
        self.planned_count: int = first
        self.gone_count: int = first
        self.void_count: int = 0
        self._plan_ended = False
        self.run_ahead: RunAhead = RunAhead(options, is_allowed=runs_ahead)
        self.are_up = False
        self.window: int = self.run_ahead.window(num_workers)
        self.read_until: int = first + self.window

    def __repr__(self) -> str:
        loads = ",".join(str(len(tickets)) for _, tickets in sorted(self.in_flight.items()))
        unsent = len(self._unsent) + sum(map(len, self._again.values()))
        return (
            f"<Scheduler planned={self.planned_count} unsent={unsent} in_flight=[{loads}] "
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
        try:
            return self.in_flight[worker].pop(batch)
        except KeyError as error:
            raise AssertionError(f"worker {worker} returned {batch}, which it did not have: {self!r}") from error

    def measured(self, worker: int, ticket: Ticket, record: Record, nbytes: int) -> None:
        """The worker has returned this ticket, perhaps with others before it: told once for all of them.

        Args:
            worker: The worker.
            ticket: The last of them.
            record: The worker's notes about it.
            nbytes: How large its batch is; 0 for what is no batch, less than 0 if nobody knows: then none is run ahead
                of.
        """
        if not self.in_flight.get(worker):
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
            parked[batch] = item, nbytes
            return
        while True:
            self.gone_count += 1
            if item is VOID:
                self.void_count += 1  # which frees a place in the window
            else:
                self.delivered.append(item)
            if not parked or (following := parked.pop(self.gone_count, None)) is None:
                return
            item, _ = following

    def exhausted(self, worker: int) -> None:
        """The worker's iterable dataset has ended: what the worker still has is void."""
        for ticket in self._forget(worker):
            self.ready(ticket.batch, VOID)

    def vacated(self, gone: Vacate) -> list[Action]:
        """A worker has no process any more. Its tickets are tried again, given up or left out, as the options say.

        Where no other process takes its place, the worker held the state of an iterable dataset: it takes no more
        tickets, and one error names those that it had. Where another one comes, now or later, what the worker had
        waits for that. What was not sent to the worker is not blamed.

        Args:
            gone: The worker, and how it ended.
        """
        worker = gone.worker
        if worker not in self.in_flight:
            return []
        policy = self._options.on_timeout if gone.hung else self._options.on_crash
        if not gone.replaceable:
            return self._give_up(gone, self._forget(worker))
        waiting = self._not_sent(worker)
        tickets, actions = self._recall(worker), list[Action]()
        if policy == "raise":
            actions = self._give_up(gone, tickets)
            tickets = []
        elif tickets and gone.was_ready and not (self._overlaps and len(tickets) > 1 and not gone.hung):
            # Tickets are taken in order, so blame the first. Where several overlap, none of those of a worker that died
            # is blamed before it was alone; after a hang the first is the awaited one, or holds up the next process.
            if self._overlaps:
                tickets.sort(key=_batch)
            actions = self._blame(tickets, policy, gone.cause)
        self._do_again(worker, [*tickets, *waiting])
        return actions if worker not in self.takers else [("replace", worker, gone.rest_s), *actions]

    def joined(self, worker: int) -> None:
        """A worker has come, or one that was leaving stays after all: from now on it takes tickets."""
        if worker in self.takers:
            raise AssertionError(f"worker {worker} has joined twice: {self!r}")
        self.in_flight.setdefault(worker, {})
        self.takers.append(worker)
        self._resize(1)

    def leaving(self, worker: int) -> None:
        """The worker is to go: it finishes what it was sent, gets nothing more, and is dismissed after that.

        What waits for room in its hand is done by others: a worker that has grown too large would grow on with it.
        """
        if worker in self.takers:
            self.takers.remove(worker)
            self._resize(-1)
            self._do_again(worker, [*self._not_sent(worker), *self._again.pop(worker, [])])

    def lost(self, worker: int) -> None:
        """The worker went, through no fault of its tickets: others do these. No ticket is blamed, no retry counted."""
        if worker in self.in_flight:
            if worker in self.takers:
                self._resize(-1)
            self._do_again(worker, self._forget(worker))

    def stopped(self) -> list[Ticket]:
        """No worker can be had any more: give up everything that has no outcome yet."""
        lost, self._unsent = [*self._unsent], deque()
        for worker in tuple(self.in_flight):
            lost += self._forget(worker)
        return sorted(lost, key=_batch)

    # ------------------------------------------------------------------------------------------------ answers

    @property
    def is_finished(self) -> bool:
        """Whether everything that was planned has been delivered, and nothing more will be planned."""
        return self._plan_ended and self.gone_count == self.planned_count

    @property
    def has_more(self) -> bool:
        """Whether there is something to be done that no worker was sent, or more may be planned."""
        return bool(self._unsent or self.outbox) or not self._plan_ended

    def awaited(self) -> Ticket | None:
        """Return the ticket that the consumer waits for: the first in order that a worker has.

        None if no worker has one, or the batch whose turn it is was made, and is being pinned.
        """
        in_flight = [ticket for tickets in self.in_flight.values() for ticket in tickets.values()]
        others = [ticket for tickets in (self._unsent, *self._again.values()) for ticket in tickets]
        if self._in_order and all(ticket.batch > self.gone_count for ticket in (*in_flight, *others)):
            return None
        return min(in_flight, key=_batch, default=None)

    # ---------------------------------------------------------------------------------------------- decisions

    def assign(self) -> list[Action]:
        """Give unsent tickets to workers, in order, as far as one takes them; dismiss those that leave and are done."""
        actions: list[Action] = []
        if len(self.in_flight) > len(self.takers):
            for worker in [worker for worker in self.in_flight.keys() - self.takers if not self.in_flight[worker]]:
                self._forget(worker)
                actions.append(("dismiss", worker))
        if not self.in_flight and self.num_workers:  # all workers are at the end of their data, or lost for good
            self._plan_ended = True
            for ticket in self.stopped():
                self.ready(ticket.batch, VOID)
            return actions
        if self._again:
            self._give_again()
        if self._unsent and self.takers:
            self._give_new()
        self._idle.clear()
        if self.planned_count >= self.read_until and not (self._unsent or self._again):
            self._maybe_run_ahead()
        return actions

    def _give_again(self) -> None:
        """Give workers what they were lost with, one ticket after the other."""
        for worker, tickets in [*self._again.items()]:
            if not self.in_flight[worker]:
                if tickets:
                    self._give(worker, tickets.pop(0))
                else:
                    del self._again[worker]

    def _give_new(self) -> None:
        """Give tickets that nobody has had, or that nobody has to do again."""
        unsent, takers, again = self._unsent, self.takers, self._again
        if self._by_turns:  # as torch: round robin over the workers that still have data
            while unsent and (chosen := takers[0]) not in again:
                takers.rotate(-1)
                self._give(chosen, unsent.popleft())
            return
        loads, most = self._loads(), self._most
        while unsent and loads and loads[0][0] < most:
            count, worker = loads[0]
            unsent[0].is_prompt = not count and worker in self._idle
            self._give(worker, unsent.popleft())
            heapq.heapreplace(loads, (count + 1, worker))

    def _give(self, worker: int, ticket: Ticket) -> None:
        ticket.worker = worker
        self.in_flight[worker][ticket.batch] = ticket
        self.outbox[worker].append(ticket)

    def _loads(self) -> list[tuple[int, int]]:
        """Return a heap of the workers that can be given new tickets: how many tickets each has, and its id."""
        loads = [(len(self.in_flight[worker]), worker) for worker in self.takers if worker not in self._again]
        heapq.heapify(loads)
        return loads

    @property
    def _most(self) -> int:
        """How many tickets a worker has at once, where it is given one for having the fewest."""
        return self.window // max(1, len(self.takers)) if self._static else self.run_ahead.queue_depth

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
        loads = self._loads()
        if not loads or loads[0][0] >= run_ahead.low:
            return
        ahead = self.planned_count - self.gone_count
        sizes = [nbytes for _, nbytes in self._parked.values()]
        rounds = run_ahead.rounds(self.num_workers, self.window, ahead, sizes)
        self.read_until = self.planned_count + max(0, rounds) * self.num_workers

    # -------------------------------------------------------------------------------------------------- workers

    def _resize(self, change: int) -> None:
        self.num_workers += change
        self.window = self.run_ahead.window(self.num_workers)

    def _not_sent(self, worker: int) -> list[Ticket]:
        """Take what the worker was given, and was not sent."""
        in_flight = self.in_flight[worker]
        return [in_flight.pop(ticket.batch) for ticket in self.outbox.pop(worker, ())]

    def _recall(self, worker: int) -> list[Ticket]:
        """Take all that the worker has, in the order in which it got it."""
        tickets = [*self.in_flight[worker].values()]
        self.in_flight[worker].clear()
        self.outbox.pop(worker, None)
        return tickets

    def _forget(self, worker: int) -> list[Ticket]:
        """Let go of the worker; return what it had, and what it was to do again."""
        if worker not in self.in_flight:
            return []
        if worker in self.takers:
            self.takers.remove(worker)
        tickets = self._recall(worker) + self._again.pop(worker, [])
        del self.in_flight[worker]
        return tickets

    def _do_again(self, worker: int, tickets: list[Ticket]) -> None:
        """Have tickets done by the worker's next process, or by others if there is none, before all behind them."""
        if worker not in self.takers:
            self._unsent = deque(sorted([*tickets, *self._unsent], key=_batch))
        elif tickets:
            self._again[worker] = sorted([*tickets, *self._again.get(worker, ())], key=_batch)

    def _blame(self, tickets: list[Ticket], policy: str, cause: Cause) -> list[Action]:
        """Count a try of the first ticket, which has killed a worker, or was too slow; perhaps give it up."""
        tickets[0].tries += 1
        if policy != "skip" and tickets[0].tries <= self._options.max_retries:
            return []
        return [Fail([tickets.pop(0)], cause, at_once=False, leave_out=policy == "skip")]

    def _give_up(self, gone: Vacate, tickets: list[Ticket]) -> list[Action]:
        """Have one error stand for what a worker had."""
        for ticket in tickets:
            self.ready(ticket.batch, VOID)
        return [Fail(tickets, gone.cause, at_once=True)] * bool(tickets or not (gone.replaceable or self.is_finished))
