"""Worker processes in their places: what is told of which one, in any order in which things may happen.

The processes are played: frames come, and processes end, when the test says so. Their slabs are real.
"""

from __future__ import annotations

import asyncio
import errno
import multiprocessing
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from asyncloader.backends.backend import END_GRACE_S, Came
from asyncloader.backends.processes import pool as module
from asyncloader.backends.processes.pool import Pool, WorkerHandle
from asyncloader.backends.worker import Worker
from asyncloader.errors import WorkerStartError
from asyncloader.loops import GuardedLoop
from asyncloader.messages.frames import BadFrame
from asyncloader.messages.messages import EpochSpec, Kind, WorkerSpec
from asyncloader.messages.outcome import NO_RECORD, Outcome, pack
from asyncloader.transport.slab import SlabPool
from tests.transport import wire

EPOCHS = [EpochSpec(number, (1, number, 0)) for number in (0, 1, 2)]


class Line:
    """A channel that notes what is sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, bytes]] = []

    def send(self, kind: int, *parts: Any, more: bool = False) -> None:
        """Note a frame."""
        self.sent.append((kind, b"".join(map(bytes, parts))))

    def kinds(self) -> list[int]:
        """Return the kinds of what was sent."""
        return [kind for kind, _ in self.sent]


class Played:
    """A process that is there between `start` and `exit`."""

    refused: int | None = None  # the id of the worker that cannot be started
    has_executor = False
    made: list[Played]

    def __init__(self, worker_id: int, loop: Any, owner: Pool, *, overlaps: bool = False) -> None:
        self.worker_id = worker_id
        self.pid = 100 + len(self.made)
        self.owner = owner
        self.channel = Line()
        self.is_alive = False
        self.is_ready = False
        self.exitcode: int | None = None
        self.heard: list[Any] = []
        self.made.append(self)

    def launch(self, context: Any, source: Any, heap: Any, epoch: EpochSpec, thread: Any) -> None:
        """Be launched."""
        self.source, self.memory, self.epoch = source, heap, epoch
        if self.worker_id == self.refused:
            raise OSError("no room")
        self.heard.append("launched")

    def watch(self, on_frames: Any) -> None:
        """Be there."""
        self.is_alive = True

    def close(self) -> None:
        """Note it."""
        self.heard.append("closed")

    def running(self) -> Any:
        """Return what an executor is given."""
        return self if self.has_executor else None

    def kill(self) -> None:
        """Note it; the end comes later."""
        self.heard.append("killed")

    def end(self, grace_s: float) -> None:
        """Note it; the end comes later."""
        self.heard.append(("end", grace_s))

    def put(self, kind: int, contents: Any) -> None:
        """Send a message."""
        self.channel.send(kind, pickle.dumps(contents))

    def on_up(self) -> None:
        """Note it."""
        self.heard.append("up")

    def on_awaits(self, text: str) -> None:
        """Note it."""
        self.heard.append(text)

    def wait_dead(self, timeout_s: float | None) -> bool:
        """Nothing is waited for."""
        return not self.is_alive

    def say(self, kind: int, body: bytes = b"") -> None:
        """Have a frame come."""
        self.come((kind, body))

    def come(self, *frames: tuple[int, bytes]) -> None:
        """Have frames come with one read of the channel."""
        self.owner.on_frames(self, ((kind, memoryview(body)) for kind, body in frames))  # type: ignore[arg-type]

    def outcome(self, outcome: Outcome, epoch: int) -> None:
        """Have what has become of a ticket of a run come."""
        self.come(frame_of(outcome, epoch))

    def exit(self, *, expected: bool = False) -> None:
        """Come to an end."""
        self.is_alive = False
        self.owner.on_exit(self, expected)  # type: ignore[arg-type]


class Heard:
    """A listener that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.rooms = 0
        self.reads: list[int] = []  # how many outcomes were told together

    def on_ready(self, worker: int) -> None:
        self.told.append(("ready", worker))

    def on_outcomes(self, worker: int, came: Sequence[Came]) -> None:
        self.told += [(worker, outcome.record.ticket, outcome.kind) for outcome, _, _ in came]
        self.reads.append(len(came))

    def on_room(self) -> None:
        self.rooms += 1

    def on_died(self, worker: int, process: Worker) -> None:
        self.told.append(("died", worker, process.pid))

    def on_closed(self) -> None:
        self.told.append("closed")


