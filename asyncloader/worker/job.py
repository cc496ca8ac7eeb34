"""A ticket in work, and what becomes of the samples in it that raise."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from operator import itemgetter
from time import perf_counter
from typing import Any

from asyncloader.messages.failure import BadSample


class NoGoodSample(Exception):
    """Every sample of a batch raised. ``first`` is what the first one raised, at this position."""

    def __init__(self, first: Exception, position: int) -> None:
        super().__init__("no sample of the batch is good")
        self.first = first
        self.position = position


class Job:
    """A ticket in work whose samples overlap, from its first sample to its outcome.

    Attributes:
        ticket: Number of the ticket, for whole batches that of the batch: seeds are made of it.
        waited_s: How long an idle worker had waited for the ticket.
        began: When its first sample was asked for; on `time.perf_counter`, seconds.
        count: How many samples there are.
        fetched: When its samples were there; 0.0 if they never were.
        bad: The samples that raised, and were left out or replaced.
        snapshot: State of the dataset when the last sample had been read, or None.
        keys: As the sampler gave them.
        first: Number of its first sample in the epoch, where samples are known by that; otherwise None.
        samples: The samples by position, with None for those that are missing or bad; or a `Whole`.
        errors: The exceptions of samples, by position.
        fatal_at: The position of the first of them that stands for the batch; `BATCH` if it was no single sample.
        started: How many samples have been asked for.
        pending: The positions of samples that are wanted and on their way, each with its task; `BATCH` for all samples
            in one call. What comes of other positions is dropped.
        is_last: The data of a stream have ended within this job: it has fewer samples than were asked for.
    """

    waited_s: float = 0.0
    count = 0
    fetched: float = 0.0
    bad: Sequence[BadSample] = ()
    snapshot: Any = None
    keys: Any = None
    first: int | None = None
    fatal_at: int = sys.maxsize
    started = 0
    is_last = False
    samples: Any
    errors: dict[int, BaseException]
    pending: dict[int, asyncio.Task[None] | None]

    def __init__(self, ticket: int) -> None:
        self.ticket = ticket
        self.began: float = perf_counter()


def mend(samples: list[Any], errors: dict[int, Any], *, leave_out: bool) -> list[Any]:
    """Return the samples in order, without the bad ones or with others in their places.

    Which good sample takes a place depends on the place alone, so that a batch that is made again is the same.

    Args:
        samples: By position; anything where a sample raised.
        errors: The exceptions of bad samples. The mapping is emptied, since tracebacks refer to its owner.
        leave_out: Leave bad ones out; otherwise good ones take their places.

    Raises:
        NoGoodSample: if there is none.
    """
    good = {position: sample for position, sample in enumerate(samples) if position not in errors}
    position, first = min(errors.items(), key=itemgetter(0))
    errors.clear()
    if not good:
        raise NoGoodSample(first, position)
    found = list(good.values())
    return found if leave_out else [good.get(i, found[i % len(found)]) for i in range(len(samples))]
