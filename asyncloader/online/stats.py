"""What became of the samples of a feed, and who waits for whom."""

from __future__ import annotations

from time import monotonic
from typing import NamedTuple


class FeedStats(NamedTuple):
    """What became of the samples of a feed so far. Units are samples, or groups where there is a ``group_size``.

    Attributes:
        version: Of the weights.
        running: Units that are leased.
        pending: Units that wait to be leased again.
        ready: Units that wait for the trainer.
        in_batches: Units of batches that were formed and are not trained.
        counts: Units by what became of them: "trained", "stale", "dropped", "failed" (more than ``max_retries`` times).
            Beside these, "recycled" counts those that were too old and leased again, and "late" those that were trained
            too old: in a batch that was on its way when the version jumped, or with ``on_stale="keep"``.
        mean_costs: By what became of units, what they cost on average.
        ages: Trained units by how many versions they were old. A batch counts when the consumer asks for it.
        producers_waiting: Producers that wait for a lease, or for room.
        trainer_waited_s: How long there was no batch for the trainer. Seconds.
        producers_waited_s: How long some producer waited. Seconds.
    """

    version: int
    running: int
    pending: int
    ready: int
    in_batches: int
    counts: dict[str, int]
    mean_costs: dict[str, float]
    ages: dict[int, int]
    producers_waiting: int
    trainer_waited_s: float
    producers_waited_s: float

    @property
    def verdict(self) -> str:
        """Who limits whom, in words."""
        trainer, producers = self.trainer_waited_s, self.producers_waited_s
        if trainer > 2 * producers:
            return f"producers limit: the trainer has waited {trainer:.1f} s for samples, producers {producers:.1f} s"
        if producers > 2 * trainer:
            return f"the trainer limits: producers have waited {producers:.1f} s for room, the trainer {trainer:.1f} s"
        return f"balanced: the trainer has waited {trainer:.1f} s for samples, producers {producers:.1f} s for room"


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
