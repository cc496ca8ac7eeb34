"""Decide what becomes of workers that died or hung: whether another takes the place, when, and what is said of it.

    died, overdue ──> ┌──────────┐ ──> Vacate(worker, cause, ...)   its tickets are run again or given up: the scheduler
    fill ───────────> │ Recovery │ ──> ("discard", worker)          kill it first
    ready, reset ───> └──────────┘ ──> ("give up", error)           no worker can be had

No loop, no clock, no process is touched: events come in as method calls, decisions go out as actions, which the engine
carries out. A worker that is lost is replaced at once. If one is lost after the other with no outcome of any worker
between them, starting more would only keep the machine busy: then a worker rests before it gets its next process,
longer each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from asyncloader.backends.worker import Worker
from asyncloader.engine.actions import Action, Cause, Ticket, Vacate
from asyncloader.errors import BatchTimeoutError, WorkerStartError, describe_death, died, last_words, timed_out
from asyncloader.log import log
from asyncloader.messages.snapshot import WorkerStart
from asyncloader.options import Options
from asyncloader.protocols import is_stateful, leaves_out_buffer, probe

_STARTING_S = 60.0
"""A worker that has not opened the dataset is not taken for hung before this time. Seconds."""

_FINISHING_S = 60.0
"""A batch that no worker has is waited for so long after the last outcome or start, with any timeout. Seconds."""

_CALM_LOSSES = 2
"""So many losses beyond one for each worker, with no outcome between them, are no reason to wait."""

_FIRST_REST_S = 0.02
_LONGEST_REST_S = 1.0
"""From then on a worker waits for its next process: at first this long, each time twice as long, at most so long."""

_MOST_LAUNCHES = 30
"""Where nobody can do the work of a worker, so many starts of a process in a row may fail: some 25 s."""

_LONGEST_POSTPONED_S = 60.0

_NOT_REPLACED = (
    "The worker was not replaced, since nobody knows where it was in its iterable dataset. To have such workers "
    "replaced, set the attribute deterministic = True on the dataset if it yields the same samples each time it is "
    "iterated over; or give the dataset state_dict() and load_state_dict()."
)

_NOT_IN_LATER_RUNS = (
    "The worker was not replaced: it had given no state of its iterable dataset in this epoch, nor at the end of "
    "the one before, and what the dataset keeps from earlier epochs was lost with the worker. With "
    "persistent_workers=False each epoch begins with new workers."
)

_NOT_REPLACEABLE = (
    'The worker was not replaced: with "skip" a batch would be left out, and nobody knows where another worker would '
    'then have to begin in the iterable dataset. "retry" makes the batch again.'
)


class Overdue(NamedTuple):
    """The awaited batch has not come in time.

    Attributes:
        timeout_s: How long it was waited for. Seconds.
        ticket: The awaited ticket.
        process: The worker that has it.
        stack: Where that is; "" if it did not answer.
        age_s: Since when that has been there. Seconds.
        is_held: The worker has the ticket still.
        may_replace: Somebody wants what another one would make.
    """

    timeout_s: float
    ticket: Ticket
    process: Worker
    stack: str
    age_s: float
    is_held: bool
    may_replace: bool


class Recovery:
    """The workers that were lost, as far as decisions need them. Called from the loop thread only.

    Another process can always take the place of a worker of a map-style dataset. A worker of a stream holds a position
    in the data. Its place can be taken where the stream can be read again from its beginning; otherwise as soon as the
    worker has told a state, in this run or at the end of the one before, unless a batch is to be left out: another
    worker would begin before that batch. Where the dataset provides a state, what this process has of it is what
    workers begin with in their first run, if they have processes or threads of their own. A worker that was not ready
    had read nothing, and is replaced in any case.

    Args:
        options: The options that the workers were started with: ``on_crash`` and ``on_timeout`` stay as they were then,
            while each run has a ``timeout`` of its own.

    Attributes:
        has_lost_for_good: A lost worker cannot be replaced.
        is_first_run: The workers have been through no other run.
        num_workers: How many workers there are to be.
    """

    def __init__(self, options: Options) -> None:
        dataset = options.dataset
        self._options = options
        self._tells_place = options.on_crash != "skip"
        self._is_replaceable = not options.is_iterable or (
            self._tells_place and (probe(dataset, "deterministic") is True or leaves_out_buffer(dataset))
        )
        self._has_initial_state = options.is_iterable and options.has_workers and is_stateful(dataset)
        self.num_workers: int = options.num_at_start
        self.has_lost_for_good: bool = False
        self.is_first_run = True
        self._failed_starts = 0
        self._losses = 0  # since the last outcome of any worker
        self._failed_launches: dict[int, int] = {}  # in a row, by worker

    def ready(self, worker: int) -> None:
        """A worker has opened the dataset."""
        self._failed_starts = 0
        self._failed_launches.pop(worker, None)

    def reset(self) -> None:
        """A worker has come to an outcome."""
        self._losses = 0

    # ------------------------------------------------------------------------------------------------------ deaths

    def died(
        self,
        process: Worker,
        start: WorkerStart | None,
        *,
        is_active: bool,
        is_coming: bool = False,
        is_alone: bool = True,
    ) -> Sequence[Action]:
        """The worker's process ended on its own.

        Args:
            process: The worker.
            start: Where another one would begin, if it held a place in the data.
            is_active: The worker had not come to the end of its data.
            is_coming: The run was to get it, and others do its work meanwhile.
            is_alone: No other worker is there.
        """
        how = describe_death(process.pid, process.exitcode) + last_words(process.output)
        if process.why_no_other is None:
            log.warning("%s", how)
        if is_alone or not is_coming:  # otherwise the run does without the worker, however often it fails
            self._failed_starts += not process.is_ready
        if not (is_active or is_coming):  # only a later run needs another
            self.has_lost_for_good |= not (self._is_replaceable or self._has_initial_state)
            return []
        if is_active or is_alone:
            if process.why_no_other is not None:
                return [("give up", process.why_no_other)]
            if self._failed_starts > self.num_workers + 2:
                words = (
                    f"Workers end before they can take a batch ({self._failed_starts} in a row); the last one: {how}"
                )
                return [("give up", WorkerStartError(words))]
        if is_coming:
            return self.not_launched(process.worker_id, WorkerStartError(how), is_active=False, is_alone=is_alone)
        if process.is_ready and not self._can_replace(start):
            return self._lose_for_good(process)
        cause = partial(_death, process)
        return [Vacate(process.worker_id, cause, was_ready=process.is_ready, rest_s=self._count_loss())]

    def not_launched(self, worker: int, error: Exception, *, is_active: bool, is_alone: bool) -> Sequence[Action]:
        """The system had no room for a process under this worker id, and may have some later.

        Args:
            worker: The id.
            error: The error of the start.
            is_active: The run counts on this worker.
            is_alone: No other worker is there for its work.
        """
        count = self._failed_launches[worker] = self._failed_launches.get(worker, 0) + 1
        if count == 1:
            log.warning("No process could be started for worker %d, which is tried again: %s", worker, error)
        is_needed = is_alone or bool(is_active and self._options.why_workers_stay)  # where it matters who makes a batch
        if is_needed and count > _MOST_LAUNCHES:
            return [("give up", error)]
        longest_s = _LONGEST_REST_S if is_needed else _LONGEST_POSTPONED_S
        start: Action = ("start", worker, min(_FIRST_REST_S * 2.0 ** min(count - 1, 20), longest_s))
        return [start] if is_needed else [("leave", worker), start]

    def fill(self, process: Worker, start: WorkerStart | None) -> Sequence[Action]:
        """Another run has begun, and this worker, which was lost before, has no process."""
        return [("replace", process.worker_id, 0.0)] if self._can_replace(start) else self._lose_for_good(process)

    def _lose_for_good(self, process: Worker) -> list[Action]:
        self.has_lost_for_good = True
        note = _NOT_IN_LATER_RUNS if self._has_initial_state else _NOT_REPLACED
        cause = partial(_death, process, note=note if self._tells_place else _NOT_REPLACEABLE)
        return [Vacate(process.worker_id, cause, replaceable=False, was_ready=process.is_ready)]

    def _can_replace(self, start: WorkerStart | None) -> bool:
        """Whether another process can begin where this one was: not if nobody knows where that is in a stream."""
        if self._is_replaceable or not self._tells_place or start is None:
            return self._is_replaceable
        return start.snapshot is not None or (self._has_initial_state and self.is_first_run)

    def _count_loss(self) -> float:
        """Count a lost worker; return how long to wait before another takes its place."""
        self._losses += 1
        excess = self._losses - self.num_workers - _CALM_LOSSES
        return min(_FIRST_REST_S * 2.0 ** (excess - 1), _LONGEST_REST_S) if excess > 0 else 0.0

    # ------------------------------------------------------------------------------------------------------- hangs

    def waits_on(self, timeout_s: float, silent_s: float) -> bool:
        """Whether to wait on for a batch that has not come in time, and that no worker has: nobody is to be replaced.

        The batch is about to be given to a worker, which may still have to be started, or was made, and is being
        pinned. Where a hung worker would be replaced, a busy machine is no reason to raise.

        Args:
            timeout_s: How long it was waited for. Seconds.
            silent_s: For how long no worker has come to an outcome, and none was started. Seconds.
        """
        return self._options.on_timeout != "raise" and silent_s < max(2 * timeout_s, _FINISHING_S)

    def starts_too_long(self, process: Worker, timeout_s: float, age_s: float) -> bool:
        """Whether a worker is to be killed for not having opened the dataset; the next one may be as slow as it was.

        Args:
            process: The worker.
            timeout_s: For how long a batch was waited for. Seconds.
            age_s: Since when the worker has been there. Seconds.
        """
        is_late = not process.is_ready and age_s >= max(timeout_s, _STARTING_S)
        return is_late and self._options.on_timeout != "raise"

    def overdue(self, found: Overdue, start: WorkerStart | None) -> BatchTimeoutError | Sequence[Action]:
        """The awaited batch has not come in time: do what ``on_timeout`` says, or return the error to raise.

        No action means that the batch, or its error, will come after all.

        Args:
            found: The facts.
            start: Where another worker would begin, if it held a place in the data.
        """
        on_timeout, process = self._options.on_timeout, found.process
        why = "The worker did not answer when asked where it is." if process.is_telling else "It has not come up yet."
        explain = partial(
            timed_out, found.timeout_s, found.ticket.keys, process.worker_id, process.pid, found.stack, why
        )
        if on_timeout == "raise" or not found.may_replace:
            return explain(may_retry=on_timeout == "raise" and self._is_replaceable and process.is_telling)
        would_skip = self._options.is_iterable and on_timeout == "skip"
        if would_skip or not self._can_replace(start):
            error = explain()
            error.add_note(_NOT_REPLACED if self._tells_place and not would_skip else _NOT_REPLACEABLE)
            return error
        if not found.is_held:  # it has come, or somebody else has waited too long for it
            return []
        if not (process.is_ready or self.starts_too_long(process, found.timeout_s, found.age_s)):
            return []  # killed for being slow to start, the next one would be as slow
        log.warning("%s It is killed and replaced.", explain())
        cause: Cause = lambda tickets: explain(tries=tickets[0].tries)  # noqa: E731
        worker = process.worker_id
        return [("discard", worker), Vacate(worker, cause, hung=True, rest_s=self._count_loss())]


def _death(process: Worker, tickets: Sequence[Ticket], note: str = "") -> Exception:
    """Make the error for tickets that are given up because their worker died."""
    keys = [ticket.keys for ticket in tickets]
    tries = tickets[0].tries if tickets else 1
    return died(process.pid, process.exitcode, keys, tries, process.output.decode(errors="replace"), note)
