"""A ticket in work, and what becomes of the samples in it that raise."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from operator import itemgetter
from time import perf_counter
from typing import Any

from asyncloader.messages.failure import BadSample
from asyncloader.seeding.sample_context import BATCH


class NoGoodSample(Exception):
    """Every sample of a batch raised. ``first`` is what the first one raised, at this position."""

    def __init__(self, first: Exception, position: int) -> None:
        super().__init__("no sample of the batch is good")
        self.first = first
        self.position = position


class Job:
    """A ticket in work, from its first sample to its outcome.

    Attributes:
        ticket: Number of the ticket, for whole batches that of the batch: seeds are made of it.
        keys: As the sampler gave them.
        first: Number of its first sample in the epoch, where samples are known by that; otherwise None.
        count: How many samples there are.
        waited_s: How long an idle worker had waited for the ticket.
        began: When its first sample was asked for; on `time.perf_counter`, seconds.
        fetched: When its samples were there; 0.0 if they never were.
        samples: The samples by position, with None for those that are missing or bad; or a `Whole`.
        errors: The tolerated exceptions of samples, by position.
        fatal: The exception that stands for the batch, if there is one.
        fatal_at: The position of the sample that raised it; `BATCH` if it was no single sample.
        bad: The samples that raised, and were left out or replaced.
        snapshot: State of the dataset when the last sample had been read, or None.
        started: How many overlapping samples have been asked for.
        missing: How many overlapping samples are not here yet.
        pending: The positions of samples in flight, each with its task; `BATCH` for all samples in one call.
        is_last: The data of a stream have ended within this job: it has fewer samples than were asked for.
        is_over: The job is finished or was dropped. Samples that still come are dropped.
    """

    first: int | None = None
    fetched = 0.0
    fatal: BaseException | None = None
    fatal_at = BATCH
    bad: Sequence[BadSample] = ()
    snapshot: Any = None
    started = 0
    is_last = is_over = False

    def __init__(self, ticket: int, keys: Any = None, count: int = 0, waited_s: float = 0.0) -> None:
        self.ticket = ticket
        self.keys = keys
        self.count = self.missing = count
        self.waited_s = waited_s
        self.began = perf_counter()
        self.samples: Any = [None] * count
        self.errors: dict[int, Exception] = {}
        self.pending: dict[int, asyncio.Task[None] | None] = {}


def mend(samples: list[Any], errors: dict[int, Exception], *, leave_out: bool) -> list[Any]:
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