@pytest.fixture
def slabs(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlabPool]:
    """Slabs of the test's own, and processes that are played."""
    made = wire.Pool()
    monkeypatch.setattr(module, "slab_pool", lambda: made)
    monkeypatch.setattr(module, "WorkerProcess", Played)
    monkeypatch.setattr(module, "launch_all", lambda context, launches: [launch() for launch in launches])
    monkeypatch.setattr(module, "_AT_ONCE", 1)
    monkeypatch.setattr(module, "usable_cores", lambda: 8)
    monkeypatch.setattr(Played, "made", [], raising=False)
    yield made
    made.close()


def start(pool: Pool, heard: Heard) -> None:
    """Start the workers of a pool, as the portal does: what cannot be launched is told at that step."""
    steps: Any = pool.start(EPOCHS[0], lambda: heard.told.append(("started", len(pool.processes))))
    for launch in steps:
        try:
            launch()
        except OSError as error:
            steps.throw(error)


Make = Callable[..., tuple[Pool, Heard, list[Played]]]


@pytest.fixture
def make(slabs: SlabPool) -> Iterator[Make]:
    """Makes a pool, and starts its workers; at the end all have ended."""
    loop = asyncio.new_event_loop()
    pools = []

    def make(num_workers: int = 2, method: str = "fork") -> tuple[Pool, Heard, list[Played]]:
        spec = WorkerSpec(range(10), False, False, None, False, None, num_workers, 0, False)
        pool = Pool(GuardedLoop(loop), multiprocessing.get_context(method), spec)  # type: ignore[arg-type]
        pools.append(pool)
        pool.pack()
        heard = Heard()
        pool.listener = heard
        start(pool, heard)
        return pool, heard, Played.made

    yield make
    for pool in pools:
        pool.end(1.0)
        for process in Played.made:
            if process.is_alive:
                process.exit(expected=True)
        assert pool.listener is None
    loop.close()


def tickets_of(process: Played) -> list[tuple[list[int], list[Any]]]:
    """Return what tickets were sent to a process: numbers and keys, message by message."""
    sent = [pickle.loads(body)[1] for kind, body in process.channel.sent if kind == Kind.TICKETS]
    return [([ticket for ticket, _ in each], [pickle.loads(b"".join(keys)) for _, keys in each]) for each in sent]


def frame_of(outcome: Outcome, epoch: int) -> tuple[int, bytes]:
    """Return what has become of a ticket of a run as a worker sends it."""
    told = outcome._replace(record=NO_RECORD._replace(epoch=epoch, ticket=outcome.record.ticket))
    kind, parts = pack(told)
    return kind, b"".join(map(bytes, parts))


def left_out(ticket: int) -> Outcome:
    """What has become of a ticket, at its shortest."""
    return Outcome(Kind.LEFT_OUT, NO_RECORD._replace(ticket=ticket))


