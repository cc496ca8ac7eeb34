"""Decide which worker does which batch, and which batch is handed over next. No loop, no clock, no process.

    planned(keys)  ──>  ┌────────────────────────────────────────────┐ ──> Send(worker, ticket)
    returned, ready ──> │ unsent -> in flight -> parked -> delivered │ ──> Deliver(outcome)
    exhausted, died,    │                                            │
    hung, rested ─────> └────────────────────────────────────────────┘ ──> Read(until), Replace(worker), Finish()

A batch is in exactly one of four places: *unsent* (read from the sampler, no worker has it), *in flight* (a worker
has its ticket), *parked* (its outcome is here, but an earlier batch is missing), or gone: *delivered* or *void* (an
iterable dataset ended before it, or its error was handed over at once).

Events come in as method calls, decisions go out as lists of actions which the session carries out. The scheduler alone
knows sequence numbers, order, window and retries. It belongs to one loop thread. Hypothesis drives it in the tests.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from typing import Any, Literal

from asyncloader.engine.actions import VOID, Action, Cause, Deliver, Fail, Finish, Read, Replace, Send, Ticket

# Under dynamic scheduling a worker has tickets for this long, so that it need not wait for the channel. A round trip
# takes 0.1 ms with an idle trainer and several ms with one that is busy in pure Python (the interpreter's switch
# interval is 5 ms), so one ticket behind the one in work is the least, and more are queued only for tiny batches.
_HIDE_LATENCY_S = 0.002
_LEAST_DEPTH = 2
_MOST_DEPTH = 100
# Where waiting for the channel takes a smaller share than this of a worker's time, it gets one ticket at a time.
_LATENCY_SHARE = 0.05
_LATENCY_GUESS_S = 0.0003
# What a parked batch costs beyond its data. Bounds run-ahead over batches of a few bytes.
_BATCH_OVERHEAD_BYTES = 4096
# Further than so many batches a worker nobody runs ahead, whatever they are thought to weigh.
_MOST_AHEAD = 256


class Scheduler:
    """The state of one session. Called from the loop thread only.

    Args:
        num_workers: Workers, numbered from 0.
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
    ) -> None:
        self.window = num_workers * prefetch_factor
        self.num_workers = num_workers
        self._static = scheduling == "static"
        self._in_order = in_order
        self._max_buffered_bytes = max_buffered_bytes if in_order else 0
        self._on_crash = on_crash
        self._on_timeout = on_timeout
        self._max_retries = max_retries
        self._overlapping = overlapping

        self.active = set(range(num_workers))
        self.resting: set[int] = set()  # active, but without a process for a moment
        self.in_flight: list[dict[int, Ticket]] = [{} for _ in range(num_workers)]
        self._unsent: list[tuple[int, Ticket]] = []  # a heap by sequence number
        # By worker, what was in work at once when its process died: done again one by one, to find out which is to
        # blame. Until the last of them has returned the worker gets nothing else.
        self._suspects: dict[int, deque[Ticket]] = {}
        self._parked: dict[int, Any] = {}
        self._next_worker = (first if next_worker is None else next_worker) % num_workers

        self.planned_count = first
        self.gone_count = first  # delivered or void; in order it is the sequence number that is awaited
        self.void_count = 0
        self._plan_ended = False
        self._finished = False

        self._read_until = first + self.window
        self._parked_bytes = 0
        self._mean_bytes: float | None = None
        self._is_bounded = True  # the size of every batch so far is known
        self._mean_busy_s: float | None = None
        self._latency_s = _LATENCY_GUESS_S

    def __repr__(self) -> str:
        loads = ",".join(str(len(tickets)) for tickets in self.in_flight)
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
        ticket = self.in_flight[worker].pop(seq, None)
        if ticket is None:
            raise AssertionError(f"worker {worker} returned {seq}, which it did not have: {self!r}")
        mean = self._mean_busy_s
        self._mean_busy_s = busy_s if mean is None else mean + 0.2 * (busy_s - mean)
        if ticket.is_prompt:
            self._latency_s += 0.2 * (wait_s - self._latency_s)
        else:
            self._latency_s += 0.005 * (_LATENCY_GUESS_S - self._latency_s)  # long ago: to be tried again
        return self._assign(idle=worker) if self._unsent or self._suspects else []

    def ready(self, seq: int, outcome: Any, nbytes: int = 0) -> list[Action]:
        """The outcome of a returned ticket can be handed over.

        Args:
            seq: Of the ticket.
            outcome: What is handed over.
            nbytes: How large it is; 0 for what is no batch, less than 0 if nobody knows: then none is run ahead of.
        """
        self._is_bounded &= nbytes >= 0
        is_batch = nbytes > 0  # what is void, and an exception, tells nothing about the size of batches
        nbytes = max(nbytes, 0) + _BATCH_OVERHEAD_BYTES
        if is_batch:
            mean = self._mean_bytes
            self._mean_bytes = nbytes if mean is None else mean + 0.2 * (nbytes - mean)
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

    def exhausted(self, worker: int, seq: int) -> list[Action]:
        """The worker's iterable dataset ended before this ticket: it, and what the worker has behind it, is void."""
        self.active.discard(worker)
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
    ) -> list[Action]:
        """The worker's process ended. What it was at is tried again, given up or left out, as ``on_crash`` says.

        A worker that cannot be replaced (it held the state of an iterable dataset) takes no more tickets, and what it
        had in flight is named in one error. One that was not ready had not begun with any ticket. One that rests gets
        its new process later: `rested` tells. One that had come to the end of its data is not needed any more.
        """
        if worker not in self.active:
            return []
        if rests and replaceable:
            self.resting.add(worker)
        if self._on_crash == "raise" or not replaceable:
            return self._give_up(worker, replaceable, cause)
        in_work = len(self.in_flight[worker]) if was_ready else 0
        if self._overlapping and in_work > 1:
            self._suspects[worker] = deque(sorted(self._take_in_flight(worker), key=lambda ticket: ticket.seq))
        return self._replace(worker, self._on_crash, was_ready, cause)

    def hung(self, worker: int, cause: Cause | None = None, *, rests: bool = False) -> list[Action]:
        """The worker was killed, for a batch did not come in time: what it was at fares as ``on_timeout`` says."""
        if rests:
            self.resting.add(worker)
        return self._replace(worker, self._on_timeout, True, cause)

    def rested(self, worker: int) -> list[Action]:
        """The worker has a process again."""
        self.resting.discard(worker)
        return self._assign()

    def stopped(self) -> list[Ticket]:
        """No worker can be had any more: give up everything that has no outcome yet."""
        lost = [ticket for tickets in self.in_flight for ticket in tickets.values()]
        lost += [ticket for _, ticket in self._take_unsent()]
        lost += [ticket for suspects in self._suspects.values() for ticket in suspects]
        self._suspects.clear()
        for tickets in self.in_flight:
            tickets.clear()
        self.active.clear()
        return sorted(lost, key=lambda ticket: ticket.seq)

    # ------------------------------------------------------------------------------------------------ answers

    def awaited(self) -> Ticket | None:
        """Return the ticket that the consumer waits for: the first in order that a worker has."""
        in_flight = [ticket for tickets in self.in_flight for ticket in tickets.values()]
        return min(in_flight, key=lambda ticket: ticket.seq, default=None)

    def validate(self) -> None:
        """Check what must hold between any two events."""
        flying = [seq for tickets in self.in_flight for seq in tickets]
        unsent = [seq for seq, _ in self._unsent]
        unsent += [ticket.seq for suspects in self._suspects.values() for ticket in suspects]
        everywhere = [*flying, *unsent, *self._parked]
        assert len(everywhere) == len(set(everywhere)), f"a batch is in two places: {self!r}"
        if self._in_order:
            assert all(seq >= self.gone_count for seq in everywhere), f"a batch came back after delivery: {self!r}"
            assert self.gone_count not in self._parked, f"a batch is parked that could go: {self!r}"
        assert self._parked_bytes == sum(nbytes for _, nbytes in self._parked.values())
        assert self.gone_count + len(self._parked) + len(flying) + len(unsent) <= self.planned_count

    # ---------------------------------------------------------------------------------------------- decisions

    def _assign(self, idle: int | None = None) -> list[Action]:
        """Give unsent tickets to workers, in order, as far as there is a worker to take them.

        Args:
            idle: The worker that has just finished something.
        """
        actions: list[Action] = []
        if not self.active:  # every worker has come to the end of its data, or is lost
            self._plan_ended = True
            for _, ticket in sorted(self._take_unsent()):
                actions += self.ready(ticket.seq, VOID)
            return actions + self._maybe_finish()
        for worker in tuple(self._suspects):
            actions += self._assign_suspect(worker)
        while self._unsent:
            ticket = self._unsent[0][1]
            chosen = self._choose(ticket)
            if chosen is None:
                break
            heapq.heappop(self._unsent)
            ticket.is_prompt = chosen == idle and not self.in_flight[chosen]
            actions.append(self._send(chosen, ticket))
        return actions + self._maybe_run_ahead()

    def _send(self, worker: int, ticket: Ticket) -> Send:
        ticket.worker = worker
        self.in_flight[worker][ticket.seq] = ticket
        return Send(worker, ticket)

    def _assign_suspect(self, worker: int) -> list[Action]:
        if self.in_flight[worker] or worker in self.resting:
            return []
        suspects = self._suspects[worker]
        if not suspects:
            del self._suspects[worker]
            return []
        ticket = suspects.popleft()
        ticket.is_prompt = False
        return [self._send(worker, ticket)]

    def _take_unsent(self) -> list[tuple[int, Ticket]]:
        unsent, self._unsent = self._unsent, []
        return unsent

    def _choose(self, ticket: Ticket) -> int | None:
        if ticket.worker in self.active and self._static:  # sent again after a crash: to the same worker id
            return None if self._is_held(ticket.worker) else ticket.worker
        if not self._static:
            is_any_held = self.resting or self._suspects
            ready = {w for w in self.active if not self._is_held(w)} if is_any_held else self.active
            worker = min(ready, key=lambda w: (len(self.in_flight[w]), w), default=-1)
            return worker if worker >= 0 and len(self.in_flight[worker]) < self._queue_depth() else None
        # As torch: round robin over the workers that still have data, and out of order only to one with room.
        most = self.window // len(self.active)
        for _ in range(self.num_workers):
            worker = self._next_worker
            has_room = self._in_order or len(self.in_flight[worker]) < most
            if has_room and self._is_held(worker):
                return None  # its turn is kept for it
            if worker in self.active and has_room:
                self._next_worker = (worker + 1) % self.num_workers
                return worker
            self._next_worker = (worker + 1) % self.num_workers
        return None

    def _is_held(self, worker: int) -> bool:
        return worker in self.resting or worker in self._suspects

    def _queue_depth(self) -> int:
        """Return how many tickets a worker has at once under dynamic scheduling: as few as keep it busy."""
        if self._mean_busy_s is not None and not self._overlapping:
            return 1 if self._latency_s < _LATENCY_SHARE * self._mean_busy_s else self._depth()
        return self._depth()

    def _depth(self) -> int:
        """Return how many batches keep a worker busy, and cover the latency of the channel and of asking."""
        least = max(_LEAST_DEPTH, self._overlapping)
        if self._mean_busy_s is None:
            return least
        return max(least, min(1 + int(_HIDE_LATENCY_S / max(self._mean_busy_s, 1e-6)), _MOST_DEPTH))

    def _maybe_run_ahead(self) -> list[Action]:
        """Ask for more tickets if a worker would stand idle because the awaited batch is slow.

        One round of tickets, or for batches of microseconds as many as hide the latency of asking. Asked for at most
        once until the consumer has read that far. A consumer that does not wait does not read: then the training is
        what is slow, and the window is enough.
        """
        if self.planned_count < self._read_until or self._unsent or not self._max_buffered_bytes:
            return []
        if self._plan_ended or self._mean_bytes is None or not self._is_bounded:
            return []
        depth = self._depth()
        # Asked for early, so that what is read comes before a worker stands idle.
        low = self._overlapping or max(_LEAST_DEPTH, depth // 2)
        if not any(len(self.in_flight[worker]) < low for worker in self.active):
            return []
        unknown = self.planned_count - self.gone_count - len(self._parked)  # in flight, or returned and being pinned
        room_bytes = self._max_buffered_bytes - self._parked_bytes - self._mean_bytes * unknown
        room = self.window + _MOST_AHEAD * self.num_workers - (self.planned_count - self.gone_count)
        rounds = min(depth - 1, int(room_bytes / (self._mean_bytes * self.num_workers)), room // self.num_workers)
        if rounds < 1:
            return []
        self._read_until = self.planned_count + rounds * self.num_workers
        return [Read(self._read_until)]

    def _take_in_flight(self, worker: int) -> list[Ticket]:
        lost = list(self.in_flight[worker].values())
        self.in_flight[worker].clear()
        return lost

    def _take_all(self, worker: int) -> list[Ticket]:
        """Take what the worker has, and what it was to be given again."""
        lost = [*self._take_in_flight(worker), *self._suspects.pop(worker, ())]
        again = [entry for entry in self._unsent if entry[1].worker == worker] if self._static else []
        for entry in again:
            self._unsent.remove(entry)
        heapq.heapify(self._unsent)
        return lost + [ticket for _, ticket in again]

    def _put_back(self, worker: int, tickets: list[Ticket]) -> None:
        """Have tickets, in ascending order, sent again before all that is behind them."""
        if worker in self._suspects:
            self._suspects[worker].extendleft(reversed(tickets))
        else:
            for ticket in tickets:
                heapq.heappush(self._unsent, (ticket.seq, ticket))

    def _replace(self, worker: int, policy: str, was_ready: bool, cause: Cause | None) -> list[Action]:
        """Have the worker's tickets done by another process, but perhaps for the one it was at."""
        lost = self._take_in_flight(worker)
        if self._overlapping:
            lost.sort(key=lambda ticket: ticket.seq)
        actions: list[Action] = [] if worker in self.resting else [Replace(worker)]
        if lost and was_ready:
            # Tickets are taken in order, so blame the first. Overlapping tickets of a worker that died are suspects and
            # never get here; after a hang the first is the awaited one.
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
        lost = self._take_in_flight(worker) if replaceable else self._take_all(worker)
        actions: list[Action] = []
        if not replaceable:
            self.active.discard(worker)
        elif worker not in self.resting:
            actions.append(Replace(worker))
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
        else:
            actions.append(Deliver(outcome))
        actions += self._maybe_finish()
        return actions

    def _maybe_finish(self) -> list[Action]:
        if self._plan_ended and not self._finished and self.gone_count == self.planned_count:
            self._finished = True
            return [Finish()]
        return []
