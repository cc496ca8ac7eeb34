"""Decide how many workers there should be, from what they and the trainer have been doing. No loop, clock or process.

    observe(load) ── differences over a window ──> does the trainer wait? would more help? are some idle? ──> a number

The model is that of the verdict: a batch comes every ``max(train, work / workers, cpu / cores)`` seconds. While the
trainer waits and all workers are busy there are more of them, as many as the model asks for; if that did not help, they
go again, and it is not tried again for a while. While the trainer does not wait there are as few as the model asks for;
if it waits then, they come back. Both times get longer each time, and are forgotten when the load has changed.

More have helped if the trainer gets more, or if workers make more: what they make may wait for batches that a few had
been given before the others came, and for some seconds the trainer gets no more than those few make.

Workers may be on other machines too. These are asked for when no more are worth it on this one, and go first; a node is
somebody else's to use. They have cores of their own, but all of them share the way to here: where they are idle while
the trainer waits, that is full, and those that are too many are given back.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from asyncloader.observe.figures import Load

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

_HELPED_ELSEWHERE = 0.4
"""The same for workers on other machines, whose cores may be slower than those here."""

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
_LATE_ELSEWHERE_S = 60.0
"""Workers that have not come after this time are not waited for any more."""


class Window(NamedTuple):
    """What follows from two loads: seconds a batch, and shares."""

    rate: float  # batches a second that the trainer took
    taken: int  # of how many that is
    makes: float  # batches a second that workers made; some may have to wait for earlier ones
    waits: float  # share of the trainer's time
    train: float
    work: float
    cpu: float  # of the work, what was computed
    cpu_floor: float  # with all cores of this machine
    received: float  # bytes a second, from other machines

    @property
    def comes(self) -> float:
        """Batches a second that the trainer took, or that workers made if these are more."""
        return max(self.rate, self.makes)

    def enough(self, *, elsewhere: bool) -> float:
        """Return with how many workers something else would limit: the trainer, or the cores if all are here."""
        return self.work / max(self.train, 0.0 if elsewhere else self.cpu_floor, 1e-6)


class Trial(NamedTuple):
    """How many workers there were before the last change, and how that was."""

    here: int
    elsewhere: int
    window: Window


class Controller:
    """Looks for the number of workers of one loader, run after run.

    Args:
        num_workers: On this machine, to begin with.
        max_computing: The most here, where workers compute.
        max_waiting: The most here, where they mostly wait.
        cores: That there are here for all of it.
        overlaps: Workers have several batches in work at once, so that how long one takes says nothing of how busy they
            are.
        elsewhere: Workers on other machines, to begin with.
        max_elsewhere: The most of these.

    Attributes:
        here: How many there should be on this machine.
        elsewhere: And on others.
        due: When `observe` is worth calling again; on the clock of the loads.
        reason: Of the last change.
    """

    def __init__(
        self,
        num_workers: int,
        *,
        max_computing: int,
        max_waiting: int,
        cores: int,
        overlaps: bool = False,
        elsewhere: int = 0,
        max_elsewhere: int = 0,
    ) -> None:
        self.here = num_workers
        self.elsewhere = elsewhere
        self.due = 0.0
        self.reason = ""
        self._most = {True: max_computing, False: max_waiting}
        self._max_elsewhere = max_elsewhere
        self._cores = cores
        self._overlaps = overlaps
        self._now = 0.0
        self._changed_at: float | None = None  # until those that are to come or go have done so
        self._first: Load | None = None  # where the window begins
        self._settled_at = 0  # when so many batches were made, workers that came have made some of them
        self._calm = 0  # windows one after the other in which fewer workers would do
        self._before: Trial | None = None
        self._is_doubtful = False  # one window of the trial says that more did not help
        self._refused: float | None = None  # the rate of what did not help
        self._ceiling = self._ceiling_elsewhere = self._floor = _Limit()
        self._known: tuple[float, float, float] | None = None  # work, train and CPU with this number of workers

    def __repr__(self) -> str:
        return f"<Controller {self.num_workers} between {self._floor} and {self._ceiling}: {self.reason}>"

    @property
    def num_workers(self) -> int:
        """How many there should be in all."""
        return self.here + self.elsewhere

    def begin(self) -> None:
        """Another run has begun, whose sums begin at zero."""
        self._first = None
        self._settled_at = 0
        self.due = 0.0

    def observe(self, load: Load) -> int:
        """Take note of a load; return how many workers there should be from now on."""
        self._now = load.at_s
        self.due = load.at_s + _LOOK_S
        if load.num_workers != self.num_workers:
            self._await(load)
            return self.num_workers
        if self._changed_at is not None:  # they have just come, or gone
            self._changed_at, self._first = None, None
            self._settled_at = load.made + self.num_workers
        if load.made < self._settled_at:
            return self.num_workers
        first = self._first
        if first is None or load.at_s < first.at_s:
            self._first = load
            return self.num_workers
        seconds, taken = load.at_s - first.at_s, load.taken - first.taken
        is_enough = seconds >= _LEAST_WINDOW_S and taken >= max(_LEAST_BATCHES, self.num_workers)
        if is_enough or (seconds >= _LONGEST_WINDOW_S and taken >= 2 and load.made > first.made):
            self._first = load
            self._judge(self._compare(first, load), load)
        return self.num_workers

    def _await(self, load: Load) -> None:
        """Wait for workers that are to come or go; not for ever for those that cannot be had."""
        self._first = None
        if self._changed_at is None:
            self._changed_at = load.at_s
        elif load.at_s - self._changed_at > (_LATE_ELSEWHERE_S if self.elsewhere else _LATE_S) and load.num_workers > 0:
            if self.elsewhere and load.num_workers < self.num_workers:
                self._ceiling_elsewhere = self._ceiling_elsewhere.again(self.elsewhere, load.at_s)
                self.reason = "no more have come"
            self.elsewhere = max(0, load.num_workers - self.here) if self.elsewhere else 0
            self.here = load.num_workers - self.elsewhere
            self._changed_at = self._before = None

    def _compare(self, first: Load, last: Load) -> Window:
        taken, made = last.taken - first.taken, max(1, last.made - first.made)
        waited, trained = last.waited_s - first.waited_s, last.trained_s - first.trained_s
        work = (last.work_s - first.work_s) / made
        cpu = (last.cpu_s - first.cpu_s) / made
        cpu_here = cpu - (last.elsewhere_cpu_s - first.elsewhere_cpu_s) / made
        here, seconds = (last.main_cpu_s - first.main_cpu_s) / taken, max(last.at_s - first.at_s, 1e-9)
        return Window(
            rate=taken / max(waited + trained, 1e-9),  # which end with a batch, as the window does not
            taken=taken,
            makes=(last.made - first.made) / seconds,
            waits=waited / max(waited + trained, 1e-9),
            train=trained / taken,
            work=work,
            cpu=cpu,
            cpu_floor=(cpu_here + here) / self._cores,
            received=(last.received_bytes - first.received_bytes) / seconds,
        )

    # ------------------------------------------------------------------------------------------------- decisions

    def _judge(self, window: Window, load: Load) -> None:
        now = load.at_s
        known, costs = self._known, (window.work, window.train, window.cpu)
        self._known = known or costs
        if known is not None and any(_differ(a, b, _CHANGED, window) for a, b in zip(known, costs, strict=True)):
            self._known = costs
            self._ceiling = self._ceiling_elsewhere = self._floor = _Limit()
        before, self._before = self._before, None
        refused, self._refused = self._refused, None
        is_waiting = window.waits > _WAITS
        if refused is not None and refused > _UNSURE**2 * window.comes:  # the load had changed during the trial
            self._ceiling = self._ceiling._replace(until_s=now)
            self._ceiling_elsewhere = self._ceiling_elsewhere._replace(until_s=now)
        if before is not None and _differ(before.window.train, window.train, _SAME, window):
            before = None  # it is another load than before the trial
        if before is not None and is_waiting and self._take_back(before, window, now):
            return
        most = self._most[window.cpu > 0.5 * window.work]
        if self.here > most:
            self._change(most, self.elsewhere, "there are no more cores for workers that compute")
        elif is_waiting:
            self._more(window, most, now)
        else:
            self._fewer(window, now)

    def _take_back(self, before: Trial, window: Window, now: float) -> bool:
        """Go back to the number of before, if the change was for nothing. Return whether all is decided for now."""
        here, elsewhere, was = before
        count, earlier = self.num_workers, here + elsewhere
        gained = window.comes / was.comes
        if count < earlier:
            if was.waits > _WAITS and gained * _UNSURE > 1:
                return False  # it waited before, and no longer now
            self._floor = self._floor.again(earlier, now)
            self._change(here, elsewhere, "training waits with fewer")
            return True
        is_here = self.here > here
        helped = _HELPED if is_here else _HELPED_ELSEWHERE
        unsure = 1 / was.taken + 1 / window.taken
        if gained >= 1 + helped * (count / earlier - 1) - unsure:
            return False
        if not self._is_doubtful:  # what held this window up may have been something else
            self._is_doubtful, self._before = True, before
            return True
        # So many would have come to the same, if those that help do so in full.
        enough = min(count - 1, max(earlier, math.ceil(earlier * gained * _UNSURE - 0.5))) - earlier
        self._refused = window.comes
        if is_here:
            self._ceiling = self._ceiling.again(here + enough + 1, now)
            self._change(here + enough, elsewhere, "more did not help")
        else:
            self._ceiling_elsewhere = self._ceiling_elsewhere.again(elsewhere + enough + 1, now)
            before_s, now_s = was.received / 1e6, window.received / 1e6
            came = f"{before_s:.3g} MB/s came from other machines without them, {now_s:.3g} with them"
            self._change(here, elsewhere + enough, f"more did not help: {came}")
        return True

    def _more(self, window: Window, most: int, now: float) -> None:
        """Have more workers, if they would be at work: on this machine first."""
        count, calm, self._calm = self.num_workers, self._calm, 0
        busy = window.work * window.makes / count
        if busy < _BUSY and not self._overlaps:
            self._calm = calm + 1 if self.elsewhere else 0
            if self._calm >= 2:
                self._give_back(window, busy, now)
            return
        if window.cpu_floor * window.makes > _FULL:
            most = self.here
        elif self._ceiling.holds(now):
            most = max(self.here, min(most, self._ceiling.workers - 1))
        is_here = most > self.here
        most_elsewhere = self.elsewhere if is_here else self._max_elsewhere
        if not is_here and self._ceiling_elsewhere.holds(now):
            most_elsewhere = min(most_elsewhere, self._ceiling_elsewhere.workers - 1)
        wanted = 4 * count if self._overlaps else math.ceil(window.enough(elsewhere=self._max_elsewhere > 0) - 0.05)
        wanted = min(most + most_elsewhere, 4 * count, max(count + 1, wanted))
        if wanted > count:
            self._before = Trial(self.here, self.elsewhere, window)
            here = wanted - self.elsewhere if is_here else self.here
            self._change(here, wanted - here, f"training waits {window.waits:.0%} of its time")

    def _give_back(self, window: Window, busy: float, now: float) -> None:
        """The trainer waits, and so do workers: what is between them is full. Have as many elsewhere as are at work."""
        least = max(self.here, self._floor.workers if self._floor.holds(now) else 0)
        wanted = max(least, math.ceil(self.num_workers * busy * _SPARE))
        if wanted < self.num_workers:
            self._before = Trial(self.here, self.elsewhere, window)
            elsewhere = wanted - self.here
            self._ceiling_elsewhere = self._ceiling_elsewhere.again(elsewhere + 1, now)
            came = f"{window.received / 1e6:.3g} MB/s come from other machines"
            self._change(self.here, elsewhere, f"workers are idle {1 - busy:.0%} while training waits: {came}")

    def _fewer(self, window: Window, now: float) -> None:
        count = self.num_workers
        wanted = count - 1 if self._overlaps else math.ceil(window.work * window.rate * _SPARE)
        wanted = max(1, wanted, self._floor.workers if self._floor.holds(now) else 1)
        self._calm = self._calm + 1 if wanted < count else 0
        if self._calm >= 2:
            self._before = Trial(self.here, self.elsewhere, window)
            elsewhere = max(0, self.elsewhere - (count - wanted))
            self._change(wanted - elsewhere, elsewhere, "fewer are enough")

    def _change(self, here: int, elsewhere: int, reason: str) -> None:
        self.here, self.elsewhere = here, elsewhere
        self.reason = reason
        self._changed_at = self._now
        self._is_doubtful = False
        self._calm = 0
        self._known = None  # with others beside them, workers take longer, or less

    def limit(self, count: int) -> None:
        """There cannot be so many here, for a reason of the machine: have as many as this."""
        self.here = count
        self._before = None
        self._changed_at = self._now


class _Limit(NamedTuple):
    """A number of workers that was for nothing, and until when that is believed."""

    workers: int = 0
    until_s: float = -math.inf
    patience_s: float = _FIRST_PATIENCE_S

    def holds(self, now: float) -> bool:
        return now < self.until_s

    def again(self, workers: int, now: float) -> _Limit:
        return _Limit(workers, now + self.patience_s, min(2 * self.patience_s, _LONGEST_PATIENCE_S))


def _differ(before: float, now: float, times: float, window: Window) -> bool:
    """Whether so many seconds a batch are others than before. What is small beside the rest of it does not count."""
    least = 0.1 / max(window.rate, 1e-9)
    return max(before, now, least) > times * max(min(before, now), least)
