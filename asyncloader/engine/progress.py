"""How far one run over the data is. Passive: the plan and the consumer write, states are made of it.

It outlives the iterator, so that a loader can tell the state of a run that was left with ``break``; so it holds no
iterator, and no worker.
"""

from __future__ import annotations

from typing import Any


class Progress:
    """What was read and taken of one run.

    In order, `position` is the number of batches of the plan that are done with. Out of order some behind it are done
    with as well: these are `ahead`.

    Args:
        position: Where the run begins.
        ahead: What is done with beyond that.
    """

    def __init__(self, position: int = 0, ahead: set[int] | None = None, *, in_order: bool = True) -> None:
        self.position = position
        self.ahead = ahead or set()
        self.read = position  # batches of keys that were read from the sampler
        self.sampler_states: dict[int, Any] = {}  # by the number of batches that had been read
        self.set_epochs: list[int | None] = []  # what `set_epoch` of samplers had been called with
        self.finished = False
        self._in_order = in_order

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
