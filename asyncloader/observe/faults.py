"""Faults that were handled in one run over the data, so that nothing is handled in silence."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

_MOST_KEPT = 1000


class Faults:
    """The mended faults of one run.

    The session writes down what happened to workers, on the loop thread; a consumer, under its lock, the bad samples of
    the batches that it takes.

    Attributes:
        retries: Batches that were run again because their worker died or hung over them.
        replacements: Processes that were started in place of others.
        timeouts: Batches whose worker was killed because they did not come in time.
        bad_count: Samples that raised and were left out or replaced.
        bad_samples: The keys of the last thousand of them.
        left_out: The keys, as the sampler gave them, of the last thousand batches that were left out.
    """

    def __init__(self) -> None:
        self.retries = 0
        self.replacements = 0
        self.timeouts = 0
        self.bad_count = 0
        self.bad_samples: deque[Any] = deque(maxlen=_MOST_KEPT)
        self.left_out: deque[Any] = deque(maxlen=_MOST_KEPT)

    def note_bad(self, count: int, keys: Iterable[Any]) -> None:
        """Note the bad samples of a batch, with which there are so many of the run."""
        self.bad_count = count
        self.bad_samples.extend(keys)

    def figures(self) -> dict[str, Any]:
        """Return them as they are now, under the names that statistics have for them."""
        return {name: tuple(each) if isinstance(each, deque) else each for name, each in vars(self).items()}
