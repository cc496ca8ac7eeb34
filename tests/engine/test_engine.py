"""The engine by hand: what it sends, starts and hands over, with workers of which nothing is there but their ids."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from asyncloader import DataLoader
from asyncloader.engine.actions import Vacate
from asyncloader.engine.engine import Engine, State
from asyncloader.engine.progress import Progress
from asyncloader.engine.run import Run
from asyncloader.engine.scheduler import Scheduler
from asyncloader.engine.tracks import Track
from asyncloader.errors import WorkerStartError
from asyncloader.loops import GuardedLoop
from asyncloader.messages.messages import EpochSpec, Kind
from asyncloader.messages.outcome import NO_RECORD, Outcome
from asyncloader.messages.snapshot import Pace, WorkerStart
from asyncloader.messages.tickets import pickle_tickets
from asyncloader.observe.meter import Meter
from asyncloader.run.plan import Plan
from tests.engine.test_recovery import lose
from tests.support import deciders, inside
from tests.support.patience import until


class Pool:
    """Workers that answer nothing. What they are sent is pickled, as for processes."""

    listener: Any = None

    def __init__(self, num_workers: int) -> None:
        self.added: list[int] = []
        self.dismissed: list[int] = []
        self.sent: list[tuple[int, list[int]]] = []  # one entry for each message
        self.is_broken = False
        self.processes: dict[int, Any] = {}
        for worker in range(num_workers):
            self.come(worker)

    def come(self, worker: int) -> None:
        """Have a worker be there."""
        self.processes[worker] = SimpleNamespace(is_alive=True, is_ready=True)

    def add(self, worker: int, num_workers: int) -> None:
        self.added.append(worker)
        self.come(worker)

    def dismiss(self, worker: int, grace_s: float) -> None:
        self.dismissed.append(worker)
        self.processes.pop(worker, None)

    def begin_epoch(self, epoch: EpochSpec) -> None: ...

    def send(self, worker: int, tickets: Sequence[tuple[int, Any]]) -> Any:
        pickled, refused = pickle_tickets(tickets)
        self.sent.append((worker, [batch for batch, _ in pickled]))
        if self.is_broken:
            raise ValueError("behind the first of them")
        return refused


class Timers(GuardedLoop):
    """A loop whose timers can be looked at."""

    def __init__(self) -> None:
        super().__init__(asyncio.get_running_loop())
        self.timers: list[asyncio.TimerHandle] = []

    def call_later(self, delay_s: float, callback: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        self.timers.append(super().call_later(delay_s, callback, *args))
        return self.timers[-1]


class Driven:
    """An engine of two workers that is open, and its run.

    Args:
        there: How many workers are there from the beginning.
        chosen: Options.
    """

    def __init__(self, *, there: int = 2, **chosen: Any) -> None:
        self.pool, self.loop = Pool(there), Timers()
        self.options = deciders.options(on_timeout="retry", on_crash="retry", max_buffered_bytes=0, **chosen)
        self.run = self.make_run()
        portal: Any = SimpleNamespace(sessions=set())
        self.engine = Engine(portal, self.loop, self.pool, self.run, self.options)  # type: ignore[arg-type]
        self.engine.state = State.OPEN
        self.failed: list[BaseException] = []
        self.loop.on_error = self.failed.append

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler of the run that is going on."""
        return self.engine.run.scheduler

    def make_run(self) -> Run:
        """Return a run of a hundred batches."""
        settings = inside.options(DataLoader(range(100), 1))  # type: ignore[arg-type]
        progress, meter = Progress(0), Meter(0, 2, 4)
        scheduler = Scheduler(self.options)
        keys = [[number] for number in range(100)]
        plan = Plan(keys, iter(keys), progress, Pace())
        return Run(settings, scheduler, EpochSpec(1, (0, 0, 0)), meter, plan, progress)

    def plan(self, *keys: Any) -> None:
        """Have these keys be read, and the loop look at them."""
        self.engine.run.inbox.extend(keys)
        self.engine._read_inbox()

    def answer(self, worker: int, batch: int, private_bytes: int = 0) -> None:
        """Have a worker come to a batch."""
        record = NO_RECORD._replace(ticket=batch, private_bytes=private_bytes)
        self.engine.on_outcomes(worker, [(Outcome(Kind.BATCH, record, f"batch {batch}", nbytes=10), 0.0, 0.0)])

    def take(self) -> Any:
        """Return what a consumer finds; None if nothing is ready."""
        if not (ready := self.engine.run.handoff.ready):
            return None
        batch, error = (outcome := ready.popleft().outcome).data, outcome.error
        return batch if error is None else error


