"""What a worker notes about a batch, for the figures."""

from __future__ import annotations

from typing import NamedTuple


class Record(NamedTuple):
    """What a worker tells about a ticket, beside its outcome. Times in microseconds.

    ``began_us`` is on the clock of :func:`time.perf_counter`, which all processes of a machine share; ``cpu_us`` is
    what the process used since the ticket before, ``stalled_us`` what it could have used but got no core for.
    """

    seq: int
    began_us: int
    epoch: int
    wait_us: int
    fetch_us: int
    collate_us: int
    encode_us: int
    cpu_us: int
    stalled_us: int
    samples: int

    @property
    def wait_s(self) -> float:
        """Seconds that the worker had waited for the ticket."""
        return self.wait_us * 1e-6

    @property
    def busy_s(self) -> float:
        """Seconds of work that the ticket took in the worker."""
        return (self.fetch_us + self.collate_us + self.encode_us) * 1e-6
