"""Tickets, and what scheduler, workforce and recovery decide, for the session to carry out. Plain values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias


@dataclass(slots=True)
class Ticket:
    """A numbered batch to do: ``keys`` are the indices as the sampler gave them, or those of a slice of a batch."""

    seq: int
    keys: Any
    worker: int = -1
    tries: int = 0
    sent_at: float = 0.0  # the session's note; no decision depends on it
    is_prompt: bool = False  # sent to an idle worker as soon as it was idle: its wait is the channel's latency


class Send(NamedTuple):
    """Give the ticket to the worker."""

    worker: int
    ticket: Ticket


class Deliver(NamedTuple):
    """Hand the outcome over to the consumer."""

    outcome: Any


class Read(NamedTuple):
    """Let a consumer that waits read the sampler on, until it has read so many batches in all."""

    until: int


class Replace(NamedTuple):
    """Start a new process for this worker id."""

    worker: int


class Window(NamedTuple):
    """Let consumers read the sampler so many batches ahead of what they have taken: workers have come or gone."""

    size: int


class Dismiss(NamedTuple):
    """Let this worker go: it was to leave, and has nothing in hand any more."""

    worker: int


class Start(NamedTuple):
    """Start a worker under this id, which takes tickets when it is ready."""

    worker: int


class Join(NamedTuple):
    """Tell the scheduler that this worker takes tickets from now on."""

    worker: int


class Leave(NamedTuple):
    """Tell the scheduler that this worker is to leave."""

    worker: int


Cause: TypeAlias = Callable[[Sequence[Ticket]], Exception]
"""Makes the error for tickets that are given up because their worker was lost."""


class Fail(NamedTuple):
    """These tickets are given up because their worker died or hung; ``cause`` makes one error of it.

    ``at_once`` hands the error over before what is in order, and the tickets are void already; otherwise it takes the
    place of the first ticket, through :meth:`Scheduler.ready`; with ``leave_out`` the place stays empty.
    """

    tickets: list[Ticket]
    at_once: bool
    leave_out: bool = False
    cause: Cause | None = None


class Lose(NamedTuple):
    """Tell the scheduler that a worker is gone.

    Attributes:
        worker: Who.
        cause: Makes the error for tickets that are given up because of it.
        replaceable: Another process takes its place.
        was_ready: It may have begun with a ticket.
        hung: It was killed, for a batch did not come in time.
        rest_s: Another process starts only after so many seconds.
    """

    worker: int
    cause: Cause
    replaceable: bool = True
    was_ready: bool = True
    hung: bool = False
    rest_s: float = 0.0


class Postpone(NamedTuple):
    """Have others do the work of this worker, and start it after so many seconds: there was no room for a process."""

    worker: int
    rest_s: float


class Discard(NamedTuple):
    """Kill the process of this worker, whose end is nobody's concern then."""

    worker: int


class GiveUp(NamedTuple):
    """No worker can be had: one error stands for everything that is not here yet."""

    error: Exception


class JoinSlices(NamedTuple):
    """All slices of a batch are here: have them joined, and tell the splitter.

    Attributes:
        batch: A :class:`asyncloader.engine.splitter.SplitBatch`.
        slices: What workers have made of each; those without a good sample are left out.
    """

    batch: Any
    slices: list[Any]


class Finish(NamedTuple):
    """Everything that was planned has been delivered, and nothing more will be planned."""


Action: TypeAlias = (
    Send
    | Deliver
    | Read
    | Replace
    | Window
    | Start
    | Join
    | Leave
    | Dismiss
    | Fail
    | Lose
    | Postpone
    | Discard
    | GiveUp
    | JoinSlices
    | Finish
)

VOID = object()
"""Nothing is there, and its place in the order is passed over. In the plan, in place of keys: it was yielded before.
As an outcome: the ticket makes no batch."""

PART = object()
"""The outcome of a ticket of a slice: a later one stands for the batch, and this one's place is passed over."""
