"""A loader in figures: batches, workers and cores as a discrete simulation, which knows what any options would bring.

It shares nothing with the verdict's model: workers take tickets in turn, in a window; phases that compute share the
cores, and within a worker the interpreter; the trainer takes batches in order.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from asyncloader.observe.figures import Workers, WorkerStats
from asyncloader.observe.meter import Meter
from asyncloader.observe.stats import LoaderStats
from asyncloader.observe.timing import Timing


@dataclass(frozen=True)
class Load:
    """What is trained on, and where.

    Attributes:
        train_s: A step; the trainer computes for `train_cpu` of it.
        wait_s: What a batch waits for (disks, networks), one sample after the other.
        cpu_s: What a batch computes.
        collate_s: The part of `cpu_s` that is collation.
        cores: Of the machine.
        start_s: Until a worker is there.
        batches: Of the epoch.
        samples: In a batch.
        slow_every: Each so many batches one takes `slow` times as long; 0 for none.
    """

    train_s: float = 0.01
    train_cpu: float = 0.0
    wait_s: float = 0.0
    cpu_s: float = 0.0
    collate_s: float = 0.0
    cores: int = 8
    start_s: float = 0.0
    batches: int = 120
    samples: int = 16
    slow_every: int = 0
    slow: float = 1.0

    def factor(self, number: int) -> float:
        """Return how many times as long a batch takes as most do."""
        return self.slow if self.slow_every and number % self.slow_every == self.slow_every - 1 else 1.0


@dataclass
class _Ticket:
    number: int
    missing: int  # samples
    began: float = -1.0


@dataclass
class _Phase:
    """A sample that is waited for and then computed, or the collation of a batch."""

    ticket: _Ticket
    wait_s: float
    cpu_s: float
    is_collation: bool = False


@dataclass
class _Worker:
    queue: deque[_Ticket] = field(default_factory=deque)
    asked: int = 0  # samples of the first ticket in the queue
    waiting: list[_Phase] = field(default_factory=list)
    computing: deque[_Phase] = field(default_factory=deque)
    busy_s: float = 0.0
    first_s: float = 0.0  # of its first batch


def run(load: Load, workers: int, concurrency: int = 1, options: dict[str, Any] | None = None) -> LoaderStats:
    """Return the statistics of an epoch."""
    return _Inline(load).run() if not workers else _Epoch(load, workers, concurrency, options or {}).run()


def seconds(load: Load, stats: LoaderStats) -> float:
    """Return what a batch takes, once workers have started."""
    return (stats.elapsed_s - load.start_s * bool(stats.num_workers)) / stats.batches


class _Inline:
    """The trainer makes its batches itself."""

    def __init__(self, load: Load) -> None:
        self._load = load

    def run(self) -> LoaderStats:
        load = self._load
        waits = [load.wait_s * load.factor(n) + load.cpu_s * load.factor(n) for n in range(load.batches)]
        train_s = load.train_s * (load.batches - 1)
        stats = _figures(load, 0, waits, waits[1:], train_s, waits[0], {"in_process": True})
        return replace(stats, main_cpu_s=load.cpu_s * (load.batches - 1) + train_s * load.train_cpu)


class _Epoch:
    """Workers make them."""

    def __init__(self, load: Load, workers: int, concurrency: int, options: dict[str, Any]) -> None:
        self._load = load
        self._options = {"concurrency": concurrency, "scheduling": "static", "persistent_workers": False, **options}
        self._concurrency = concurrency
        self._workers = [_Worker() for _ in range(workers)]
        self._window = workers * (-(-concurrency // load.samples) + 2 if concurrency > 1 else 2)
        self._planned = 0
        self._done = set[int]()
        self._works: list[float] = []
        self._now = load.start_s

    def run(self) -> LoaderStats:
        load, waited, trained, first = self._load, list[float](), list[float](), 0.0
        self._plan(0)
        for number in range(load.batches):
            asked = self._now
            while number not in self._done:
                self._advance(float("inf"))
            self._done.remove(number)
            self._plan(number + 1)
            waited.append(self._now - asked)
            if number == 0:
                first = self._now
            last = self._now
            left_s = load.train_s if number < load.batches - 1 else 0.0
            while left_s > 1e-12:
                left_s -= self._advance(left_s, load.train_cpu)
            trained.append(self._now - last)
        cpu_of_steps_s = load.train_s * (load.batches - 1) * load.train_cpu
        stats = _figures(load, len(self._workers), self._works, waited[1:], sum(trained), first, self._options)
        own = tuple(
            WorkerStats(
                n,
                load.batches // len(self._workers),
                worker.busy_s,
                worker.first_s,
                last - load.start_s - worker.busy_s,
            )
            for n, worker in enumerate(self._workers)
        )
        cpu_s = sum(load.cpu_s * load.factor(number) for number in range(load.batches))
        stats = replace(stats, workers=Workers(own, cpu_s), main_cpu_s=cpu_of_steps_s)
        return replace(stats, waiting=replace(stats.waiting, window=self._window))

    def _plan(self, taken: int) -> None:
        while self._planned < min(self._load.batches, taken + self._window):
            ticket = _Ticket(self._planned, self._load.samples)
            self._workers[self._planned % len(self._workers)].queue.append(ticket)
            self._planned += 1
        for worker in self._workers:
            self._fill(worker)

    def _fill(self, worker: _Worker) -> None:
        """Ask for samples as long as there is a slot; a batch that is collated holds one worker, and no slot."""
        load = self._load
        while worker.queue and self._in_flight(worker) < self._concurrency:
            ticket = worker.queue[0]
            if ticket.began < 0:
                ticket.began = self._now
            factor = load.factor(ticket.number) / load.samples
            phase = _Phase(ticket, load.wait_s * factor, (load.cpu_s - load.collate_s) * factor)
            (worker.waiting if phase.wait_s > 0 else worker.computing).append(phase)
            worker.asked += 1
            if worker.asked == load.samples:
                worker.queue.popleft()
                worker.asked = 0

    def _in_flight(self, worker: _Worker) -> int:
        if self._concurrency == 1:
            return len(worker.waiting) + len(worker.computing)
        return len(worker.waiting) + sum(not phase.is_collation for phase in worker.computing)

    def _advance(self, most_s: float, trainer_cpu: float = 0.0) -> float:
        """Go on until the next phase ends, or the step that the trainer has to make; return how far that has come."""
        computing = [worker for worker in self._workers if worker.computing]
        speed = min(1.0, self._load.cores / max(1e-9, len(computing) + trainer_cpu))
        train_speed = 1 - trainer_cpu * (1 - speed)
        ends = [phase.wait_s for worker in self._workers for phase in worker.waiting]
        ends += [worker.computing[0].cpu_s / speed for worker in computing]
        step = min([most_s / train_speed, *ends])
        self._now += step
        for worker in self._workers:
            if worker.waiting or worker.computing:
                worker.busy_s += step
            if worker.computing:
                worker.computing[0].cpu_s -= step * speed
                if worker.computing[0].cpu_s <= 1e-12:
                    self._end(worker, worker.computing.popleft())
            for phase in worker.waiting[:]:
                phase.wait_s -= step
                if phase.wait_s <= 1e-12:
                    worker.waiting.remove(phase)
                    worker.computing.append(phase)
            self._fill(worker)
        return step * train_speed

    def _end(self, worker: _Worker, phase: _Phase) -> None:
        ticket = phase.ticket
        if not phase.is_collation:
            ticket.missing -= 1
            if not ticket.missing:
                worker.computing.appendleft(_Phase(ticket, 0.0, self._load.collate_s, is_collation=True))
        else:
            self._works.append(self._now - ticket.began)
            worker.first_s = worker.first_s or self._works[-1]
            self._done.add(ticket.number)


def _figures(
    load: Load,
    workers: int,
    works: list[float],
    waited: list[float],
    train_s: float,
    first_s: float,
    options: dict[str, Any],
) -> LoaderStats:
    stats = Meter(0, workers, 2 * workers).stats()
    collate_s = min(load.collate_s, load.cpu_s)
    return replace(
        stats,
        batches=load.batches,
        samples=load.batches * load.samples,
        cores=load.cores,
        elapsed_s=first_s + train_s + sum(waited),
        first_batch_s=first_s,
        training_s=train_s,
        waiting=replace(stats.waiting, consumer=timing(waited)),
        stages=replace(
            stats.stages,
            fetch=timing([work - collate_s for work in works]),
            collate=timing([collate_s] * len(works)),
            work=timing(works),
        ),
        options=options,
    )


def timing(seconds: list[float]) -> Timing:
    """Return the timing of these."""
    return Timing().plus(np.array(seconds))
