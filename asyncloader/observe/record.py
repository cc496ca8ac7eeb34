"""What is noted of a batch on its way, for the figures: by its worker, then in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Record(NamedTuple):
    """A worker's notes about a ticket, which it sends with the outcome. Times in seconds.

    ``began`` is on the clock of :func:`time.perf_counter`, which all processes of a machine share; ``wait_s`` is how
    long an idle worker had waited for the ticket; ``cpu_s`` is what the process used since it was told last, which is
    looked at once a millisecond, ``stalled_s`` what it could have used but got no core for; ``private_bytes`` is the
    memory that it has to itself, as of a second ago, and 0 if that is not known.
    """

    ticket: int
    epoch: int
    samples: int
    began: float
    wait_s: float
    fetch_s: float
    collate_s: float
    cpu_s: float
    stalled_s: float
    private_bytes: int = 0
    encode_s: float = 0.0

    @property
    def busy_s(self) -> float:
        """Seconds of work that the ticket took in the worker."""
        return self.fetch_s + self.collate_s + self.encode_s


ROW = (
    *Record._fields,
    *("worker", "batch", "nbytes", "sent_at", "arrived_at"),
    *("read_at", "pin_s", "made_at", "ready_at"),
    *("asked_at", "came_at", "ahead", "lay_ready", "taken_at"),
)
"""The numbers of a batch, in the order of a row, which grows line by line as the batch goes its way. The worker is -1
for this process. Nothing is left to be done for the batch (``made_at``), it is its turn; the consumer has asked for it,
and need not wait any longer; so many batches were being made or waiting then (``ahead``), and so many of them lay
ready; the consumer has taken the batch. Until it asks for the next one it trains."""

HERE = ("batch", "samples", "began", "fetched_at", "asked_at", "taken_at")
"""Those of a batch that who takes it has made."""


def whole_row(row: Sequence[Any]) -> Sequence[Any]:
    """Return a row of what `ROW` names, of one of that or of `HERE`: of numbers, or of columns of many batches."""
    if len(row) != len(HERE):
        return row
    batch, samples, began, fetched_at, asked_at, made_at = row
    no = 0.0 * began  # as many of them
    record = [batch, no, samples, began, no, fetched_at - began, made_at - fetched_at, no, no, no, no]
    way = [no - 1, batch, no, began, made_at, made_at, no, made_at, made_at, asked_at, made_at]
    return [*record, *way, no, no, made_at]
