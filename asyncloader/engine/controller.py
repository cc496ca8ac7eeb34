"""Decide how many workers there should be, from what they and the trainer have been doing. No loop, clock or process.

    observe(stats) ── differences over a window ──> does the trainer wait? would more help? are some idle? ──> a number

The model is that of the verdict: a batch comes every ``max(train, work / workers, cpu / cores)`` seconds. While the
trainer waits and all workers are busy there are more of them, as many as the model asks for. If that did not help, they
go again, and it is not tried again for a while. While the trainer does not wait there are as few as the model asks for;
if it waits then, they come back. Both times get longer each time, and are forgotten when the load has changed.

More have helped if the trainer gets more, or if workers make more: what they make may wait for batches that a few had
been given before the others came, and for some seconds the trainer gets no more than those few make.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from asyncloader.observe.stats import LoaderStats
from asyncloader.options import Options

_LOOK_S = 0.1
_LEAST_WINDOW_S = 0.5
_LONGEST_WINDOW_S = 3.0
_LEAST_BATCHES = 10
"""A window is judged when it is so long, and so many batches were taken in it, or when it is too long."""

_WAITS = 0.05
"""A trainer that waits for a larger share of its time than this waits."""

_BUSY = 0.75
"""Workers that are busy for a smaller share of their time than this are not what is waited for."""

_FULL = 0.9
"""Where all cores are in use for more than this share of the time, more workers would only share them."""

_HELPED = 0.75
"""More workers have helped if this share of what they might have added has been added."""

_UNSURE = 1.1
"""What comes of so few batches is known to within so much."""

_SPARE = 1.2
"""So many times the workers that the mean asks for are kept, for batches are not all alike."""

_CHANGED = 1.5
"""A load of which a part has become so many times what it was is another load."""

_SAME = 1.15
"""A trainer that takes less than so many times what it took for a batch has the same to do."""

_FIRST_PATIENCE_S = 10.0
_LONGEST_PATIENCE_S = 300.0
"""What did not help is not tried again for so long; each time for twice as long."""

_LATE_S = 5.0
"""Workers that have not come after this time are not waited for any more."""


class Window(NamedTuple):
    """The figures of a run between two moments: seconds a batch, and shares."""

    taken: int  # batches that the trainer took
    rate: float  # of these, a second
    makes: float  # batches a second that workers made; some may have to wait for earlier ones
    waits: float  # share of the trainer's time
    train: float
    work: float
    cpu: float  # of the work, what was computed
    main_cpu: float  # what this process computed

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
            rate=taken / spent,
            makes=made / max(seconds, 1e-9),
            waits=waited / spent,
            train=trained / taken,
            work=(now.busy_s - was.busy_s) / max(1, made),
            cpu=(now.cpu_s + now.stalled_s - was.cpu_s - was.stalled_s) / max(1, made),
            main_cpu=(last.main_cpu_s - first.main_cpu_s) / taken,
        )

    @property
    def comes(self) -> float:
        """Batches a second that the trainer took, or that workers made if these are more."""
        return max(self.rate, self.makes)

    def differs(self, before: float, now: float, times: float) -> bool:
        """Whether so many seconds a batch are others than before, leaving out what is small beside the rest."""
        least = 0.1 / max(self.rate, 1e-9)
        return max(before, now, least) > times * max(min(before, now), least)


class Limit(NamedTuple):
    """A number of workers that was for nothing, and until when that is believed."""

    workers: int = 0
    until_s: float = -math.inf
    patience_s: float = _FIRST_PATIENCE_S

    def again(self, workers: int, now: float) -> Limit:
        """Return the limit that is found now, and believed for twice as long."""
        return Limit(workers, now + self.patience_s, min(2 * self.patience_s, _LONGEST_PATIENCE_S))


class Controller:
    """Looks for the number of workers of one loader, run after run.

    Args:
        options: With the most workers of this machine that compute, and that mostly wait. Where samples overlap,
            workers have several batches in work at once, and how long one takes says nothing of how busy they are.
        num_workers: To begin with.
        cores: The cores of this machine, for workers and trainer.

    Attributes:
        num_workers: How many there should be.
        due: When `observe` is worth calling again; on the clock of its caller.
        reason: The reason of the last change.
    """

    def __init__(self, options: Options, num_workers: int, cores: int) -> None:
        self.num_workers: int = num_workers
        self.due: float = 0.0
        self.reason: str = ""
        self._most = {True: options.most_computing, False: options.most_waiting}
        self._cores = cores
        self._overlaps = options.overlaps
        self._now = 0.0
        self._changed_at: float | None = None  # until those that are to come or go have done so
        self._first: tuple[float, LoaderStats] | None = None  # where the window begins
        self._settled_at = 0  # when so many batches were made, workers that came have made some of them
        self._calm = 0  # windows one after the other in which fewer workers would do
        self._trial: tuple[int, Window] | None = None  # how many there were before the last change, and how that was
        self._is_doubtful = False  # one window of the trial says that more did not help
        self._refused: float | None = None  # the rate of what did not help
        self._ceiling = self._floor = Limit()
        self._known: tuple[float, float, float] | None = None  # work, train and CPU with this number of workers

    def __repr__(self) -> str:
        return f"<Controller {self.num_workers} between {self._floor} and {self._ceiling}: {self.reason}>"

    def begin_run(self) -> None:
        """Another run has begun, whose sums begin at zero."""
        self._first = None
        self._settled_at = 0
        self.due = 0.0

    def limit(self, count: int) -> None:
        """This machine has no room for more than so many, whatever the reason."""
        self.num_workers = min(self.num_workers, count)
        self._trial, self._changed_at = None, self._now

    def observe(self, now: float, num_workers: int, stats: LoaderStats) -> None:
        """Take note of how the run goes, and decide how many workers there should be from now on.

        Args:
            now: Seconds, of any clock.
            num_workers: Workers that take tickets.
            stats: The figures of the run.
        """
        self._now = now
        self.due = now + _LOOK_S
        if num_workers != self.num_workers:
            self._await(num_workers)
            return
        made = stats.workers.batches
        if self._changed_at is not None:  # they have just come, or gone
            self._changed_at, self._first = None, None
            self._settled_at = made + self.num_workers
        if made < self._settled_at:
            return
        if self._first is None or now < self._first[0]:
            self._first = now, stats
            return
        began, first = self._first
        seconds, taken = now - began, stats.batches - first.batches
        is_enough = seconds >= _LEAST_WINDOW_S and taken >= max(_LEAST_BATCHES, self.num_workers)
        if is_enough or (seconds >= _LONGEST_WINDOW_S and taken >= 2 and made > first.workers.batches):
            self._first = now, stats
            self._judge(Window.between(first, stats, seconds))

    def _await(self, num_workers: int) -> None:
        """Wait for workers that are to come or go; not for ever for those that cannot be had."""
        self._first = None
        if self._changed_at is None:
            self._changed_at = self._now
        if self._now - self._changed_at > _LATE_S and num_workers > 0:
            self.num_workers, self.reason = num_workers, "no more have come"
            self._changed_at = self._trial = None

    # ------------------------------------------------------------------------------------------------- decisions

    def _judge(self, window: Window) -> None:
        known, costs = self._known, (window.work, window.train, window.cpu)
        self._known = known or costs
        if known is not None and any(window.differs(a, b, _CHANGED) for a, b in zip(known, costs, strict=True)):
            self._known = costs
            self._ceiling = self._floor = Limit()
        refused, self._refused = self._refused, None
        if refused is not None and refused > _UNSURE**2 * window.comes:  # the load had changed during the trial
            self._ceiling = self._ceiling._replace(until_s=self._now)
        trial, self._trial = self._trial, None
        if trial is not None and window.differs(trial[1].train, window.train, _SAME):
            trial = None  # it is another load than before the trial
        is_waiting = window.waits > _WAITS
        if trial is not None and is_waiting and self._take_back(*trial, window):
            return
        most = self._most[window.cpu > 0.5 * window.work]
        if self.num_workers > most:
            self._change(most, "there are no more cores for workers that compute")
        elif is_waiting:
            self._more(window, most)
        else:
            wanted = self.num_workers - 1 if self._overlaps else math.ceil(window.work * window.rate * _SPARE)
            self._fewer(window, wanted, "fewer are enough")

    def _take_back(self, earlier: int, was: Window, window: Window) -> bool:
        """Go back to the earlier number, if the change was for nothing. Return whether all is decided for now."""
        count, gained = self.num_workers, window.comes / was.comes
        if count < earlier:
            if was.waits > _WAITS and gained * _UNSURE > 1:
                return False  # it waited before, and no longer now
            self._floor = self._floor.again(earlier, self._now)
            self._change(earlier, "training waits with fewer")
            return True
        if gained >= 1 + _HELPED * (count / earlier - 1) - 1 / was.taken - 1 / window.taken:
            return False
        if not self._is_doubtful:  # what held this window up may have been something else
            self._is_doubtful, self._trial = True, (earlier, was)
            return True
        # So many would have come to the same, if those that help do so in full.
        enough = math.ceil(earlier * gained * _UNSURE - 0.5) if gained > _UNSURE else earlier
        enough = min(count - 1, max(earlier, enough))
        self._refused = window.comes
        self._ceiling = self._ceiling.again(enough + 1, self._now)
        self._change(enough, "more did not help")
        return True

    def _more(self, window: Window, most: int) -> None:
        """The trainer waits: have more workers, if they would be at work."""
        count, busy = self.num_workers, window.work * window.makes / self.num_workers
        if busy < _BUSY and not self._overlaps:
            return
        self._calm = 0
        floor = (window.cpu + window.main_cpu) / self._cores  # seconds, with all cores
        if floor * window.makes > _FULL:
            return
        if self._now < self._ceiling.until_s:
            most = min(most, self._ceiling.workers - 1)
        enough = 4 * count if self._overlaps else math.ceil(window.work / max(window.train, floor, 1e-6) - 0.05)
        wanted = min(most, 4 * count, max(count + 1, enough))
        if wanted > count:
            self._trial = count, window
            self._change(wanted, f"training waits {window.waits:.0%} of its time")

    def _fewer(self, window: Window, wanted: int, reason: str) -> None:
        """Have as few workers as are wanted, if that is so for two windows."""
        wanted = max(1, wanted, self._floor.workers if self._now < self._floor.until_s else 1)
        self._calm = self._calm + 1 if wanted < self.num_workers else 0
        if self._calm >= 2:
            self._trial = self.num_workers, window
            if window.waits > _WAITS:
                self._ceiling = self._ceiling.again(wanted + 1, self._now)
            self._change(wanted, reason)

    def _change(self, num_workers: int, reason: str) -> None:
        self.num_workers, self.reason = num_workers, reason
        self._changed_at = self._now
        self._is_doubtful = False
        self._calm = 0
        self._known = None  # with others beside them, workers take longer, or less
