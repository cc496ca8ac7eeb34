"""Agents and their workers in their places: what is told of which one, in any order in which things may happen.

The agents are played: frames come when the test says so.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import struct
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest

from asyncloader.engine.portal import get_portal
from asyncloader.messages.messages import EpochSpec, Kind, WorkerSpec
from asyncloader.messages.outcome import NO_RECORD, Outcome, pack
from asyncloader.ray import fleet as module
from asyncloader.ray.facts import facts
from asyncloader.ray.launcher import Access
from asyncloader.ray.pool import RemotePool
from asyncloader.ray.wire import Death, Frame, Word
from asyncloader.transport.slab import slab_pool
from asyncloader.worker.guarded_loop import GuardedLoop
from tests import inside

SPEC = WorkerSpec([1], False, True, None, False, None, 1, 0, True)


class Launcher:
    """Launches nothing, and notes who is to be gone."""

    address = "127.0.0.1"

    def __init__(self) -> None:
        self.killed: list[int] = []
        self.wanted: Any = None
        self.is_closed = False

    def open(self, parts: list[Any]) -> None: ...
    def begin(self, yard: Any, loop: Any) -> None: ...

    def want(self, num_workers: int | None, *, ask: bool) -> None:
        self.wanted = num_workers, ask

    def kill(self, number: int) -> None:
        self.killed.append(number)

    def close(self) -> None:
        self.is_closed = True

    def wait_closed(self, timeout_s: float) -> bool:
        return self.is_closed


class Line:
    """An agent's connection: notes what is sent."""

    peer = "somewhere"

    def __init__(self, pool: RemotePool, number: int) -> None:
        self.pool = pool
        self.sent: list[tuple[int, int, Any]] = []
        self.has_heard = False
        self.silent = 0
        self.dropped = ""
        self.is_admitted = pool.fleet.is_expected(number)
        self.number = number
        if self.is_admitted:
            agent = pool.fleet.agents[number]
            inside.link(pool, agent, self)

    def send(self, kind: int, life: int = 0, *parts: bytes) -> None:
        self.sent.append((kind, life, b"".join(parts)))

    def drop(self, why: str) -> None:
        self.dropped = why

    def beat(self) -> int:
        self.silent = 0 if self.has_heard else self.silent + 1
        self.has_heard = False
        return self.silent

    def say(self, kind: int, life: int = 0, body: bytes = b"") -> None:
        """Have a frame come."""
        self.pool.fleet.on_frame(self, Frame(kind, life, memoryview(body), []))  # type: ignore[arg-type]

    def hello(self, **other: str) -> None:
        self.say(Word.HELLO, 0, json.dumps(facts() | other).encode())

    def ready(self, life: int) -> None:
        self.say(Kind.READY, life, struct.pack("<Q", 1000 + life))

    def answer(self, life: int, ticket: int, epoch: int = 0) -> None:
        """Have a ticket answered."""
        record = NO_RECORD._replace(ticket=ticket, epoch=epoch)
        kind, parts = pack(Outcome(Kind.LEFT_OUT, record))
        self.say(kind, life, b"".join(map(bytes, parts)))

    def added(self) -> dict[int, int]:
        """Return, by life, the workers that were to be started."""
        return {life: pickle.loads(body)[0] for kind, life, body in self.sent if kind == Word.ADD}

    def kinds(self) -> list[int]:
        return [kind for kind, _, _ in self.sent if kind != Word.PING]


