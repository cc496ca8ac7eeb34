"""Epochs that `set_epoch` has told samplers and datasets, and the way to copies of a dataset in workers.

    loader.set_epoch(n) ──> samplers, batch samplers, dataset: at once
                       └──> each worker's copy of the dataset, before the first sample of the next run

A copy that was made after the call knows the epoch. A copy in a persistent worker does not: it is told when a run
begins, if `set_epoch` was called since. Otherwise it is left alone, because it may count epochs by itself.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, repeat, zip_longest
from typing import Any, NamedTuple

from asyncloader.protocols import members, probe


class Told(NamedTuple):
    """The epoch that a dataset was told last.

    Attributes:
        number: The epoch; None if it was told nothing, or nobody can know.
        calls: How often the loader has passed one on.
    """

    number: int | None = None
    calls: int = 0


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


def numbers(things: Iterable[Any], last: int | None = None, restored: Sequence[int | None] = ()) -> list[int | None]:
    """Return the epoch of each of some samplers or datasets; None for those that cannot be told, or were not.

    Args:
        things: Their attribute ``epoch`` counts, where they have one: the user may have told them.
        last: The epoch that the loader has told all of them last.
        restored: The epoch that a state has told each of them since then, or None.
    """
    pairs = zip(things, chain(restored, repeat(None)), strict=False)
    return [_first(epoch_of(thing), since, last) if hears(thing) else None for thing, since in pairs]


def told(dataset: Any, last: Told, restored: Sequence[int | None] = ()) -> tuple[Told, ...]:
    """Return what each of a dataset's listeners was told: see `numbers`."""
    return tuple(Told(number, last.calls) for number in numbers(listeners(dataset), last.number, restored))


def tell(dataset: Any, epochs: Sequence[Told], known: Sequence[Told]) -> None:
    """Tell a copy of a dataset the epochs that are new to it.

    Args:
        dataset: The copy.
        epochs: The epochs of the original now.
        known: The epochs that the copy knows: from when it was made, or told last.
    """
    for listener, epoch, before in zip_longest(listeners(dataset), epochs, known[: len(epochs)]):
        if epoch is not None and epoch.number is not None and epoch != before:
            listener.set_epoch(epoch.number)


def since(epochs: Sequence[Told], known: Sequence[Told]) -> tuple[Told, ...]:
    """Return what of the epochs is new to a copy that knows those, and nothing in place of the others."""
    return tuple(epoch if epoch != before else Told() for epoch, before in zip_longest(epochs, known[: len(epochs)]))


def restore(things: Iterable[Any], numbers: Sequence[int | None]) -> None:
    """Tell samplers or datasets their epochs of the time when a state was taken."""
    for thing, number in zip(things, numbers, strict=False):
        if number is not None and hears(thing) and epoch_of(thing) != number:
            thing.set_epoch(number)


def _first(*found: int | None) -> int | None:
    """Return the first number of some that are there."""
    return next((number for number in found if number is not None), None)
