"""What consumers take of a run: outcomes whose turn has come."""

from __future__ import annotations

from typing import Any, NamedTuple

from asyncloader.messages.messages import Kind
from asyncloader.messages.outcome import Outcome


class Item(NamedTuple):
    """An outcome whose turn has come, for the consumer.

    Attributes:
        outcome: A batch, what was raised in its place, or nothing, but the place in the window is free.
        batch: Number of the batch in the plan; -1 beside the order.
        worker: The worker that has answered the ticket; -1 for none.
        row: The beginning of a batch's row of numbers for the figures: see `asyncloader.observe.record.ROW`.
        in_stream: Number of the batch in the stream of its worker.
        keys: Where they may be needed to make the batch again.
        counts: The item is in order, and frees a place in the window.
    """

    outcome: Outcome
    batch: int = -1
    worker: int = -1
    row: list[float] | None = None
    in_stream: int = -1
    keys: Any = None
    counts: bool = True


def failed(error: BaseException, batch: int = -1, *, counts: bool = True) -> Item:
    """Return what is raised in place of a batch that no worker has come to."""
    return Item(Outcome(Kind.FAILURE, error=error), batch, counts=counts)
