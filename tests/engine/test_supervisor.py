"""The places of workers, by hand: one that is lost while it rests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from asyncloader.engine.actions import GiveUp, Postpone, Send, Vacate
from asyncloader.engine.scheduler import Scheduler
from asyncloader.engine.supervisor import Supervisor
from asyncloader.messages.messages import Kind
from asyncloader.messages.outcome import Outcome
from asyncloader.worker.guarded_loop import GuardedLoop
from tests import deciders
from tests.patience import until


class Pool:
    """Workers of which nothing is known but their ids."""

    def __init__(self) -> None:
        self.added: list[int] = []
        self.dismissed: list[int] = []
        self.processes: dict[int, Any] = {}

    def add(self, worker: int, num_workers: int) -> None:
        self.added.append(worker)

    def dismiss(self, worker: int, grace_s: float) -> None:
        self.dismissed.append(worker)


class Spare:
    """A process that is being started."""

    is_alive, is_ready, pid, exitcode, output = True, False, 7, -9, b""

    def __init__(self, killed: list[bool]) -> None:
        self.kill = lambda: killed.append(True)


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
    error = None

    def __init__(self) -> None:
        scheduler = Scheduler(deciders.options(on_timeout="retry"))
        faults = SimpleNamespace(replacements=0, timeouts=0)
        self.run: Any = SimpleNamespace(
            scheduler=scheduler,
            forget_given=lambda worker: None,
            start_of=lambda worker: None,
            faults=faults,
            epoch=None,
            tracks={},
            plan_ended=True,
        )
        self.applied: list[Any] = []

    def apply(self, actions: Any) -> None:
        self.applied += actions

    def receive(self, worker: int, outcome: Outcome, arrived_at: float) -> None: ...

    def flush(self) -> None: ...


def supervise(loop: GuardedLoop, pool: Any, session: Any) -> Supervisor:
    """Return what looks after two workers."""
    supervisor = Supervisor(loop, pool, deciders.options())
    supervisor.attach(session)
    return supervisor


async def test_others_do_what_a_worker_had_that_is_lost_with_its_machine() -> None:
    """No ticket is blamed, and the worker is started again when there is room; until then nothing waits for it."""
    pool, session, loop = Pool(), Session(), Timers()
    supervisor = supervise(loop, pool, session)
    scheduler = session.run.scheduler
    session.apply = lambda actions: [supervisor.do(action) for action in actions if not isinstance(action, Send)]
    scheduler.planned(range(4))
    lost: Any = SimpleNamespace(worker_id=1, is_lost=True, was_set_up=True, pid=7, exitcode=None, output=b"")
    supervisor.on_died(1, lost)
    assert pool.dismissed == [1]
    assert {batch: ticket.tries for batch, ticket in scheduler.in_flight[0].items()} == dict.fromkeys(range(4), 0)
    assert scheduler.active == {0}
    assert supervisor.workforce.is_coming(1)
    await until(lambda: pool.added)
    assert pool.added == [1]
    scheduler.validate()


async def test_a_run_whose_last_worker_could_not_be_started_ends() -> None:
    """It has begun without any, and none would come."""
    pool, session = Pool(), Session()
    supervisor = Supervisor(Timers(), pool, deciders.options(num_at_start=0, num_workers=2))  # type: ignore[arg-type]
    supervisor.attach(session)  # type: ignore[arg-type]
    session.run.scheduler = Scheduler(deciders.options(num_at_start=0, num_workers=2))
    ended: Any = SimpleNamespace(is_lost=False, was_set_up=True, pid=7, exitcode=3, output=b"no torch")
    supervisor.on_died(0, ended)
    assert session.applied == []
    supervisor.on_died(1, ended)
    assert [type(action) for action in session.applied] == [GiveUp]
    assert "no torch" in str(session.applied[0].error)


@pytest.mark.parametrize("hung", [False, True])
async def test_what_was_not_sent_to_a_worker_is_not_blamed_for_its_end(hung: bool) -> None:
    """It has waited for the next process."""
    pool, session = Pool(), Session()
    supervisor = supervise(GuardedLoop(asyncio.get_running_loop()), pool, session)
    scheduler = session.run.scheduler
    scheduler.planned(range(4))
    supervisor.outbox.put(1, 1, [1])
    supervisor.do(Vacate(1, lambda tickets: RuntimeError(), hung=hung))
    assert {batch: ticket.tries for batch, ticket in scheduler.in_flight[1].items()} == {1: 0, 3: 1}


async def test_a_worker_that_there_was_no_room_for_is_started_with_the_next_run() -> None:
    """Whatever the run was made for: nothing waits for it any longer."""
    pool, session, loop = Pool(), Session(), Timers()
    supervisor = supervise(loop, pool, session)
    supervisor.workforce.want(3)
    supervisor.do(Postpone(2, 1000.0))
    assert pool.added == []
    supervisor.begin_run()
    await until(lambda: pool.added)
    assert [timer.cancelled() for timer in loop.timers] == [True]
    assert pool.added == [2]


@pytest.mark.parametrize("what", ["ready", "ended", "late", "refused"])
async def test_the_process_that_is_started_for_a_worker(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker is sent no more when it is ready; if it ends, hangs or cannot be had, the worker goes on."""
    killed: list[bool] = []
    if what == "late":
        monkeypatch.setattr("asyncloader.engine.supervisor._LATE_S", 0.0)
    spare = Spare(killed)
    pool, session, loop = Pool(), Session(), Timers()
    pool.processes = {worker: SimpleNamespace(is_ready=True, node="") for worker in range(2)}
    session.run.plan_ended = False
    supervisor = Supervisor(loop, pool, deciders.options(max_tasks_per_child=1))  # type: ignore[arg-type]
    supervisor.attach(session)  # type: ignore[arg-type]
    session.run.scheduler.planned(range(4))

    def prepare(worker: int, num_workers: int) -> Any:
        assert (worker, num_workers) == (1, 2)
        if what == "refused":
            raise OSError("no room")
        return spare

    pool.prepare = prepare  # type: ignore[attr-defined]
    supervisor.on_outcome(1, Outcome(Kind.BATCH), 0.0)
    await asyncio.sleep(0)
    assert supervisor.workforce.renewing == (None if what == "refused" else 1)
    assert supervisor.workforce.may_send(1)
    match what:
        case "ready":
            spare.is_ready = True
        case "ended":
            spare.is_alive = False
        case "late":
            await until(lambda: killed)  # no outcome is needed for that
    supervisor.on_outcome(0, Outcome(Kind.BATCH), 0.0)
    assert supervisor.workforce.may_send(1) == (what != "ready")
    assert (supervisor.workforce.renewing == 1) == (what in ("ready", "late"))
    assert killed == [True] * (what == "late")
