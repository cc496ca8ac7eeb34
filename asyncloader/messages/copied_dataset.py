"""The trainer's dataset, while workers are made of it: the trainer tells it of the next epoch, and this run goes on.

    trainer        set_epoch(0)   iter() ────────────── set_epoch(1) ─────────────────────────── iter()
    forked copy                        └ has 0: as it is       └ has 1: told 0, for this run ──── told 1

A copy on a thread is made of one that was made when the iterator was, and so is what is pickled: they have 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from asyncloader.epochs import Told, listeners
from asyncloader.messages.messages import EpochSpec, WorkerSpec
from asyncloader.protocols import probe


class CopiedDataset:
    """Knows which epochs the trainer's dataset was told, at the moment when a copy is made.

    Args:
        dataset: The trainer's.
        told: Returns what it was told; nothing while it is being told.

    Attributes:
        has_run_ended: Whether all batches of the current run have been made.
    """

    def __init__(self, dataset: Any, told: Callable[[], tuple[Told, ...]]) -> None:
        self.has_run_ended: Callable[[], bool] = bool
        self._dataset = dataset
        self._told = told
        self._untold = [_attributes(*pair) for pair in zip(listeners(dataset), told(), strict=False)]

    def run_of_newcomer(self, epoch: EpochSpec) -> EpochSpec:
        """Return the current run for a worker that starts in its middle, which hears no epoch of a finished run."""
        return epoch._replace(epochs=()) if self.has_run_ended() else epoch

    def told_to_copy(self, epochs: tuple[Told, ...]) -> tuple[Told, ...]:
        """Return what a copy was told that was just made. To be called in the copy.

        A copy cannot be told that no epoch was set: then its attributes of the beginning are restored.

        Args:
            epochs: The epochs that the run is of.
        """
        told = self._told()
        if told != epochs:
            for listener, epoch, before in zip(listeners(self._dataset), epochs, self._untold, strict=False):
                if epoch.number is None and before is not None:
                    vars(listener).clear()
                    vars(listener).update(before)
        return told

    def spec_of_a_copy(self, spec: WorkerSpec, epoch: EpochSpec) -> WorkerSpec:
        """Return what a worker works with that was forked for this run. To be called in the worker."""
        return replace(spec, epochs=self.told_to_copy(epoch.epochs))


def _attributes(listener: Any, told: Told) -> dict[str, Any] | None:
    """Return the attributes of a dataset that was told nothing, if it has some."""
    found = probe(listener, "__dict__") if told.number is None else None
    return dict(found) if isinstance(found, dict) else None