@pytest.mark.parametrize(("method", "count"), [("spawn", 2), ("forkserver", 3)])
def test_no_more_interpreters_are_started_at_once_than_there_are_cores(
    method: str, count: int, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is room for one more whenever one is up."""
    monkeypatch.setattr(module, "usable_cores", lambda: 2)
    pool, heard, workers = make(3, method)
    assert [*pool.processes] == [*range(count)]
    for rooms, worker in enumerate(workers[:2], 1):
        worker.say(Kind.UP)
        assert heard.rooms == rooms


def test_each_is_told_of_as_it_is_started(make: Make) -> None:
    """It can be given tickets before the next one is launched, where they are launched one by one."""
    pool, heard, (first, second) = make()
    assert heard.told == [("started", 1), ("started", 2)]
    assert pool.processes == {0: first, 1: second}
    second.say(Kind.UP, pickle.dumps(True))
    second.say(Kind.READY)
    second.say(Kind.AWAITS, pickle.dumps("at a line"))
    assert (heard.told[2:], second.heard) == ([("ready", 1)], ["launched", "up", "at a line"])
    assert (first.is_ready, second.is_ready) == (False, True)


def test_outcomes_of_one_read_are_told_together_and_before_what_came_after_them(make: Make) -> None:
    """What a worker answers when it is asked where it is may have it killed: what came before it is told by then."""
    pool, heard, (process, _) = make()
    del heard.told[:]
    answer = (Kind.AWAITS, pickle.dumps("at a line"))
    process.on_awaits = lambda text: heard.told.append(text)  # type: ignore[method-assign]
    process.come(*(frame_of(left_out(ticket), 0) for ticket in (0, 2)), answer, frame_of(left_out(4), 0))
    assert heard.told == [(0, 0, Kind.LEFT_OUT), (0, 2, Kind.LEFT_OUT), "at a line", (0, 4, Kind.LEFT_OUT)]
    assert heard.reads == [2, 1]

    def kill(text: str) -> None:
        pool.dismiss(0, 0.0)

    process.on_awaits = kill  # type: ignore[method-assign]
    del heard.told[:]
    process.come(frame_of(left_out(6), 0), answer, frame_of(left_out(8), 0))  # the last one is nobody's any more
    assert heard.told == [(0, 6, Kind.LEFT_OUT)]


def test_what_came_before_a_frame_that_makes_no_sense_is_told(make: Make) -> None:
    """The worker is killed for it; the outcome is as good as any other."""
    _, heard, (process, _) = make()
    del heard.told[:]
    with pytest.raises(BadFrame):
        process.come(frame_of(left_out(0), 0), (Kind.TICKETS, b""))
    assert heard.told == [(0, 0, Kind.LEFT_OUT)]


def test_where_one_cannot_be_started_the_others_are_ended(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, those that were launched with it and those before; it has no heap then."""
    monkeypatch.setattr(Played, "refused", 2)
    monkeypatch.setattr(module, "_AT_ONCE", 2)
    with pytest.raises(WorkerStartError, match="no room"):
        make(5)
    first, second, third, fourth = Played.made
    assert first.heard == second.heard == ["launched", ("end", 0.0)]
    assert third.heard == fourth.heard == ["closed"]
    assert first.owner._heaps.keys() == {first, second}


def test_what_is_pickled_once_is_given_to_every_worker(make: Make) -> None:
    """Forked ones inherit it."""
    _, _, (first, second) = make()
    assert first.source is second.source
    assert first.source.dataset == range(10)
    _, _, (*_, third, fourth) = make(method="spawn")
    assert third.source is fourth.source
    assert not hasattr(third.source, "dataset")


def test_a_fork_server_that_cannot_be_begun_with_is_for_the_launch_to_tell(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only to have it import while the dataset is pickled, it is started before that."""

    def refuse() -> None:
        raise OSError("no room")

    monkeypatch.setattr(module.fork_server, "start", refuse)
    _, heard, processes = make(method="forkserver")
    assert heard.told == [("started", 1), ("started", 2)]
    assert [process.heard for process in processes] == [["launched"]] * 2


def test_closed_between_two_launches(make: Make) -> None:
    """No others are launched; those that were are ended, and only then it is closed."""
    pool, heard, processes = make(0)
    pool._spec = replace(pool._spec, num_workers=3)
    pool.listener = heard
    steps = pool.start(EPOCHS[0], lambda: heard.told.append(("started", len(pool.processes))))
    next(steps)()
    pool.end(1.0)
    assert pool.listener is heard
    assert list(steps) == []
    assert [process.heard for process in processes] == [["launched", ("end", 0.0)]]
    processes[0].exit(expected=True)
    assert pool.listener is None


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_that_is_started_twice(make: Make, method: str) -> None:
    """It was not wanted any more, and then again, while it was being launched: the one that is there stays.

    The other one is ended, its end is nobody's concern, and nothing is closed before that.
    """
    pool, heard, processes = make(0, method)
    pool._spec = replace(pool._spec, num_workers=3)
    steps = pool.start(EPOCHS[0], lambda: heard.told.append(("started", len(pool.processes))))
    next(steps)()
    launch = next(steps)
    pool.add(1, 3)
    launch()
    for launch in steps:
        launch()
    first, twice, there, third = processes
    assert pool.processes == {0: first, 1: there, 2: third}
    assert [process.heard for process in (first, twice, there, third)] == [
        ["launched"],
        ["launched", ("end", 0.0)],
        ["launched"],
        ["launched"],
    ]
    assert heard.told == [("started", number) for number in (1, 2, 3)]
    twice.say(Kind.READY)
    pool.end(1.0)
    for process in (first, there, third):
        process.exit(expected=True)
    assert pool.listener is heard
    twice.exit()
    assert heard.told[3:] == ["closed"]


def test_tickets_go_out_in_one_message_each_time(make: Make) -> None:
    """What the sampler yields and nobody can pickle is returned: it was not sent."""
    pool, heard, (first, second) = make()
    assert not pool.send(1, [(0, [1, 2]), (1, [3])])
    assert tickets_of(second) == [([0, 1], [[1, 2], [3]])]
    assert first.channel.sent == []
    ((ticket, error),) = pool.send(1, [(2, lambda: None)])
    assert ticket == 2
    assert isinstance(error, (TypeError, AttributeError, pickle.PicklingError))
    assert len(tickets_of(second)) == 1
    assert [ticket for ticket, _ in pool.send(1, [(3, lambda: None), (4, [4])])] == [3]
    assert tickets_of(second)[1:] == [([4], [[4]])]
    for ticket in (0, 1, 4):
        second.outcome(left_out(ticket), 0)
    assert heard.told[2:] == [(1, ticket, Kind.LEFT_OUT) for ticket in (0, 1, 4)]


def test_outcomes_of_a_run_that_is_over_are_dropped(make: Make) -> None:
    """They count for no ticket of the next one."""
    pool, heard, (first, _) = make()
    pool.send(0, [(0, [1])])
    pool.begin_epoch(EPOCHS[1])
    pool.send(0, [(0, [7])])
    assert first.channel.kinds() == [Kind.TICKETS, Kind.EPOCH, Kind.TICKETS]
    assert pickle.loads(first.channel.sent[1][1]) == EPOCHS[1]
    first.outcome(left_out(0), epoch=0)
    assert heard.told[2:] == []
    first.outcome(Outcome(Kind.FAILURE, error=ValueError("of this run")), epoch=1)
    assert heard.told[2:] == [(0, 0, Kind.FAILURE)]


def test_a_worker_that_dies_is_told_with_its_place(make: Make) -> None:
    """Its heap is taken back; who takes its place begins in the run that there is."""
    pool, heard, (first, second) = make()
    pool.send(0, [(0, [1]), (1, [2])])
    first.exit()
    assert heard.told[2:] == [("died", 0, first.pid)]
    assert pool._heaps.keys() == {second}
    pool.begin_epoch(EPOCHS[1])
    pool.add(0, 2)
    third = Played.made[2]
    assert pool.processes == {0: third, 1: second}
    assert (third.epoch, third.heard) == (EPOCHS[1]._replace(num_workers=2), ["launched"])


def test_nothing_is_told_of_a_worker_that_was_discarded(make: Make) -> None:
    """Neither what it still says nor its end, which may come long after another has its place."""
    pool, heard, (first, _) = make()
    pool.dismiss(0, 0.0)
    assert first.heard[1:] == [("end", 0.0)]
    pool.add(0, 2)
    first.outcome(left_out(0), epoch=0)
    first.say(Kind.READY)
    assert not first.is_ready
    assert not pool.wait_dead(0.0)  # it is waited for as well
    first.exit()
    assert heard.told[2:] == []
    pool.dismiss(0, 0.0)  # the next one, which is gone before it could be killed
    Played.made[2].exit()
    pool.dismiss(0, 0.0)
    assert heard.told[2:] == []
    assert Played.made[2].heard == ["launched", ("end", 0.0)]


def test_one_more_that_no_executor_can_have(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is ended: nobody would give it tickets."""
    pool, heard, _ = make()

    def refuse(processes: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(module.executors, "adopt", refuse)
    monkeypatch.setattr(Played, "has_executor", True)
    with pytest.raises(WorkerStartError, match="ulimit -n"):
        pool.add(2, 3)
    third = Played.made[2]
    assert third.heard[1:] == [("end", 0.0)]
    assert 2 not in pool.processes
    assert not pool.wait_dead(0.0)
    third.exit()
    assert heard.told[2:] == []


def test_one_more_and_one_that_is_dismissed(make: Make) -> None:
    """That has no place from then on, and nothing is told of it; the last end is not told before its own."""
    pool, heard, (first, second) = make()
    pool.add(5, 3)
    third = Played.made[2]
    assert (list(pool.processes), third.epoch.num_workers) == ([0, 1, 5], 3)
    pool.dismiss(1, 3.0)
    pool.dismiss(1, 3.0)
    assert (list(pool.processes), second.heard[1:]) == ([0, 5], [("end", 3.0)])
    second.say(Kind.READY)
    pool.send(5, [(0, [1])])
    pool.end(2.5)
    assert [process.heard[-1] for process in (first, second, third)] == [("end", 2.5)] * 3
    for process in (first, third, second):
        assert heard.told[2:] == []
        process.exit(expected=True)
    assert heard.told[2:] == ["closed"]


def test_an_end_that_was_asked_for_is_no_death(make: Make) -> None:
    """Nor is one that comes while the pool ends. The last end is told, those of discarded ones included, once."""
    pool, heard, (first, second) = make()
    pool.dismiss(1, 0.0)
    pool.add(1, 2)
    third = Played.made[2]
    first.exit(expected=True)
    pool.end(2.5)
    assert (third.heard[1:], second.heard[1:]) == ([("end", 2.5)], [("end", 0.0), ("end", 2.5)])
    third.exit()
    assert heard.told[2:] == []
    second.exit()
    assert heard.told[2:] == ["closed"]
    assert pool.listener is None
    pool.end(0.0)
    assert heard.told[2:] == ["closed"]


def test_questions_are_answered(make: Make) -> None:
    """That the end of the data was told is confirmed."""
    _, _, (first, _) = make()
    first.say(Kind.ENDING, pickle.dumps(1))
    assert first.channel.sent == [(Kind.CONFIRM, pickle.dumps(1))]


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (Kind.BATCH, b"short"),
        (Kind.END, b""),
        (77, b""),
    ],
)
def test_what_no_worker_writes_is_refused(make: Make, kind: int, body: bytes) -> None:
    """It is the end of the worker; the others are not touched."""
    _, heard, (first, _) = make()
    with pytest.raises(BadFrame):
        first.say(kind, body)
    assert heard.told[2:] == []


def test_a_handle_is_like_a_process_of_multiprocessing(make: Make) -> None:
    """As code that was written for torch's iterator finds it."""
    _, _, (first, _) = make()
    handle = WorkerHandle(first)  # type: ignore[arg-type]
    assert (handle.pid, handle.exitcode, handle.is_alive(), handle.daemon) == (first.pid, None, True, True)
    first.exit(expected=True)
    first.exitcode = 0
    handle.join(0.0)
    assert (handle.exitcode, handle.is_alive()) == (0, False)


def test_a_worker_is_renewed(make: Make) -> None:
    """Another process takes the place of one that was dismissed, and this one finishes."""
    pool, heard, (first, second) = make()
    first.say(Kind.READY)
    pool.send(0, [(0, [1])])
    first.outcome(left_out(0), 0)
    pool.dismiss(0, END_GRACE_S)
    pool.add(0, 2)
    other = Played.made[2]
    assert (pool.processes, first.heard[1:]) == ({1: second, 0: other}, [("end", END_GRACE_S)])
    assert other.epoch == EPOCHS[0]._replace(num_workers=2)
    pool.send(0, [(2, [3])])
    assert tickets_of(other) == [([2], [[3]])]
    other.say(Kind.READY)
    other.outcome(left_out(2), 0)
    first.exit(expected=True)
    assert heard.told[2:] == [("ready", 0), (0, 0, Kind.LEFT_OUT), ("ready", 0), (0, 2, Kind.LEFT_OUT)]
    assert pool._heaps.keys() == {second, other}


def test_the_place_of_one_that_has_died_is_free_where_no_other_can_be_started(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever looks for the worker does not find the one that is gone."""
    pool, _, (first, second) = make()
    monkeypatch.setattr(Played, "refused", 0)
    first.exit()
    with pytest.raises(WorkerStartError, match="no room"):
        pool.add(0, 2)
    assert pool.processes == {1: second}
