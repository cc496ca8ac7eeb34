"""How far one run over the data is. Passive: the plan and the consumer write, states are made of it.

It outlives the iterator, so that a loader can tell the state of a run that was left with ``break``; so it holds no
iterator, and no worker.
"""

from __future__ import annotations

from typing import Any

from asyncloader.engine.tracks import Track
from asyncloader.workers.protocol.snapshot import Start


class Progress:
    """What was read and taken of one run.

    In order, `position` is the number of batches of the plan that are done with. Out of order some behind it are done
    with as well: these are `ahead`.

    Args:
        position: Where the run begins.
        ahead: What is done with beyond that.
        workers: Where workers begin, for datasets that they have a place in. Kept up to date with what is done with.
        next_worker: Who gets the first batch.
    """

    def __init__(
        self,
        position: int = 0,
        ahead: set[int] | None = None,
        *,
        in_order: bool = True,
        workers: dict[int, Start] | None = None,
        next_worker: int | None = None,
    ) -> None:
        self.position = position
        self.ahead = ahead or set()
        self.read = position  # batches of keys that were read from the sampler
        self.sampler_states: dict[int, Any] = {}  # by the number of batches that had been read
        self.set_epochs: list[int | None] = []  # what `set_epoch` of samplers had been called with
        self.finished = False
        self.workers = workers
        self._tracks = {worker: Track(start) for worker, start in (workers or {}).items()}
        self.next_worker = next_worker
        self._in_order = in_order

    def answered(self, worker: int, snapshot: Any, number: int = -1) -> None:
        """What is done with came from this worker, and is this batch of its stream; its dataset has told this state."""
        if self.workers is not None:
            self._tracks[worker].done(number, snapshot)
            self.workers[worker] = self._tracks[worker].start
            self.next_worker = worker + 1

    def done(self, seq: int) -> None:
        """A batch was yielded, or left out, or its error raised."""
        if self._in_order:
            self.position = seq + 1
        else:
            self.ahead.add(seq)
        while self.ahead and self.position in self.ahead:
            self.ahead.remove(self.position)
            self.position += 1
        states = self.sampler_states
        while states and (oldest := next(iter(states))) < self.position:
            del states[oldest]
