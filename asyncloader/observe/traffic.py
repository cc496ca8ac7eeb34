"""How much comes from other machines, and whether the network or the thread that receives it has time left.

A batch is *on its way* from its first byte here to its last one, if they do not come in one piece. While one is, or
several at once, somebody is at work: the network, or the thread that receives. Their share of the time says whether
the two have any left; the thread's CPU time meanwhile says which of the two is full.
"""

from __future__ import annotations

from time import perf_counter, thread_time
from typing import NamedTuple


class Received(NamedTuple):
    """Traffic while batches were on their way.

    Attributes:
        nbytes: Bytes that have come.
        seconds: How long at least one was on its way.
        cpu_s: CPU seconds of the receiving thread meanwhile, whatever it did.
    """

    nbytes: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0

    def since(self, before: Received) -> Received:
        """Return what has come since then."""
        nbytes, seconds, cpu_s = before
        return Received(self.nbytes - nbytes, self.seconds - seconds, self.cpu_s - cpu_s)


class Traffic:
    """Counts what connections receive. Their thread writes, any may read.

    Attributes:
        received: So far.
    """

    def __init__(self) -> None:
        self.received = Received()
        self._open = 0
        self._at = self._cpu_at = 0.0

    def begin(self) -> None:
        """The first piece of a batch has come."""
        if not self._open:
            self._at, self._cpu_at = perf_counter(), thread_time()
        self._open += 1

    def end(self, nbytes: int) -> None:
        """The last piece has come, or nothing more will.

        Args:
            nbytes: How much it was.
        """
        cpu_at, at, before = thread_time(), perf_counter(), self.received  # the one within the other
        self._open -= 1
        self.received = Received(
            before.nbytes + nbytes, before.seconds + at - self._at, before.cpu_s + cpu_at - self._cpu_at
        )
        self._at, self._cpu_at = at, cpu_at