def tries(driven: Driven, worker: int) -> dict[int, int]:
    """Return how often each ticket of a worker was tried."""
    return {batch: ticket.tries for batch, ticket in driven.scheduler.in_flight[worker].items()}


# ------------------------------------------------------------------------------------------------ tickets and batches


async def test_outcomes_of_one_turn_of_the_loop_are_settled_together() -> None:
    """One message for each worker, and batches in order."""
    driven = Driven()
    driven.plan(*([number] for number in range(4)))
    assert driven.pool.sent == [(0, [0, 2]), (1, [1, 3])]
    for batch in (2, 0, 1):
        driven.answer(batch % 2, batch)
    assert driven.take() is None
    await asyncio.sleep(0)
    assert [driven.take() for _ in range(4)] == ["batch 0", "batch 1", "batch 2", None]
    driven.answer(1, 3)
    driven.plan([4], [5], [6])  # is settled with that
    assert len(driven.pool.sent) == 2
    await asyncio.sleep(0)
    assert driven.pool.sent[2:] == [(0, [4, 6]), (1, [5])]


async def test_batches_that_come_end_a_storm_of_deaths() -> None:
    """The next worker that dies is replaced at once."""
    driven = Driven()
    driven.plan([0])
    rests = [lose(driven.engine.recovery).rest_s for _ in range(9)]
    driven.answer(0, 0)
    assert (rests[-1] > 0, lose(driven.engine.recovery).rest_s) == (True, 0)


async def test_batches_that_have_come_are_handed_over_before_an_error() -> None:
    """The worker dies in the turn in which it has answered, and no other can be had."""
    driven = Driven(num_at_start=1)
    driven.plan([0], [1])
    driven.answer(0, 0)
    gone: Any = SimpleNamespace(
        worker_id=0, is_ready=False, why_no_other=WorkerStartError("no more"), pid=1, exitcode=1, output=b""
    )
    driven.engine.on_died(0, gone)
    assert driven.take() == "batch 0"
    assert driven.take() is None
    with pytest.raises(WorkerStartError, match="no more"):
        driven.run.check()


async def test_a_run_is_not_over_before_its_last_batch_is_handed_over() -> None:
    """Consumers may look at any moment."""
    driven = Driven(num_at_start=1)
    driven.run.plan_ended = True
    driven.plan([0])
    driven.answer(0, 0)
    assert not driven.run.ended
    await asyncio.sleep(0)
    assert driven.run.ended
    assert len(driven.run.handoff.ready) == 1


async def test_keys_that_cannot_be_pickled_are_refused_alone() -> None:
    """The others are sent; the error stands in the place of the batch, and says what the keys were."""
    driven = Driven(num_at_start=1, prefetch=3)
    driven.plan([0], [lambda: 0], [2])
    assert driven.pool.sent == [(0, [0, 2])]
    driven.answer(0, 0)
    await asyncio.sleep(0)
    assert driven.take() == "batch 0"
    assert any("cannot be sent to a worker process" in note for note in driven.take().__notes__)


async def test_what_fails_after_that_is_nobodys_keys() -> None:
    """Tickets may be on their way: they are neither refused nor sent again."""
    driven = Driven(num_at_start=1)
    driven.pool.is_broken = True
    with pytest.raises(ValueError, match="behind"):
        driven.plan([0], [1])
    assert not driven.scheduler.outbox
    assert set(driven.scheduler.in_flight[0]) == {0, 1}


