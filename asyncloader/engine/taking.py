"""How consumers take batches from a hand-off: several of them may share one, and each may be interrupted anywhere."""

from __future__ import annotations

from typing import Any, NamedTuple

from asyncloader.engine.error_limit import ErrorLimit
from asyncloader.engine.handoff import Handoff
from asyncloader.engine.progress import Call, Given, Progress
from asyncloader.messages.failure import stand_in
from asyncloader.messages.messages import Kind
from asyncloader.messages.outcome import Outcome

_new = tuple.__new__  # a NamedTuple's own `__new__` is written in Python, and takes three times as long


class Item(NamedTuple):
    """An outcome whose turn has come, for the consumer.

    Attributes:
        outcome: A batch, what was raised in its place, or nothing, but the place in the window is free; the end of the
            data, where batches are made in this process.
        batch: Number of the batch in the plan; -1 beside the order.
        worker: The worker that has answered the ticket; -1 for none.
        times: Times of a batch, for the meter; when it was made, where that was in this process.
        in_stream: Number of the batch in the stream of its worker.
        keys: Where they may be needed to make the batch again.
        counts: The item is in order, and frees a place in the window.
    """

    outcome: Outcome
    batch: int = -1
    worker: int = -1
    times: Any = None
    in_stream: int = -1
    keys: Any = None
    counts: bool = True

    def open(self, *, in_async_for: bool = False) -> tuple[Any, BaseException | None]:
        """Return the batch, or what is to be raised in its place."""
        outcome = self.outcome
        if outcome.kind == Kind.BATCH:
            return outcome.data, None
        return None, stand_in(outcome.error, in_async_for=in_async_for)


def failed(error: BaseException, batch: int = -1, *, counts: bool = True) -> Item:
    """Return what is raised in place of a batch that no worker has come to."""
    return Item(Outcome(Kind.FAILURE, error=error), batch, counts=counts)


class Taking:
    """The consumers' end of a hand-off. `take` is called with the lock of the progress held.

    Args:
        progress: Counts what consumers have been given.
        limit: Counts bad samples.

    Attributes:
        handoff: The queue that items are taken from.
        taken: How many batches of the plan were, those before the run included.
    """

    def __init__(self, progress: Progress, limit: ErrorLimit) -> None:
        self.handoff: Handoff[Item] = Handoff()
        self.taken = progress.now.position  # as if those before had been taken
        self.progress = progress
        self.limit = limit

    @property
    def num_dropped(self) -> int:
        """How many batches there are whose calls were interrupted, of those that were taken."""
        count = 0
        for call in self.progress.counted[1]:  # two or three: `sum` of a generator takes thrice as long
            count += call.is_interrupted
        return count

    @property
    def has_ready(self) -> bool:
        """Whether there is something to take."""
        return bool(self.handoff.ready) or self.num_dropped > 0

    def clear(self) -> None:
        """Let go of what is not on its way to a consumer: nobody may come for it. In any thread."""
        self.handoff.ready.clear()
        before = self.progress.counted
        after = before[0], tuple(call for call in before[1] if not call.is_interrupted)
        if self.progress.counted is before:
            self.progress.counted = after

    def take(self, call: Call) -> Item | None:
        """Give a call the first batch that is ready, or what is in its place; None if nothing is.

        A batch whose call was interrupted comes first. Batches that are left out are counted, and passed over.
        """
        progress, ready = self.progress, self.handoff.ready
        progress.follower()
        while True:
            before = progress.counted
            place, calls = progress.folded()
            if calls and (interrupted := next((each for each in calls if each.is_interrupted), None)) is not None:
                call.given, call.item = interrupted.given, interrupted.item
                after = place, tuple(call if each is interrupted else each for each in calls)
                if progress.counted is before:  # a handler of a signal may have taken it: then look again
                    progress.counted = after
                    again: Item = call.item
                    return again
                continue
            try:
                item = first = ready[0]
            except IndexError:
                return None
            outcome = item.outcome
            bad_count, snapshot = len(outcome.bad), outcome.snapshot
            if bad_count:
                bad_before = place.bad_count + sum(each.given.bad_count for each in calls)
                if (error := self.limit.count(outcome.bad, bad_before)) is not None:
                    item = failed(error)
            given = _new(Given, (first.batch, first.worker, first.in_stream, snapshot, first.keys, bad_count))
            is_left_out = item.outcome.kind == Kind.LEFT_OUT
            if is_left_out:
                after = place.after(given, is_ahead=bool(calls) or not progress.in_order), calls
            else:
                call.given, after = given, (place, (*calls, call))
            progress.forget(place.position)
            # From here on nothing is called: neither can a signal's handler run, nor another thread.
            if progress.counted is before and ready and ready[0] is first:
                if not is_left_out:
                    call.item = item
                progress.counted = after
                self.taken += first.counts
                del ready[0]
                if not is_left_out:
                    return item
