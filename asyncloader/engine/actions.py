"""Tickets, and what scheduler, workforce and recovery decide, for the engine to carry out. Plain values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias


@dataclass
class Ticket:
    """A batch to do.

    Attributes:
        batch: Number of the batch in the plan.
        keys: The keys of the batch, as the sampler gave them.
        worker: The worker that has the ticket, or had it last.
        tries: How many workers have died, or were killed as hung, while they had it.
    """

    batch: int
    keys: Any
    worker: int = -1
    tries: int = 0
    sent_at: float = field(default=0.0, init=False)  # the engine's note; no decision depends on it
    is_prompt: bool = field(default=False, init=False)  # sent to an idle worker at once: its wait is the latency


Cause: TypeAlias = Callable[[Sequence[Ticket]], Exception]
"""Makes the error for tickets that are given up because their worker was lost."""


class Fail(NamedTuple):
    """These tickets are given up because their worker died or hung; ``cause`` makes one error of it.

    With ``at_once`` the error comes before what is in order, and the batches are void; otherwise there is one ticket,
    and the error stands in the place of its batch. With ``leave_out`` that place stays empty.
    """

    tickets: list[Ticket]
    cause: Cause
    at_once: bool
    leave_out: bool = False


class Vacate(NamedTuple):
    """Tell the scheduler that a worker has no process any more.

    Attributes:
        worker: The worker.
        cause: Makes the error for tickets that are given up because of it.
        replaceable: Another process takes its place.
        was_ready: The process may have begun with a ticket.
        hung: The process was killed because a batch did not come in time.
        rest_s: Another process starts only after so many seconds.
    """

    worker: int
    cause: Cause
    replaceable: bool = True
    was_ready: bool = True
    hung: bool = False
    rest_s: float = 0.0


Action: TypeAlias = Fail | Vacate | tuple[str, Any] | tuple[str, int, float]
"""What is to be done:

    ("start", worker, rest_s)     start a process under this id, after so many seconds
    ("join", worker)              tell the scheduler that it takes tickets from now on
    ("leave", worker)             tell the scheduler that it is to leave, or that others are to do its work
    ("dismiss", worker)           let it go: it has nothing in hand
    ("replace", worker, rest_s)   the same, in the place of one that was lost
    ("discard", worker)           kill its process, whose end is nobody's concern then
    ("give up", error)            no worker can be had: one error stands for everything that is not here yet
"""

NOTHING: Any = object()
"""In place of keys: nobody has read any, or they were taken."""
END: Any = object()
"""In place of keys: there are no more."""
VOID: Any = object()
"""Nothing is there, and its place in the order is passed over. In the plan, in place of keys: it was yielded before.
As an item: the ticket makes no batch."""
