"""Figures of a feed: the samples so far, and who waits for whom."""

from __future__ import annotations

from time import monotonic
from typing import NamedTuple


class FeedStats(NamedTuple):
    """What became of the samples of a feed so far. Units are samples, or groups where there is a ``group_size``.

    Attributes:
        version: The version of the weights.
        running: Units that are leased.
        pending: Units that wait to be leased again.
        ready: Units that wait for the trainer.
        in_batches: Units of batches that were formed and are not trained.
        counts: Units by what became of them: "trained", "stale", "dropped", "failed" (more than ``max_retries`` times).
            Units of a batch that was left out (``on_crash="skip"``), or raised in its place, are among the trained.
            Beside these, "recycled" counts those that were too old and leased again, and "late" those that were trained
            too old: in a batch that was on its way when the version jumped, or with ``on_stale="keep"``.
        ages: Trained units by how many versions they were old. A batch counts when the consumer asks for it.
        handles: Processes that are connected by a handle of the feed.
        producers_waiting: Producers that wait for a lease, or for room. Tasks of another process that put wait as one.
        trainer_waited_s: How long there was no batch for the trainer. Seconds.
        producers_waited_s: How long some producer waited. Seconds.
    """

    version: int
    running: int
    pending: int
    ready: int
    in_batches: int
    counts: dict[str, int]
    ages: dict[int, int]
    handles: int
    producers_waiting: int
    trainer_waited_s: float
    producers_waited_s: float

    @property
    def verdict(self) -> str:
        """Who limits whom, in words."""
        trainer, producers = self.trainer_waited_s, self.producers_waited_s
        waits = f"the trainer has waited {trainer:.1f} s for samples, producers {producers:.1f} s for room"
        limits = "balanced"
        if max(trainer, producers) > 2 * min(trainer, producers):
            limits = "producers limit" if trainer > producers else "the trainer limits"
        return f"{limits}: {waits}"

    def __str__(self) -> str:
        ages = ", ".join(f"{count} by {age}" for age, count in self.ages.items() if age)
        became = ", ".join(f"{count} {outcome}" for outcome, count in self.counts.items() if count)
        units = f"{self.running} leased, {self.pending} to be leased again, {self.ready} ready"
        too_old = f" (older than the newest weights: {ages} versions)" * bool(ages)
        return (
            f"version {self.version}: {units}, {self.in_batches} in batches\n"
            f"so far: {became or 'nothing'}{too_old}\n"
            f"{self.handles} other processes connected, {self.producers_waiting} producers wait\n"
            f"{self.verdict}"
        )


class Stopwatch:
    """Adds up how long something was so."""

    def __init__(self) -> None:
        self._total_s = 0.0
        self._since: float | None = None

    def turn(self, is_so: bool) -> None:
        """Note whether it is so from now on."""
        if is_so is (self._since is None):
            now = monotonic()
            if self._since is not None:
                self._total_s += now - self._since
            self._since = now if is_so else None

    @property
    def total_s(self) -> float:
        """How long it was so. Seconds."""
        return self._total_s + (0.0 if self._since is None else monotonic() - self._since)
