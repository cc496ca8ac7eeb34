"""Faults that were handled in one run over the data, so that nothing is handled in silence."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

_MOST_KEPT = 1000


@dataclass(slots=True)
class Faults:
    """The faults of one run. Statistics have copies, which do not change.

    The session writes down what happened to workers, on the loop thread; a consumer, under its lock, errors and the bad
    samples of the batches that it takes.

    Attributes:
        errors: Exceptions that were handed over in place of a batch.
        retries: Batches that were run again because their worker died or hung over them.
        replacements: Processes that were started in place of others.
        timeouts: Batches whose worker was killed because they did not come in time.
        bad_count: Samples that raised and were left out or replaced.
        bad_samples: The keys of the last thousand of them.
        left_out: The keys, as the sampler gave them, of the last thousand batches that were left out.
    """

    errors: int = 0
    retries: int = 0
    replacements: int = 0
    timeouts: int = 0
    bad_count: int = 0
    bad_samples: deque[Any] = field(default_factory=partial(deque[Any], maxlen=_MOST_KEPT))
    left_out: deque[Any] = field(default_factory=partial(deque[Any], maxlen=_MOST_KEPT))

    def note_bad(self, count: int, keys: Iterable[Any]) -> None:
        """Note the bad samples of a batch, with which there are so many of the run."""
        self.bad_count = count
        self.bad_samples.extend(keys)

    def copy(self) -> Faults:
        """Return them as they are now."""
        return replace(self, bad_samples=self.bad_samples.copy(), left_out=self.left_out.copy())