async def test_what_is_for_a_worker_that_has_died_waits_for_its_successor() -> None:
    """More may be planned between a death and what is decided about it."""
    driven = Driven(num_at_start=1)
    driven.pool.processes[0].is_alive = False
    driven.plan([0])
    driven.plan([1])
    assert driven.pool.sent == []
    driven.pool.come(0)
    driven.engine.on_ready(0)
    assert driven.pool.sent == [(0, [0, 1])]


async def test_a_worker_whose_memory_is_bounded_has_few_tickets_in_hand() -> None:
    """What it has it finishes, however it grows by that. The others follow in order, one for each answer."""
    driven = Driven(num_at_start=1, max_worker_memory=1 << 30, prefetch=2, scheduling="dynamic")
    driven.plan(*([number] for number in range(5)))
    for answered in range(5):
        assert [batch for _, batches in driven.pool.sent for batch in batches] == [*range(min(answered + 2, 5))]
        driven.answer(0, answered)
        await asyncio.sleep(0)
    assert not driven.scheduler.outbox


BYTECODES = 580
"""At most, of the engine's room for one batch in CPython 3.11, where one read of a worker's channel brings ten: reading
its keys from the plan, giving it to a worker, putting it in order, taking and counting it, and its figures. What the
plan and C do is not counted."""


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="other versions have other bytecodes")
async def test_bytecodes_of_a_batch() -> None:
    """They are exact, whatever else the machine does: what a batch costs on its way is to stay what it is."""
    driven = Driven(prefetch=10)
    engine, run, count, taken = driven.engine, driven.run, 0, 0

    def trace(frame: Any, event: str, arg: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        path = frame.f_code.co_filename
        if "/asyncloader/" in path and "/messages/" not in path and "/run/" not in path:
            count += event == "opcode"
        return trace

    run.read_first(bool)
    before = sys.gettrace()
    sys.settrace(trace)
    while taken < 80:
        engine._read_inbox()
        for worker, tickets in driven.scheduler.in_flight.items():
            records = [NO_RECORD._replace(ticket=batch) for batch in tickets]
            engine.on_outcomes(worker, [(Outcome(Kind.BATCH, each, "data", nbytes=10), 0.0, 0.0) for each in records])
        engine._settle()
        while (item := run.first()) is not None:
            run.read_for(item, 0.0, 1.0)
            run.count(item)
            taken += 1
    sys.settrace(before)
    assert run.progress.now.position == taken
    assert count / taken <= BYTECODES


# ------------------------------------------------------------------------------------------------------------ workers


async def test_others_do_what_a_worker_had_that_is_away() -> None:
    """No ticket is blamed, and nothing waits for the worker, which takes part when it is ready."""
    driven = Driven()
    driven.plan(*([number] for number in range(4)))
    driven.engine.on_away(1)
    await asyncio.sleep(0)
    assert tries(driven, 0) == dict.fromkeys(range(4), 0)
    assert driven.scheduler.in_flight.keys() == {0}
    assert 1 in driven.engine.workforce.coming
    driven.engine.on_away(1)  # it may be told again, and of one that nobody wants
    driven.engine.resize(1)
    driven.engine.on_away(1)
    driven.engine.resize(2)
    assert driven.pool.added == []
    driven.engine.on_ready(1)
    assert driven.scheduler.in_flight.keys() == {0, 1}
    deciders.validate(driven.scheduler)


async def test_all_workers_may_be_away() -> None:
    """What is planned is for whichever comes first."""
    driven = Driven()
    for worker in (0, 1):
        driven.engine.on_away(worker)
    driven.plan(*([number] for number in range(3)))
    assert driven.pool.sent == []
    driven.engine.on_ready(1)
    assert driven.pool.sent == [(1, [0, 1, 2])]
    deciders.validate(driven.scheduler)


async def test_what_was_not_sent_to_a_worker_is_not_blamed_for_its_end() -> None:
    """It has waited for the next process."""
    driven = Driven()
    driven.plan([0], [1])
    driven.pool.processes[1].is_alive = False
    driven.plan([2], [3])
    driven.engine._carry_out([Vacate(1, lambda tickets: RuntimeError())])
    assert tries(driven, 1) == {}
    driven.engine._settle()
    assert tries(driven, 1) == {1: 1}
    assert [(ticket.batch, ticket.tries) for ticket in driven.scheduler._again[1]] == [(3, 0)]


@pytest.mark.parametrize("is_dead", [False, True], ids=["its process is still to be started", "it has died"])
async def test_the_only_worker_may_be_on_its_way(is_dead: bool) -> None:
    """Where hung workers are replaced, a timeout that ends before its process is there, or has been missed, is none."""
    driven = Driven(there=int(is_dead), num_workers=1)
    driven.pool.processes = {1: SimpleNamespace(is_alive=False, is_ready=True)} if is_dead else {}
    driven.run.is_asked = True
    driven.engine.look_for_overdue(driven.run, 0.5)
    assert driven.run.is_answered
    assert driven.take() is None
    assert not driven.run._urgent


async def test_a_worker_that_there_was_no_room_for_is_started_after_its_rest() -> None:
    """Whatever run has begun by then, and once."""
    driven = Driven()
    driven.engine.workforce.want(3)
    driven.engine._carry_out([("leave", 2), ("start", 2, 0.2)])
    assert driven.pool.added == []
    driven.engine.push = driven.engine._next_runs.append  # type: ignore[method-assign]
    driven.engine.push(driven.make_run())
    driven.engine._read_inbox()
    await until(lambda: driven.pool.added)
    assert driven.pool.added == [2]
    driven.engine.on_ready(2)
    assert 2 in driven.scheduler.takers


def rests(worker: int, rest_s: float) -> Vacate:
    """Return what is said of a worker that has died, and whose next process is to come after a rest."""
    return Vacate(worker, lambda tickets: RuntimeError("it died"), rest_s=rest_s)


async def test_what_is_for_a_worker_that_rests_waits_for_its_next_process() -> None:
    """The worker that is lost meanwhile, or that is there by then, gets none."""
    driven = Driven()
    driven.plan(*([number] for number in range(4)))
    driven.pool.processes[1].is_alive = False
    driven.engine._carry_out([rests(1, 0.05)])
    driven.engine._settle()
    assert (driven.pool.added, driven.pool.sent) == ([], [(0, [0, 2]), (1, [1, 3])])
    await until(lambda: driven.pool.added)
    await until(lambda: driven.pool.sent[2:])
    assert driven.pool.sent[2:] == [(1, [1])]
    driven.engine._carry_out([rests(1, 0.05)])  # it has another process before the rest is over
    await asyncio.sleep(0.1)
    assert driven.pool.added == [1]
    driven.pool.processes[1].is_alive = False
    driven.engine.workforce.want(1)
    driven.engine._carry_out([rests(1, 0.05), ("leave", 1)])
    driven.engine._settle()
    await asyncio.sleep(0.1)
    assert driven.pool.added == [1]
    assert driven.pool.sent[3:] == [(0, [1, 3])]


async def test_workers_that_were_left_to_be_started_later_are_started_one_by_one() -> None:
    """Each when there is room for one more; what is for it waits."""
    driven = Driven(there=1, num_at_start=3)
    driven.plan([0], [1], [2])
    assert not driven.scheduler.are_up
    for count in (1, 2, 2):
        driven.engine.on_room()
        await asyncio.sleep(0.01)
        assert driven.pool.added == [1, 2][:count]
    assert driven.pool.sent == [(0, [0]), (1, [1]), (2, [2])]
    assert not driven.engine.run.faults.replacements
    driven.engine.on_ready(2)
    assert driven.scheduler.are_up


async def test_a_worker_of_a_stream_begins_where_it_is_to_whoever_starts_it() -> None:
    """The one before was lost, and its place is free when there is room for another."""
    driven = Driven()
    start = WorkerStart(0)
    driven.run.epoch = driven.run.epoch._replace(starts={0: start, 1: start})
    driven.run.tracks = {0: Track(start), 1: Track(start)}
    driven.plan([0], [1])
    driven.answer(1, 1)
    driven.pool.dismiss(1, 0.0)
    driven.engine._carry_out([rests(1, 1000.0)])
    driven.engine.on_room()
    await until(lambda: driven.pool.added)
    assert driven.run.epoch.starts is not None
    assert driven.run.epoch.starts[1].batches == 1


async def test_a_worker_that_died_at_the_end_of_its_data_has_another_process_in_the_next_run() -> None:
    """And one that rests."""
    driven = Driven()
    for worker in (0, 1):
        driven.pool.processes[worker].is_alive = False
        driven.pool.processes[worker].worker_id = worker
    driven.engine._carry_out([rests(1, 1000.0)])
    driven.engine.push = driven.engine._next_runs.append  # type: ignore[method-assign]
    driven.engine.push(driven.make_run())
    driven.engine._read_inbox()
    await until(lambda: len(driven.pool.added) == 2)
    assert driven.pool.added == [0, 1]
    assert driven.engine.run.faults.replacements == 2


async def test_a_worker_without_a_place_has_a_process_in_the_next_run() -> None:
    """It left in the last one, and is wanted again."""
    driven = Driven()
    del driven.pool.processes[1]
    driven.engine._is_started = True
    driven.engine.push = driven.engine._next_runs.append  # type: ignore[method-assign]
    driven.engine.push(driven.make_run())
    driven.engine._read_inbox()
    await until(lambda: driven.pool.added)
    assert driven.pool.added == [1]


async def test_a_worker_that_has_grown_leaves_and_another_takes_its_place() -> None:
    """When it has answered what it has; until that joins, the others do its work."""
    driven = Driven(max_worker_memory=100)
    driven.plan(*([number] for number in range(4)))
    driven.answer(1, 1, private_bytes=90)
    driven.answer(0, 0, private_bytes=101)  # its first: it needs that
    driven.answer(1, 3, private_bytes=101)
    driven.plan([4], [5])
    await asyncio.sleep(0)
    assert driven.pool.dismissed == [1]
    assert driven.scheduler.in_flight.keys() == {0}
    await until(lambda: driven.pool.added)
    assert driven.pool.added == [1]
    assert 1 not in driven.scheduler.takers
    driven.engine.on_ready(1)
    driven.plan([6], [7])
    assert driven.pool.sent[-1] == (1, [7])
    assert driven.run.meter.stats().workers.renewals == 1
    assert not driven.failed


@pytest.mark.parametrize("is_second_too", [True, False])
async def test_an_engine_whose_workers_cannot_be_ended_is_closed_all_the_same(is_second_too: bool, caplog: Any) -> None:
    """As when the loop of the process ends: it is tried again, then abandoned. Nobody waits for more."""
    driven, grace = Driven(), []

    def end(grace_s: float) -> None:
        grace.append(grace_s)
        if is_second_too or len(grace) == 1:
            raise ValueError("cannot be ended")
        driven.engine.on_closed()

    driven.pool.end = end  # type: ignore[attr-defined]
    driven.pool.wait_dead = lambda timeout_s: True  # type: ignore[attr-defined]
    driven.engine.portal.sessions.add(driven.engine)
    driven.loop.on_error = driven.engine._on_error
    driven.engine.close_soon(1.5)
    assert grace == [1.5, 0.0]
    assert driven.engine.state is State.CLOSED
    assert driven.engine.wait_closed(0.0)
    assert driven.engine.portal.sessions == set()
    assert "cannot be ended" in caplog.text
