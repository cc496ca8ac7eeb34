"""A worker's notes about a batch, for the figures."""

from __future__ import annotations

from typing import NamedTuple


class Record(NamedTuple):
    """A worker's notes about a ticket, which it sends with the outcome. Times in seconds.

    ``began`` is on the clock of :func:`time.perf_counter`, which all processes of a machine share; ``wait_s`` is how
    long an idle worker had waited for the ticket, ``cpu_s`` what the process used since the one before, ``stalled_s``
    what it could have used but got no core for; ``private_bytes`` is the memory that it has to itself, as of a second
    ago, and 0 if that is not known.
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
