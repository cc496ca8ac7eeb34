"""What `set_epoch` has told samplers and datasets, and how it reaches the copies of a dataset in workers.

    loader.set_epoch(n) ──> samplers, batch samplers, dataset: at once
                       └──> each worker's copy of the dataset, before the first sample of the next run

A copy that was made after the call has heard of it. One in a persistent worker has not: it is told, if there is
something new; else what it counts by itself is left alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from asyncloader.protocols import members, probe


class Told(NamedTuple):
    """What a dataset was told of epochs.

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
    epoch = probe(thing, "epoch")
    return epoch if isinstance(epoch, int) and hears(thing) else None


def told(dataset: Any, last: Told) -> tuple[Told, ...]:
    """Return what each of a dataset's listeners was told: by the user, as ``epoch`` says, or by the loader at last."""
    numbers = map(epoch_of, listeners(dataset))
    return tuple(Told(last.number if number is None else number, last.calls) for number in numbers)


def tell(dataset: Any, epochs: Sequence[Told], known: Sequence[Told]) -> None:
    """Tell a copy of a dataset what is new to it.

    Args:
        dataset: The copy.
        epochs: What the original was told.
        known: What the original had been told when the copy was made, or told last.
    """
    for listener, epoch, before in zip_longest(listeners(dataset), epochs, known[: len(epochs)]):
        if epoch is not None and epoch.number is not None and epoch != before:
            listener.set_epoch(epoch.number)


def restore(dataset: Any, numbers: Sequence[int | None]) -> None:
    """Tell a dataset what it had been told when a state was taken."""
    for listener, number in zip(listeners(dataset), numbers, strict=False):
        if number is not None and epoch_of(listener) != number:
            listener.set_epoch(number)