class Heard:
    """A listener that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def on_ready(self, worker: int) -> None:
        self.told.append(("ready", worker))

    def on_outcome(self, worker: int, outcome: Any, arrived_at: float) -> None:
        self.told.append((worker, outcome.record.ticket))

    def on_died(self, worker: int, process: Any) -> None:
        self.told.append(("died", worker, process.exitcode))

    def on_left(self, worker: int) -> None:
        self.told.append(("left", worker))

    def on_lost(self, worker: int) -> None:
        self.told.append(("lost", worker))

    def on_failed(self, error: Exception) -> None:
        self.told.append(("failed", str(error)))

    def on_closed(self) -> None:
        self.told.append("closed")


@pytest.fixture
async def pool() -> AsyncIterator[RemotePool]:
    """A pool beside two local workers, in a run."""
    made = RemotePool(GuardedLoop(asyncio.get_running_loop()), SPEC, Access(), Launcher(), 2)
    made.listener = Heard()
    assert list(made.start(EpochSpec(0, (0, 0, 0)), lambda: None)) == []
    yield made
    await close(made)


async def close(pool: RemotePool) -> None:
    pool.end(0.0)
    pool.fleet.give_up_all()
    assert pool.wait_dead(0.0)
    slab_pool().leave_loop()
    slab_pool().live_on(get_portal().loop)


def told(pool: RemotePool) -> list[Any]:
    """What the listener was told since it was last asked."""
    heard: Any = pool.listener
    said, heard.told = heard.told, []
    return said


def come(pool: RemotePool, num_workers: int) -> Line:
    """Have an agent come, all of whose workers are ready."""
    order = pool.fleet.admit(num_workers)
    assert order is not None
    line = Line(pool, order.number)
    line.hello()
    for life in line.added():
        line.ready(life)
    return line


async def test_a_worker_has_a_place_from_when_it_is_ready(pool: RemotePool) -> None:
    """Not before: nobody may give it tickets, or dismiss it for being wanted by none."""
    order = pool.fleet.admit(2)
    assert order is not None
    line = Line(pool, order.number)
    line.hello()
    assert not pool.processes
    first, second = line.added()
    line.ready(second)
    assert list(pool.processes) == [3]
    line.ready(first)
    assert told(pool) == [("ready", 3), ("ready", 2)]
    assert pool.processes[2].pid == 1000 + first


async def test_nodes_of_one_host_are_told_apart(pool: RemotePool) -> None:
    """By Ray's ids of them; an agent that comes later to the same node has its name."""
    names = []
    for node_id in ("a" * 56, "b" * 56, "a" * 56, "b" * 56):
        order = pool.fleet.admit(1)
        assert order is not None
        Line(pool, order.number).hello(node="host", node_id=node_id)
        names.append(pool.fleet.agents[order.number].node)
    assert names == ["host", "host/bbbbbbbb", "host", "host/bbbbbbbb"]


async def test_a_number_is_good_for_one_agent_once(pool: RemotePool) -> None:
    """While it is there, and after it was given up: one that comes back from silence is refused."""
    line = come(pool, 1)
    assert not Line(pool, 1).is_admitted
    assert not Line(pool, 2).is_admitted
    pool.fleet.on_lost(line, "broken")  # type: ignore[arg-type]
    assert not Line(pool, 1).is_admitted
    assert told(pool) == [("ready", 2), ("lost", 2)]
    assert inside.launcher(pool).killed == [1]


async def test_ids_are_free_again_when_their_agent_is_lost(pool: RemotePool) -> None:
    """The lowest first; those of others stay."""
    first, second = come(pool, 2), come(pool, 1)
    assert set(second.added().values()) == {4}
    pool.fleet.on_lost(first, "broken")  # type: ignore[arg-type]
    assert set(come(pool, 3).added().values()) == {2, 3, 5}


async def test_what_comes_of_a_life_that_is_over_counts_for_nothing(pool: RemotePool) -> None:
    """A batch of a worker that was discarded is on its way when another has the same ticket."""
    line = come(pool, 1)
    (life,) = line.added()
    pool.discard(2)
    line.answer(life, 5)
    pool.add(2, 3)
    line.answer(life, 5)
    new = max(line.added())
    line.answer(new, 5)
    assert told(pool) == [("ready", 2), (2, 5)]
    assert line.kinds() == [Word.WELCOME, Word.ADD, Word.DISCARD, Word.ADD]


async def test_outcomes_of_another_run_are_dropped(pool: RemotePool) -> None:
    line = come(pool, 1)
    (life,) = line.added()
    pool.begin_epoch(EpochSpec(1, (0, 1, 0)))
    line.answer(life, 0, epoch=0)
    line.answer(life, 1, epoch=1)
    assert told(pool) == [("ready", 2), (2, 1)]


async def test_a_run_that_begins_while_an_agent_comes_is_in_its_welcome(pool: RemotePool) -> None:
    """It would not know what to do with another frame before that."""
    order = pool.fleet.admit(1)
    assert order is not None
    line = Line(pool, order.number)
    pool.begin_epoch(EpochSpec(1, (0, 1, 0)))
    assert line.sent == []
    line.hello()
    kind, _, body = line.sent[0]
    assert (kind, pickle.loads(body)[1].number) == (Word.WELCOME, 1)


async def test_frames_of_one_agent_about_anothers_worker_are_nobodys(pool: RemotePool) -> None:
    first, second = come(pool, 1), come(pool, 1)
    (life,) = first.added()
    second.answer(life, 3)
    assert told(pool) == [("ready", 2), ("ready", 3)]


