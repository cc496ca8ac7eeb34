"""The places of workers, by hand: one that is lost while it rests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from asyncloader.engine.actions import Lose, Replace
from asyncloader.engine.recovery import Policy
from asyncloader.engine.scheduler import Scheduler
from asyncloader.engine.supervisor import Supervisor
from asyncloader.engine.workforce import Workforce
from asyncloader.worker.guarded_loop import GuardedLoop


class Pool:
    """Workers of which nothing is known but their ids."""

    def __init__(self) -> None:
        self.added: list[int] = []

    def add(self, worker: int, num_workers: int) -> None:
        self.added.append(worker)


class Timers(GuardedLoop):
    """A loop whose timers can be looked at."""

    def __init__(self) -> None:
        super().__init__(asyncio.get_running_loop())
        self.timers: list[asyncio.TimerHandle] = []

    def call_later(self, delay_s: float, callback: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        self.timers.append(super().call_later(delay_s, callback, *args))
        return self.timers[-1]


class Session:
    """A session whose actions are noted."""

    takes_outcomes = True

    def __init__(self, unsent: list[int] | None = None) -> None:
        self.unsent = unsent or []
        scheduler = Scheduler(num_workers=2, prefetch_factor=2)
        faults = SimpleNamespace(replacements=0, timeouts=0)
        self.run: Any = SimpleNamespace(
            scheduler=scheduler, lost=lambda worker: None, faults=faults, epoch=None, tracks={}
        )
        self.applied: list[Any] = []

    def apply(self, actions: Any) -> None:
        self.applied += actions

    def drop(self, worker: int) -> list[int]:
        return self.unsent


def supervise(loop: GuardedLoop, pool: Any, session: Any) -> Supervisor:
    """Return what looks after two workers."""
    supervisor = Supervisor(loop, pool, Policy(replaceable=True), Workforce(2))
    supervisor.attach(session)
    return supervisor


async def test_a_worker_that_is_lost_while_it_rests_is_not_put_back() -> None:
    """Its machine has gone meanwhile: nobody could start it there."""
    pool, session, loop = Pool(), Session(), Timers()
    supervisor = supervise(loop, pool, session)
    session.run.scheduler.planned(range(4))
    supervisor.do(Lose(1, lambda tickets: RuntimeError(), rest_s=1000.0))
    assert session.run.scheduler.resting == {1}
    supervisor.lost(1)
    assert [timer.cancelled() for timer in loop.timers] == [True]
    assert not any(isinstance(action, Replace) for action in session.applied)
    assert supervisor.workforce.members == {0}
    assert session.run.scheduler.resting == set()
    session.run.scheduler.validate()


@pytest.mark.parametrize("hung", [False, True])
async def test_what_was_not_sent_to_a_worker_is_not_blamed_for_its_end(hung: bool) -> None:
    """It has waited for the next process."""
    pool, session = Pool(), Session(unsent=[1])
    supervisor = supervise(GuardedLoop(asyncio.get_running_loop()), pool, session)
    scheduler = session.run.scheduler
    scheduler.planned(range(4))
    supervisor.do(Lose(1, lambda tickets: RuntimeError(), hung=hung))
    assert {seq: ticket.tries for seq, ticket in scheduler.in_flight[1].items()} == {1: 0, 3: 1}
