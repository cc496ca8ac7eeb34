"""What the scheduler decides: tickets, and the actions that the session carries out. Plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias


@dataclass(slots=True)
class Ticket:
    """A numbered batch to do: ``keys`` are the indices as the sampler gave them."""

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


class Fail(NamedTuple):
    """These tickets are given up because their worker died or hung; the session makes one error of it.

    ``at_once`` hands the error over before what is in order, and the tickets are void already; otherwise it takes the
    place of the first ticket, through :meth:`Scheduler.ready`; with ``leave_out`` the place stays empty.
    """

    tickets: list[Ticket]
    at_once: bool
    leave_out: bool = False


class Finish(NamedTuple):
    """Everything that was planned has been delivered, and nothing more will be planned."""


Action: TypeAlias = Send | Deliver | Read | Replace | Fail | Finish

VOID = object()
"""The outcome of a ticket that makes no batch: it keeps its place in the order and is passed over."""