async def test_a_worker_that_dies_is_told_of_with_how_it_ended(pool: RemotePool) -> None:
    """Its place stays for another, whose life is another."""
    line = come(pool, 1)
    (life,) = line.added()
    line.say(Word.DIED, life, pickle.dumps(Death(-11, b"words", was_set_up=True)))
    line.answer(life, 1)
    assert told(pool) == [("ready", 2), ("died", 2, -11)]
    pool.add(2, 3)
    assert len(line.added()) == 2


async def test_a_replacement_that_cannot_be_started_is_a_worker_less(pool: RemotePool) -> None:
    """Others do what it had; nobody is blamed."""
    line = come(pool, 2)
    pool.discard(2)
    pool.add(2, 4)
    line.say(Word.DIED, max(line.added()), pickle.dumps(Death(None, b"no room", was_set_up=False)))
    assert told(pool)[2:] == [("lost", 2)]
    assert list(pool.processes) == [3]


async def test_a_worker_that_dies_before_it_is_ready_is_none_of_the_runs(pool: RemotePool) -> None:
    """An agent all of whose workers do is let go."""
    order = pool.fleet.admit(1)
    assert order is not None
    line = Line(pool, order.number)
    line.hello()
    line.say(Word.DIED, max(line.added()), pickle.dumps(Death(1, b"", was_set_up=True)))
    assert told(pool) == []
    assert line.dropped


async def test_an_agent_that_leaves_ends_when_its_last_worker_is_dismissed(pool: RemotePool) -> None:
    """Its workers that become ready meanwhile get no place."""
    order = pool.fleet.admit(3)
    assert order is not None
    line = Line(pool, order.number)
    line.hello()
    lives = list(line.added())
    for life in lives[:2]:
        line.ready(life)
    line.say(Word.LEAVING)
    line.ready(lives[2])
    assert told(pool) == [("ready", 2), ("ready", 3), ("left", 2), ("left", 3)]
    pool.dismiss(2, 3.0)
    assert Word.END not in line.kinds()
    pool.dismiss(3, 3.0)
    assert line.kinds()[-1] == Word.END
    line.say(Word.BYE)
    assert told(pool) == []


async def test_an_agent_that_leaves_as_it_comes_is_sent_home(pool: RemotePool) -> None:
    """It was told to go before it had met the trainer: none of its workers gets a place, and nothing has failed."""
    order = pool.fleet.admit(2)
    assert order is not None
    line = Line(pool, order.number)
    line.hello()
    line.say(Word.LEAVING)
    assert line.kinds() == [Word.WELCOME, Word.ADD, Word.ADD, Word.DISMISS, Word.DISMISS, Word.END]
    for life in line.added():
        line.ready(life)
    line.say(Word.BYE)
    assert told(pool) == []
    assert inside.failed_starts(pool) == 0


async def test_so_many_are_there_as_are_wanted(pool: RemotePool) -> None:
    """Those of the agent with the fewest go first, and it goes with the last; free places are filled again."""
    pool.want(5)
    assert inside.launcher(pool).wanted == (5, True)
    large, small = come(pool, 3), come(pool, 2)
    assert told(pool) == [("ready", worker) for worker in (2, 3, 4, 5, 6)]
    pool.want(2)
    assert told(pool) == [("left", 6), ("left", 5), ("left", 4)]
    for worker in (6, 5, 4):
        assert worker in pool.processes  # until it has finished what it has
        pool.dismiss(worker, 3.0)
    assert small.kinds()[-1] == Word.END
    assert Word.END not in large.kinds()
    pool.want(4)
    assert large.added()[max(large.added())] == 4  # of the agent that goes nothing is wanted any more
    assert len(small.added()) == 2
    assert inside.launcher(pool).wanted == (4, True)


async def test_what_is_wanted_before_the_start_is_had_then() -> None:
    """Local workers are started first, and look after the number before agents are launched."""
    launcher = Launcher()
    pool = RemotePool(GuardedLoop(asyncio.get_running_loop()), SPEC, Access(), launcher, 2, num_wanted=0)
    pool.want(3)
    assert launcher.wanted is None
    assert list(pool.start(EpochSpec(0, (0, 0, 0)), lambda: None)) == []
    assert launcher.wanted == (3, True)
    await close(pool)


async def test_more_may_be_wanted_before_those_who_were_not_have_gone(pool: RemotePool) -> None:
    """Their places are filled when they are free."""
    pool.want(2)
    line = come(pool, 2)
    pool.want(1)
    pool.want(2)
    assert len(line.added()) == 2
    pool.dismiss(3, 3.0)
    await asyncio.sleep(0)
    assert list(line.added().values()) == [2, 3, 3]
    assert Word.END not in line.kinds()


