"""Options for a decider that is alone: those of a loader with two workers, but for what a test chooses."""

from __future__ import annotations

from functools import cache
from typing import Any

from asyncloader import DataLoader
from tests.support import inside

_DEFAULTS = {"num_at_start": 2, "num_workers": 0, "prefetch": 2, "max_buffered_bytes": 0}


class _Chosen:
    """An `Options` record some of whose fields, or of the properties that follow from them, have other values."""

    def __init__(self, chosen: dict[str, Any]) -> None:
        unknown = [name for name in chosen if not hasattr(_of_a_loader(), name)]
        assert not unknown, f"no options: {unknown}"
        self._chosen = chosen

    def __getattr__(self, name: str) -> Any:
        return self._chosen[name] if name in self._chosen else getattr(_of_a_loader(), name)


@cache
def _of_a_loader() -> Any:
    return inside.options(DataLoader(range(100), 4, num_workers=2))  # type: ignore[arg-type]


def options(**chosen: Any) -> Any:
    """Return options with these values; two batches for each worker, and no run-ahead, unless they say otherwise."""
    return _Chosen({**_DEFAULTS, **chosen})


def validate(scheduler: Any) -> None:
    """Check what must hold of a scheduler between any two events: a batch is in exactly one place."""
    in_flight, unsent, parked = scheduler.in_flight, scheduler._unsent, scheduler._parked
    again = [ticket for tickets in scheduler._again.values() for ticket in tickets]
    tickets = [*again, *unsent, *(ticket for tickets in in_flight.values() for ticket in tickets.values())]
    batches = {ticket.batch for ticket in tickets}
    assert len(tickets) == len(batches), f"a ticket is in two places: {scheduler!r}"
    assert not batches & parked.keys(), f"a batch is in two places: {scheduler!r}"
    numbers = [ticket.batch for ticket in unsent]
    assert numbers == sorted(numbers)
    for worker, tickets in scheduler._again.items():
        mine = [ticket.batch for ticket in tickets]
        assert mine == sorted(mine)
        assert len(in_flight[worker]) <= 1, f"what is done again is not alone: {scheduler!r}"
    if scheduler._in_order:
        everywhere = batches | parked.keys()
        assert all(batch >= scheduler.gone_count for batch in everywhere), f"came back after delivery: {scheduler!r}"
        assert scheduler.gone_count not in parked, f"a batch is parked that could go: {scheduler!r}"
    assert scheduler.gone_count + len(parked) + len(batches) <= scheduler.planned_count
    waiting = {(worker, ticket.batch) for worker, tickets in scheduler.outbox.items() for ticket in tickets}
    assert all(batch in in_flight[worker] for worker, batch in waiting), f"sent to nobody: {scheduler!r}"
    takers = set(scheduler.takers)
    assert len(takers) == len(scheduler.takers)
    assert scheduler._again.keys() <= takers <= in_flight.keys()


def validate_workforce(workforce: Any, scheduler: Any) -> None:
    """Check what must hold of a workforce between any two events: nobody is to come who is not wanted, or is there."""
    assert workforce.coming <= workforce.wanted
    assert not workforce.coming & {*scheduler.takers}
