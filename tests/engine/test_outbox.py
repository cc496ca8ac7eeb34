"""Tickets on their way to workers: what the user's keys refuse, and what fails in our own code."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from asyncloader.engine.outbox import Outbox
from asyncloader.engine.workforce import Workforce
from asyncloader.messages.tickets import TicketPickler, pickle_tickets
from tests import deciders


class Sends:
    """A pool that pickles tickets, and keeps what it has sent."""

    def __init__(self) -> None:
        self.processes = {0: SimpleNamespace(is_alive=True)}
        self.sent: list[int] = []
        self.is_broken = False

    def send(self, worker: int, tickets: Sequence[tuple[int, Any]]) -> list[tuple[int, Exception]]:
        pickled, refused = pickle_tickets(tickets, TicketPickler())
        self.sent += [batch for batch, _ in pickled]
        if self.is_broken:
            raise ValueError("behind the first of them")
        return refused


def test_keys_that_cannot_be_pickled_are_refused_alone() -> None:
    """The others are sent."""
    pool, refused = Sends(), []
    outbox = Outbox(pool, Workforce(deciders.options(num_at_start=1)))  # type: ignore[arg-type]
    for batch, keys in enumerate([[0], [lambda: 0], [2]]):
        outbox.put(0, batch, keys)
    outbox.flush(lambda worker, batch, error: refused.append((worker, batch)), {})
    assert (pool.sent, refused) == ([0, 2], [(0, 1)])


def test_what_fails_after_that_is_nobodys_keys() -> None:
    """Tickets may be on their way: they are neither refused nor sent again."""
    pool, refused = Sends(), []
    pool.is_broken = True
    outbox = Outbox(pool, Workforce(deciders.options(num_at_start=1)))  # type: ignore[arg-type]
    for batch in range(2):
        outbox.put(0, batch, [batch])
    with pytest.raises(ValueError, match="behind"):
        outbox.flush(lambda worker, batch, error: refused.append((worker, batch)), {})
    assert (pool.sent, refused) == ([0, 1], [])


def test_what_is_for_a_worker_that_has_died_waits_for_its_successor() -> None:
    """More may be planned between a death and what is decided about it."""
    pool = Sends()
    outbox = Outbox(pool, Workforce(deciders.options(num_at_start=1)))  # type: ignore[arg-type]
    pool.processes[0].is_alive = False
    for batch in range(2):
        outbox.put(0, batch, [batch])
        outbox.flush(lambda worker, batch, error: None, {})
    assert pool.sent == []
    pool.processes[0] = SimpleNamespace(is_alive=True)
    outbox.flush(lambda worker, batch, error: None, {})
    assert pool.sent == [0, 1]


def test_a_worker_that_is_to_be_renewed_gets_its_tickets_when_it_was() -> None:
    """Until then they are counted."""
    pool, workforce = Sends(), Workforce(deciders.options(num_at_start=1))
    outbox = Outbox(pool, workforce)  # type: ignore[arg-type]
    workforce.renewing, workforce.is_finishing = 0, True
    outbox.put(0, 0, [0])
    outbox.flush(lambda worker, batch, error: None, {})
    assert (outbox.count(0), outbox.count(1), pool.sent) == (1, 0, [])
    workforce.reset(0)
    outbox.flush(lambda worker, batch, error: None, {})
    assert (outbox.count(0), pool.sent) == (0, [0])


def test_a_worker_whose_memory_is_bounded_has_few_tickets_in_hand() -> None:
    """What it has it finishes, however it grows by that. The others follow in order, one for each answer."""
    pool, in_flight = Sends(), {0: dict.fromkeys(range(5))}
    options = deciders.options(num_at_start=1, max_worker_memory=1 << 30, prefetch_factor=2)
    outbox = Outbox(pool, Workforce(options))  # type: ignore[arg-type]
    for batch in range(5):
        outbox.put(0, batch, [batch])
    for answered in range(5):
        for _ in range(2):
            outbox.flush(lambda worker, batch, error: None, in_flight)
            assert pool.sent == [*range(min(answered + 2, 5))]
        del in_flight[0][answered]
    assert outbox.count(0) == 0