async def test_who_has_not_come_is_not_waited_for_if_it_is_not_wanted(pool: RemotePool) -> None:
    """An agent that is not there, one that is, but whose workers are not ready; of one that comes as many as needed."""
    pool.want(3)
    first, second = pool.fleet.admit(1), pool.fleet.admit(2)
    assert first is not None
    assert second is not None
    line = Line(pool, first.number)
    line.hello()
    pool.want(0)
    assert line.kinds() == [Word.WELCOME, Word.ADD, Word.DISMISS, Word.END]
    assert inside.launcher(pool).killed == [second.number]
    pool.want(1)
    assert len(come(pool, 3).added()) == 1
    assert told(pool) == [("ready", 2)]


async def test_an_agent_whose_worker_is_between_two_lives_is_not_given_back(pool: RemotePool) -> None:
    """Nor is its place another's."""
    pool.want(1)
    line = come(pool, 1)
    pool.discard(2)
    pool.want(2)
    assert len(line.added()) == 1
    assert Word.END not in line.kinds()
    pool.add(2, 3)
    assert len(line.added()) == 2


async def test_an_agent_whose_node_is_drained_leaves(pool: RemotePool) -> None:
    """One that is there finishes what it has; one that has not come need not come."""
    line, late = come(pool, 2), pool.fleet.admit(1)
    assert late is not None
    pool.fleet.on_draining(late.number)
    assert inside.launcher(pool).killed == [late.number]
    pool.fleet.on_draining(1)
    pool.fleet.on_draining(1)
    assert told(pool) == [("ready", 2), ("ready", 3), ("left", 2), ("left", 3)]
    pool.dismiss(2, 3.0)
    pool.dismiss(3, 3.0)
    assert line.kinds()[-1] == Word.END
    pool.fleet.on_draining(99)


async def test_a_worker_is_renewed_by_its_agent(pool: RemotePool) -> None:
    """Another process takes its place, and the worker finishes."""
    line = come(pool, 1)
    (life,) = line.added()
    pool.send(2, [(0, [1])])
    line.answer(life, 0)
    pool.add(2, 3)
    assert line.kinds()[-2:] == [Word.DISMISS, Word.ADD]
    other = max(line.added())
    assert pool.processes[2].life == other
    line.answer(life, 1)  # what the one before sends counts for nothing
    line.ready(other)
    line.answer(other, 2)
    assert told(pool) == [("ready", 2), (2, 0), ("ready", 2), (2, 2)]
    line.say(Word.DIED, other, pickle.dumps(Death(None, b"no room", was_set_up=False)))
    assert told(pool) == [("lost", 2)]


def lose_early(pool: RemotePool, when: str, *, with_node: bool) -> None:
    """Have an agent come to an end before a worker of it was ready; its connection and the launcher tell, or one."""
    order = pool.fleet.admit(1)
    assert order is not None
    gone = partial(pool.fleet.on_gone, order.number, "killed", with_node=with_node)
    if when == "it has not come":
        gone()
        return
    line = Line(pool, order.number)
    line.hello()
    if when == "the launcher tells first":
        gone()
    if when == "it is silent":
        for _ in range(5):
            line.has_heard = False
            pool.fleet.beat()
    else:
        pool.fleet.on_lost(line, "broken")  # type: ignore[arg-type]
    if when != "the launcher tells first":
        assert not told(pool)  # nobody knows yet what became of the node
        gone()


ENDS = ["it has not come", "its connection ends first", "the launcher tells first", "it is silent"]


@pytest.fixture
async def alone(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RemotePool]:
    """A pool without local workers, in a run."""
    monkeypatch.setattr(module, "_BEAT_S", 3600.0)
    made = RemotePool(GuardedLoop(asyncio.get_running_loop()), SPEC, Access(), Launcher(), 0)
    made.listener = Heard()
    assert list(made.start(EpochSpec(0, (0, 0, 0)), lambda: None)) == []
    yield made
    await close(made)


