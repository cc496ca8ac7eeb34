"""A trainer and its cluster, played on a clock that is none: the real scheduler, and queues for all that costs time.

    Scheduler ── tickets ──> worker ──> its node's link ──> the trainer's link ──> the trainer's thread ──> consumer
        ^                    (one batch after the other)    (one for all nodes)     (receives, decodes)        │
        └────────────────────────────── read on, as far as window and run-ahead allow ────────────────────────┘

What passes a link or the thread takes turns there; a batch is passed on while it is still coming (cut-through). Nodes
end and come back: with notice their workers finish what they have, without it what they had is made again by others.
No model of TCP: no batch is slow on its way for any other reason than those before it.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from asyncloader.engine.actions import Deliver, Dismiss, Send
from asyncloader.engine.scheduler import Scheduler
from tests import deciders


class Costs(NamedTuple):
    """What the trainer's process pays.

    Attributes:
        loop_s: The thread of the loop, for a batch however small. Seconds.
        take_s: The thread that takes batches. Seconds; Python's lock lets one of the two run at a time.
        receive_bytes_s: Bytes a second that the thread of the loop receives.
    """

    loop_s: float
    take_s: float
    receive_bytes_s: float


class Work(NamedTuple):
    """What a batch is.

    Attributes:
        nbytes: Its size.
        batch_s: What it takes one worker, on average. Seconds.
        sigma: Of the log-normal distribution of that; 1.5 is a heavy tail.
        step_s: What the training takes for it. Seconds.
    """

    nbytes: int
    batch_s: float
    sigma: float = 0.2
    step_s: float = 0.0


class Cluster(NamedTuple):
    """Who works, and how they are connected.

    Attributes:
        num_workers: On all nodes.
        link_bytes_s: Of the trainer's link, and of that of each node. Bytes a second.
        per_node: Workers of a node.
        delay_s: One way. Seconds.
        life_s: How long a node is there, on average (exponential). Seconds.
        noticed: Share of nodes that have time to finish what they have in hand.
        absent_s: How long a node is away. Seconds.
    """

    num_workers: int
    link_bytes_s: float
    per_node: int = 16
    delay_s: float = 1e-4
    life_s: float = float("inf")
    noticed: float = 0.5
    absent_s: float = 5.0


class Played(NamedTuple):
    """What came of it. Rates and shares are of the middle half of the run, by what the trainer has received.

    Attributes:
        batches_s: Batches a second.
        elapsed_s: Of the whole run, on its own clock.
        shares: How much of their time the workers, the network, the thread and the training were at work.
        peak_bytes: Batches in the trainer's memory at a time, at most.
        again: Batches that were made once more, since a node was lost.
        work_s: Seconds of work in all batches, each counted once.
        there: Share of the workers that were there.
    """

    batches_s: float
    elapsed_s: float
    shares: dict[str, float]
    peak_bytes: int
    again: int
    work_s: float
    there: float

    @property
    def limit(self) -> str:
        """What was at work all the time; "order" if nothing was: workers stood idle behind slow batches."""
        name, share = max(self.shares.items(), key=lambda item: item[1])
        return name if share > 0.9 else "order"


def bounds(costs: Costs, work: Work, cluster: Cluster) -> dict[str, float]:
    """Return what each part of it could do by itself, in batches a second."""
    thread_s = costs.loop_s + costs.take_s + work.nbytes / costs.receive_bytes_s
    return {
        "workers": cluster.num_workers / work.batch_s,
        "network": cluster.link_bytes_s / work.nbytes,
        "thread": 1 / thread_s,
        "training": 1 / (costs.take_s + work.step_s),
    }


@dataclass
class _Node:
    """A machine with workers.

    Attributes:
        workers: Their ids.
        here: Of these, who has not ended.
        link_free_at: Until then its link is taken.
    """

    workers: list[int]
    here: int = 0
    link_free_at: float = 0.0


@dataclass
class _Sums:
    """Seconds that each part was at work so far, and that workers were there."""

    at_s: float = 0.0  # until then the latter is counted
    there_s: float = 0.0
    busy_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("workers", "network", "thread"), 0.0))


class _Made(NamedTuple):
    """A batch on its way."""

    worker: int
    life: int
    batch: int
    busy_s: float
    wait_s: float
    ends_at: float  # when the last byte of it has left where it is


class Play:
    """One run.

    Args:
        costs: Of the trainer's process.
        work: A batch.
        cluster: Who works.
        num_batches: Of the run, 4 or more.
        seed: Of what is drawn: how long batches take, and nodes stay.
        check: Have the scheduler look at itself after each event.
        options: Of the scheduler, beyond a loader's own for workers elsewhere.
    """

    def __init__(
        self,
        costs: Costs,
        work: Work,
        cluster: Cluster,
        num_batches: int,
        *,
        seed: int = 0,
        check: bool = False,
        **options: Any,
    ) -> None:
        defaults: dict[str, Any] = {"num_at_start": 0, "scheduling": "dynamic", "max_buffered_bytes": 64 << 20}
        self.scheduler = Scheduler(deciders.options(**defaults | options))
        self.costs, self.work, self.cluster, self.num_batches = costs, work, cluster, num_batches
        chance = self._chance = np.random.default_rng(seed)
        mean = np.log(work.batch_s) - work.sigma**2 / 2
        self.durations_s: list[float] = chance.lognormal(mean, work.sigma, num_batches).tolist()
        self.delivered: list[int] = []
        self._check, self._in_order = check, options.get("in_order", True)
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = itertools.count()
        # workers
        numbers, size = range(cluster.num_workers), cluster.per_node
        self._nodes = [_Node(list(numbers[first : first + size])) for first in numbers[::size]]
        self._lives = [0] * cluster.num_workers
        self._free_at = [0.0] * cluster.num_workers
        self._made: set[int] = set()
        self._again = 0
        self._num_there = 0
        # network and thread
        self._link_free_at = 0.0
        self._arrived: deque[_Made] = deque()
        self._is_receiving = False
        self._num_received = 0
        self._lent_s = 0.0  # of the thread's time, by the consumer, which had Python's lock
        # consumer
        self._ready: deque[int] = deque()
        self._is_waiting = self._has_batch = self._is_finished = False
        self._window = self._planned = self._read_until = 0
        self._here_bytes = self._peak_bytes = 0
        self._sums = _Sums()
        self._marks: list[_Sums] = []

    def run(self) -> Played:
        """Play it to the end.

        Raises:
            AssertionError: if a batch was lost, doubled or, where there is one, out of order; or the run stands still.
        """
        for node in self._nodes:
            self._come(node)
        self._look()
        most = 1000 * self.num_batches + 100 * len(self._lives)
        while self._events and (self._ready or not self._is_finished):
            self._now, number, happen, args = heapq.heappop(self._events)
            assert number < most, f"nothing comes of it: {self.scheduler}"  # nodes come and go for ever
            happen(*args)
            if self._check:
                self.scheduler.validate()
        delivered = self.delivered if self._in_order else sorted(self.delivered)
        assert delivered == list(range(self.num_batches)), f"{len(delivered)} batches of {self.num_batches}"
        return self._told()

    def _told(self) -> Played:
        first, last = self._marks
        spent_s, work = last.at_s - first.at_s, self.work
        busy_s = {name: last.busy_s[name] - first.busy_s[name] for name in last.busy_s}
        rate = (len(self.delivered) // 2) / spent_s
        shares = {name: seconds / spent_s for name, seconds in busy_s.items()}
        shares["workers"] /= self.cluster.num_workers
        shares["training"] = rate * (self.costs.take_s + work.step_s)
        there = (last.there_s - first.there_s) / spent_s / self.cluster.num_workers
        return Played(rate, self._now, shares, self._peak_bytes, self._again, sum(self.durations_s), there)

    def _at(self, at_s: float, happen: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._events, (at_s, next(self._count), happen, args))

    # ----------------------------------------------------------------------------------------------- the scheduler

    def _do(self, actions: list[Any]) -> None:
        for action in actions:
            kind = type(action)
            if kind is Send:
                self._send(action.worker, action.ticket.batch)
            elif kind is Deliver:
                self._ready.append(action.item)
                self._wake()
            elif kind is Dismiss:
                self._dismissed(action.worker)
            else:
                raise AssertionError(action)
        scheduler, before = self.scheduler, (self._window, self._read_until)
        self._window, self._read_until = scheduler.window, scheduler.read_until
        self._is_finished = scheduler.is_finished
        if (self._window, self._read_until) != before:
            self._wake()

    # --------------------------------------------------------------------------------------------------- workers

    def _send(self, worker: int, batch: int) -> None:
        """A worker does its tickets one after the other: so it is known at once when this one is done."""
        came_at = self._now + self.cluster.delay_s
        free_at, busy_s = self._free_at[worker], self.durations_s[batch]
        began = max(free_at, came_at)
        self._free_at[worker] = began + busy_s
        made = _Made(worker, self._lives[worker], batch, busy_s, began - free_at, 0.0)
        self._at(began + busy_s, self._done, made)

    def _done(self, made: _Made) -> None:
        if self._is_lost(made):
            return
        self._sums.busy_s["workers"] += made.busy_s
        self._again += made.batch in self._made
        self._made.add(made.batch)
        node = self._nodes[made.worker // self.cluster.per_node]
        began = max(self._now, node.link_free_at)
        node.link_free_at = began + self.work.nbytes / self.cluster.link_bytes_s
        self._at(began, self._on_link, made._replace(ends_at=node.link_free_at))

    def _is_lost(self, made: _Made) -> bool:
        return self._lives[made.worker] != made.life

    def _come(self, node: _Node) -> None:
        node.here = len(node.workers)
        self._count_there(node.here)
        for worker in node.workers:
            self._free_at[worker] = self._now
            self._do(self.scheduler.joined(worker))
        if self.cluster.life_s < float("inf"):
            self._at(self._now + self._chance.exponential(self.cluster.life_s), self._go, node)

    def _go(self, node: _Node) -> None:
        if self._chance.random() < self.cluster.noticed:
            for worker in node.workers:
                self._do(self.scheduler.leaving(worker))
            return
        self._count_there(-node.here)
        for worker in node.workers:
            self._do(self.scheduler.lost(worker))
            self._lives[worker] += 1
        self._at(self._now + self.cluster.absent_s, self._come, node)

    def _dismissed(self, worker: int) -> None:
        self._lives[worker] += 1
        node = self._nodes[worker // self.cluster.per_node]
        node.here -= 1
        self._count_there(-1)
        if not node.here:
            self._at(self._now + self.cluster.absent_s, self._come, node)

    def _count_there(self, change: int) -> None:
        sums = self._sums
        sums.there_s += self._num_there * (self._now - sums.at_s)
        sums.at_s = self._now
        self._num_there += change

    # ---------------------------------------------------------------------------------------- network and thread

    def _on_link(self, made: _Made) -> None:
        """It begins to leave its node: when the trainer's link is free it is on its way."""
        if self._is_lost(made):
            return
        on_link_s = self.work.nbytes / self.cluster.link_bytes_s
        began = max(self._now, self._link_free_at)
        self._link_free_at = began + on_link_s
        self._sums.busy_s["network"] += on_link_s
        ends_at = max(self._link_free_at, made.ends_at) + self.cluster.delay_s
        self._at(began + self.cluster.delay_s, self._arrive, made._replace(ends_at=ends_at))

    def _arrive(self, made: _Made) -> None:
        self._arrived.append(made)
        if not self._is_receiving:
            self._receive()

    def _receive(self) -> None:
        """Begin with the next batch that is there: what has not begun waits in buffers of the network."""
        while self._arrived:
            made = self._arrived.popleft()
            if self._is_lost(made):
                continue
            self._is_receiving = True
            self._here_bytes += self.work.nbytes
            self._peak_bytes = max(self._peak_bytes, self._here_bytes)
            lent_s, self._lent_s = self._lent_s, 0.0
            busy_s = lent_s + self.costs.loop_s + self.work.nbytes / self.costs.receive_bytes_s
            self._sums.busy_s["thread"] += busy_s
            self._at(max(self._now + busy_s, made.ends_at + self.costs.loop_s), self._received, made)
            return

    def _received(self, made: _Made) -> None:
        self._is_receiving = False
        if self._is_lost(made):
            self._here_bytes -= self.work.nbytes
        else:
            self._num_received += 1
            self._mark()
            scheduler = self.scheduler
            actions = scheduler.returned(made.worker, made.batch, made.busy_s, made.wait_s)
            self._do(actions + scheduler.ready(made.batch, made.batch, self.work.nbytes))
        self._receive()

    # -------------------------------------------------------------------------------------------------- consumer

    def _wake(self) -> None:
        if self._is_waiting:
            self._is_waiting = False
            self._at(self._now, self._look)

    def _look(self) -> None:
        """Take the next batch, let go of the last one, and train; or read on as far as a consumer may that waits."""
        if self._has_batch:
            self._has_batch = False
            self._here_bytes -= self.work.nbytes
        if not self._ready:
            self._is_waiting = True
            self._read(max(self._window + len(self.delivered), self._read_until))
            return
        self._has_batch = True
        self.delivered.append(self._ready.popleft())
        self._lent_s += self.costs.take_s
        self._read(self._window + len(self.delivered))
        self._at(self._now + self.costs.take_s + self.work.step_s, self._look)

    def _read(self, until: int) -> None:
        count = min(until, self.num_batches) - self._planned
        if count <= 0:
            return
        first, self._planned = self._planned, self._planned + count
        actions = self.scheduler.planned(range(first, self._planned))
        if self._planned == self.num_batches:
            self.scheduler.plan_ended()
        self._do(actions)

    def _mark(self) -> None:
        if self._num_received in (self.num_batches // 4, self.num_batches // 4 + self.num_batches // 2):
            self._count_there(0)
            busy_s = dict(self._sums.busy_s)
            busy_s["network"] -= max(0.0, self._link_free_at - self._now)  # what is on its way, as far as it has come
            busy_s["workers"] += sum(  # what is in work now, likewise
                max(0.0, self._now - at_s + args[0].busy_s)
                for at_s, _, happen, args in self._events
                if happen == self._done and not self._is_lost(args[0])
            )
            self._marks.append(_Sums(self._now, self._sums.there_s, busy_s))
