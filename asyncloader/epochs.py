"""Epochs that `set_epoch` has told samplers and datasets, and the way to copies of a dataset in workers.

    loader.set_epoch(n) ──> samplers, batch samplers, dataset: at once
                       └──> each worker's copy of the dataset, before the first sample of the next run

An epoch is a number, and `set_epoch` of a dataset depends on that alone. A copy that begins its first run is told the
epoch of that run, unless the copy shows it (its attribute ``epoch``). In later runs a copy is told an epoch that was
set since the run before, also the same number again: the copy may have moved since. So is a number told that the
trainer's dataset shows now, and did not show then. Otherwise the copy is left alone, because it may count epochs by
itself. A copy cannot be told that no epoch was set.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, repeat, zip_longest
from typing import Any, NamedTuple

from asyncloader.protocols import members, probe


def listeners(dataset: Any) -> Iterator[Any]:
    """Yield the dataset, or the datasets inside torch's wrappers, that have `set_epoch`."""
    return (member for member in members(dataset) if hears(member))


def hears(thing: Any) -> bool:
    """Whether a sampler or a dataset has `set_epoch`."""
    return callable(probe(thing, "set_epoch"))


def epoch_of(thing: Any) -> int | None:
    """Return what `set_epoch` was called with, where the attribute ``epoch`` says so."""
    return as_number(probe(thing, "epoch")) if hears(thing) else None


def as_number(epoch: Any) -> int | None:
    """Return an integer of any kind, numpy's and torch's too, as Python's own; None if it is none."""
    try:
        return operator.index(epoch)
    except Exception:
        return None


def numbers(things: Iterable[Any], told: Sequence[int | None] = ()) -> list[int | None]:
    """Return the epoch of each of some samplers or datasets; None for those that cannot be told, or were not.

    Args:
        things: Their attribute ``epoch`` counts, where they have one: the user may have told them.
        told: The epoch that a loader, or a state, has told each of them last, or None.
    """
    pairs = zip(things, chain(told, repeat(None)), strict=False)
    shown = ((epoch_of(thing), known if hears(thing) else None) for thing, known in pairs)
    return [known if epoch is None else epoch for epoch, known in shown]


def changed(epochs: Sequence[int | None], known: Sequence[int | None]) -> tuple[int | None, ...]:
    """Return the epochs that differ from those that are known, and None in place of the others."""
    pairs = zip(epochs, chain(known, repeat(None)), strict=False)
    return tuple(epoch if epoch != before else None for epoch, before in pairs)


def latest(told: Iterable[int | None], news: Iterable[int | None]) -> tuple[int | None, ...]:
    """Return what was told last: the news, and what had been told before where there is none."""
    return tuple(before if now is None else now for before, now in zip_longest(told, news))


class EpochNotice(NamedTuple):
    """What the listeners of a dataset had been told when a run began.

    Attributes:
        epochs: The epoch of each, or None; empty without workers.
        set_count: How often `set_epoch` of the loader had been called.
    """

    epochs: tuple[int | None, ...] = ()
    set_count: int = 0

    def since(self, last: EpochNotice | None) -> tuple[int | None, ...]:
        """Return what a copy is told that has made the run of another notice, or none; None for what is no news."""
        return changed(self.epochs, last.epochs if last and last.set_count == self.set_count else ())


def tell(things: Iterable[Any], numbers: Sequence[int | None], *, again: bool = False) -> None:
    """Tell samplers or datasets their epochs: of a run, or of the time when a state was taken. None is no epoch.

    Args:
        things: The samplers or datasets.
        numbers: The epoch of each.
        again: Tell also those that show this epoch.
    """
    for thing, number in zip(things, numbers, strict=False):
        if number is not None and hears(thing) and (again or epoch_of(thing) != number):
            thing.set_epoch(number)