@pytest.mark.parametrize("when", ENDS)
async def test_the_death_of_a_node_is_no_failed_start(
    alone: RemotePool, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    """However early the node dies, and however many do: the run waits for another one, and says so."""
    for _ in range(10):
        lose_early(alone, when, with_node=True)
    assert told(alone) == []
    assert "its node has died" in caplog.text
    assert not alone.fleet.agents
    assert come(alone, 1).added()
    assert told(alone) == [("ready", 0)]


@pytest.mark.parametrize("when", ENDS)
async def test_agents_that_end_on_nodes_that_live_are_the_end(alone: RemotePool, when: str) -> None:
    """After three in a row, however they end; nodes that died between them do not count."""
    for _ in range(2):
        lose_early(alone, when, with_node=False)
        lose_early(alone, when, with_node=True)
    assert told(alone) == []
    lose_early(alone, when, with_node=False)
    ((what, why),) = told(alone)
    assert what == "failed"
    assert "No worker can be had on another machine" in why


async def test_a_slot_stays_with_an_agent_that_comes_while_the_slot_waits_for_another_worker() -> None:
    """The agent is launched as soon as the one before it is lost; another worker may be asked for later than that."""
    loop, launcher = GuardedLoop(asyncio.get_running_loop()), Launcher()
    pool = RemotePool(loop, SPEC, Access(), launcher, 0, num_fixed=1)
    pool.listener = Heard()
    assert list(pool.start(EpochSpec(0, (0, 0, 0), num_workers=1), lambda: None)) == []
    order = pool.fleet.admit(1)
    assert order is not None
    line = Line(pool, order.number)
    line.hello()
    pool.fleet.on_lost(line, "broken")  # type: ignore[arg-type]
    assert told(pool) == [("died", 0, None)]
    order = pool.fleet.admit(1)
    assert order is not None
    pool.add(0, 1)
    line = Line(pool, order.number)
    line.hello()
    assert list(line.added().values()) == [0]
    assert list(pool.processes[0].agent.workers) == [0]
    await close(pool)


async def test_what_became_of_a_node_is_nobodys_business_after_the_end(
    alone: RemotePool, caplog: pytest.LogCaptureFixture
) -> None:
    """The launcher may tell of agents that were lost before."""
    order = alone.fleet.admit(1)
    assert order is not None
    line = Line(alone, order.number)
    line.hello()
    alone.fleet.on_lost(line, "broken")  # type: ignore[arg-type]
    alone.end(0.0)
    alone.fleet.on_gone(order.number, "killed", with_node=False)
    assert inside.failed_starts(alone) == 0
    assert not caplog.text


async def test_silence_is_counted_in_turns_of_the_loop(pool: RemotePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five in which nothing came; one frame of any kind begins anew."""
    monkeypatch.setattr(module, "_BEAT_S", 3600.0)
    line = come(pool, 1)
    for beat in range(4 + 4):
        line.has_heard = beat == 3
        pool.fleet.beat()
    assert told(pool) == [("ready", 2)]
    pool.fleet.beat()
    assert told(pool) == [("lost", 2)]


async def test_another_version_of_ours_is_never_let_in(pool: RemotePool) -> None:
    """Even where other differences are allowed: frames may mean something else."""
    inside.set_access(pool, Access(on_mismatch="warn"))
    order = pool.fleet.admit(1)
    assert order is not None
    line = Line(pool, order.number)
    line.hello(asyncloader="0.0.1")
    ((what, why),) = told(pool)
    assert what == "failed"
    assert "asyncloader is" in why
    assert "on_mismatch" not in why
    assert line.dropped


async def test_the_end_waits_for_agents_that_are_there(pool: RemotePool) -> None:
    """Not for those that have not come: their numbers are good for nothing from then on."""
    line = come(pool, 1)
    late = pool.fleet.admit(1)
    assert late is not None
    pool.end(3.0)
    assert not pool.wait_dead(0.0)
    assert pool.fleet.admit(1) is None
    assert not Line(pool, late.number).is_admitted
    heard: Any = pool.listener
    line.say(Word.BYE)
    assert heard.told == [("ready", 2), "closed"]
    assert pool.wait_dead(0.0)


async def test_times_are_put_on_the_trainers_clock(pool: RemotePool) -> None:
    """The record says when a batch was begun."""
    line = come(pool, 1)
    (life,) = line.added()
    agent = pool.processes[2].agent
    agent.clock.note(0.0, 500.0, 0.0)
    seen: list[Any] = []
    pool.listener.on_outcome = lambda worker, outcome, at: seen.append(outcome)  # type: ignore[union-attr,method-assign]
    record = NO_RECORD._replace(began=507.0)
    kind, parts = pack(Outcome(Kind.BATCH, record), [pickle.dumps([1, 2])])
    line.say(kind, life, b"".join(map(bytes, parts)))
    assert seen[0].record.began == pytest.approx(7.0)
    assert seen[0].data == [1, 2]


async def test_an_end_after_the_end_begins_nothing(pool: RemotePool) -> None:
    """A timer would keep all of it, and what the options hold, for seconds."""
    pool.end(3.0)
    pool.end(3.0)
    assert pool.wait_dead(0.0)
    timer = inside.timer_of_the_end(pool)
    assert timer is not None
    assert timer.cancelled()
