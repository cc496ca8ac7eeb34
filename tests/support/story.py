"""A run's story, as `loader.stats(story=True).story` has it, told again to a fresh scheduler: a hang becomes a test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncloader.engine.actions import Vacate
from asyncloader.engine.scheduler import Scheduler
from asyncloader.messages.outcome import NO_RECORD
from tests.support import deciders


def replay(story: Sequence[Sequence[Any]], options: Any, first: int = 0) -> Scheduler:
    """Return a scheduler that has been told all that; what holds of one is checked after each event.

    Batches that a resumed run passes over are not in a story, nor are keys: a number stands for those of a batch.

    Args:
        story: From the beginning of a run, so of 1,000 events at most.
        options: Of the loader.
        first: The first batch of the run.
    """
    scheduler = Scheduler(options, first=first)
    scheduler.are_up = True
    are_told = {event[1] for event in story if event[0] == "ready"}
    away: set[int] = set()  # workers that have no process: what is for them waits
    for name, *facts in story:
        match name:
            case "planned":
                scheduler.planned(range(scheduler.planned_count, scheduler.planned_count + facts[0]))
            case "made":
                worker, numbers, *measures = facts
                tickets = [scheduler.returned(worker, number) for number in numbers]
                for number in numbers:
                    if number not in are_told:  # otherwise it was pinned first
                        scheduler.ready(number, number, measures[0])
                if measures:
                    nbytes, busy_s, wait_s = measures
                    record = NO_RECORD._replace(fetch_s=busy_s, wait_s=wait_s)
                    scheduler.measured(worker, tickets[-1], record, nbytes)
            case "ready":
                scheduler.ready(facts[0], facts[0])
            case "vacated":
                away.add(facts[0])
                scheduler.vacated(_vacate(*facts))
            case "started":
                away.discard(facts[0])
            case "assign":
                while scheduler.assign():
                    pass
                for worker in scheduler.outbox.keys() - away:
                    del scheduler.outbox[worker]
            case _:
                getattr(scheduler, name)(*facts)
        deciders.validate(scheduler)
    return scheduler


def _vacate(worker: int, replaceable: bool, was_ready: bool, hung: bool, rest_s: float) -> Vacate:
    return Vacate(worker, lambda tickets: RuntimeError("it died"), replaceable, was_ready, hung, rest_s)
