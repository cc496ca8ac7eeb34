"""Decide how many workers there should be, from what they and the trainer have been doing. No loop, clock or process.

    observe(stats) ── differences over a window ──> does the trainer wait? has the last change paid? ──> a number

While the trainer waits there are more workers, as many as keep up with it, at most four times as many. While it does
not wait there are as few as keep up. A change is judged by the next window: if more workers bring little, or if the
trainer waits with fewer, the change is taken back, and nothing is tried for a while: each time for twice as long, up to
a minute, after which a load that has changed is noticed.

More have helped if the trainer gets more, or if workers make more: what they make may wait for batches that a few had
been given before the others came, and for some seconds the trainer gets no more than those few make.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from asyncloader.observe.stats import LoaderStats
from asyncloader.options import Options

_LOOK_S = 0.1
_WINDOW_S = 0.5
_WINDOW_BATCHES = 10
"""A window is judged when it is so long, and so many batches were taken in it."""

_WAITS = 0.05
"""A trainer that waits for a larger share of its time than this waits."""

_PAID = 0.5
"""More workers have paid if this share of what they might have added has been added."""

_SPARE = 1.2
"""So many times the workers that the mean asks for are kept, for batches are not all alike."""

_FIRST_REST_S = 10.0
_LONGEST_REST_S = 60.0
"""After a change that was in vain nothing is tried for so long; each time for twice as long."""


class Window(NamedTuple):
    """The figures of a run between two moments: seconds a batch, and shares."""

    taken: int  # batches that the trainer took
    comes: float  # batches a second that it took, or that workers made if these are more
    waits: float  # share of the trainer's time
    train: float
    work: float
    cpu: float  # of the work, what was computed

    @classmethod
    def between(cls, first: LoaderStats, last: LoaderStats, seconds: float) -> Window:
        """Compare statistics, between which are so many seconds."""
        was, now = first.workers, last.workers
        taken, made = last.batches - first.batches, now.batches - was.batches
        waited = last.waiting.consumer.total_s - first.waiting.consumer.total_s
        trained = last.training_s - first.training_s
        spent = max(waited + trained, 1e-9)  # this ends with a batch, as the window does not
        return cls(
            taken=taken,
            comes=max(taken / spent, made / seconds),
            waits=waited / spent,
            train=trained / taken,
            work=(now.busy_s - was.busy_s) / max(1, made),
            cpu=(now.cpu_s + now.stalled_s - was.cpu_s - was.stalled_s) / max(1, made),
        )


class Controller:
    """Looks for the number of workers of one loader, run after run.

    Args:
        options: With the most workers of this machine that compute, and that mostly wait.
        num_workers: To begin with.

    Attributes:
        num_workers: How many there should be. Whoever finds no room for so many writes how many there can be.
        due: When `observe` is worth calling again; on the clock of its caller.
        reason: The reason of the last change.
    """

    def __init__(self, options: Options, num_workers: int) -> None:
        self.num_workers: int = num_workers
        self.due: float = 0.0
        self.reason: str = ""
        self._most = {True: options.most_computing, False: options.most_waiting}
        self._first: tuple[float, LoaderStats] | None = None  # where the window begins
        self._begins_at = 0  # when so many batches were made: workers that came have made some of them
        self._trial: tuple[int, Window] | None = None  # how many there were before the last change, and how that was
        self._rests_until, self._rest_s = 0.0, _FIRST_REST_S

    def begin_run(self) -> None:
        """Another run has begun, whose sums begin at zero."""
        self._first, self._begins_at, self.due = None, 0, 0.0

    def observe(self, now: float, num_workers: int, stats: LoaderStats) -> None:
        """Take note of how the run goes, and decide how many workers there should be from now on.

        Args:
            now: Seconds, of any clock.
            num_workers: Workers that take tickets.
            stats: The figures of the run.
        """
        self.due = now + _LOOK_S
        made = stats.workers.batches
        if num_workers == self.num_workers and made >= self._begins_at:
            began, first = self._first = self._first or (now, stats)
            taken = stats.batches - first.batches
            if now - began >= _WINDOW_S and taken >= max(_WINDOW_BATCHES, num_workers):
                self._first = now, stats
                self._judge(Window.between(first, stats, now - began), now)
        if num_workers != self.num_workers:  # they are to come, or to go
            self._first, self._begins_at = None, made + self.num_workers

    def _judge(self, window: Window, now: float) -> None:
        count, is_waiting = self.num_workers, window.waits > _WAITS
        trial, self._trial = self._trial, None
        if trial is not None and is_waiting:
            earlier, was = trial
            if count < earlier:
                return self._take_back(earlier, "training waits with fewer", now)
            gained = window.comes / was.comes
            if gained < 1 + _PAID * (count / earlier - 1) - 1 / was.taken - 1 / window.taken:
                enough = min(count - 1, max(earlier, round(earlier * gained)))
                return self._take_back(enough, "more did not help", now)
        most = self._most[window.cpu > 0.5 * window.work]
        if count > most:
            return self._take_back(most, "there are no more cores for workers that compute", now)
        if is_waiting:
            wanted = min(most, 4 * count, max(count + 1, math.ceil(window.work / max(window.train, 1e-6))))
            reason = f"training waits {window.waits:.0%} of its time"
        else:
            wanted = max(1, min(count, math.ceil(window.work * window.comes * _SPARE)))
            reason = "fewer are enough"
        if wanted != count and now >= self._rests_until:
            self.num_workers, self.reason, self._trial = wanted, reason, (count, window)
        return None

    def _take_back(self, num_workers: int, reason: str, now: float) -> None:
        """Go back from what was in vain, and rest."""
        self.num_workers, self.reason = num_workers, reason
        self._rests_until = now + self._rest_s
        self._rest_s = min(2 * self._rest_s, _LONGEST_REST_S)
