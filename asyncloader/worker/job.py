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
        seq: Number of the ticket.
        keys: As the sampler gave them.
        first: Number of its first sample in the epoch, where samples are known by that; otherwise None.
        count: How many samples there are.
        waited_s: How long an idle worker had waited for the ticket.
        began: When its first sample was asked for; on `time.perf_counter`, seconds.
        fetched: When its samples were there; 0.0 if they never were.
        samples: By position; what is missing or bad is None. Or a `Whole`.
        errors: What samples raised that does not cost the batch, by position.
        fatal: What costs the batch.
        fatal_at: The position of the sample that raised that; `BATCH` if it was no single sample.
        bad: The samples that raised, and were left out or replaced.
        snapshot: State of the dataset when the last sample had been read, or None.
        started: Where samples overlap, how many of them have been asked for.
        missing: There, how many are not here yet.
        pending: There, the positions of those, with the task that fetches each; `BATCH` for all in one call.
        is_last: There, it has fewer samples than were asked for, since the data have ended.
        is_over: There, it is finished, or was dropped: what still comes of it is for nobody.
    """

    __slots__ = (
        "bad",
        "began",
        "count",
        "errors",
        "fatal",
        "fatal_at",
        "fetched",
        "first",
        "is_last",
        "is_over",
        "keys",
        "missing",
        "pending",
        "samples",
        "seq",
        "snapshot",
        "started",
        "waited_s",
    )

    def __init__(self, seq: int, keys: Any = None, count: int = 0, waited_s: float = 0.0) -> None:
        self.seq = seq
        self.keys = keys
        self.first: int | None = None
        self.count = self.missing = count
        self.waited_s = waited_s
        self.began = perf_counter()
        self.fetched = 0.0
        self.samples: Any = [None] * count
        self.errors: dict[int, Exception] = {}
        self.fatal: BaseException | None = None
        self.fatal_at = BATCH
        self.bad: Sequence[BadSample] = ()
        self.snapshot: Any = None
        self.started = 0
        self.pending: dict[int, asyncio.Task[None] | None] = {}
        self.is_last = self.is_over = False


def mend(samples: list[Any], errors: dict[int, Exception], *, leave_out: bool) -> list[Any]:
    """Return the samples in order, without the bad ones or with others in their places.

    Which good sample takes a place depends on the place alone, so that a batch that is made again is the same.

    Args:
        samples: By position; anything where a sample raised.
        errors: What these raised. They are taken out: their tracebacks refer to who has them.
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
