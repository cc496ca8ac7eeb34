"""An exception in our own code on the loop thread, wherever that may be: never a hang, never a short epoch in silence.

    a run, watched ──> each function of the package that the loop thread calls, and how often
    the same run ────> one of these calls raises, at its beginning or at its end

What is demanded then: the consumers get all batches, and the right ones, or an error that they can report; nothing is
left behind; and the next run of the same loader is as ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple, Protocol

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

import asyncloader
from asyncloader import DataLoader, WorkerError
from asyncloader.engine.handoff import Handoff
from asyncloader.engine.portal import get_portal
from asyncloader.engine.scheduler import Scheduler
from asyncloader.errors import InternalError
from asyncloader.run.worker_iterator import WorkerIterator
from asyncloader.typing import AsyncDataset
from tests.support import inside
from tests.support.leftovers import Holdings
from tests.support.pins import pins

PACKAGE = str(Path(asyncloader.__file__).parent)
PATIENCE_S = 20.0  # on a busy machine; what hangs hangs for ever
PARTS = 6  # of all faults, each a test: they wait more than they work, and run beside each other

RIGHT = [list(range(begin, begin + 4)) for begin in range(0, 24, 4)]


@pytest.fixture(autouse=True)
def by_count() -> Iterator[None]:
    """Have workers be renewed by how much they have made."""
    with inside.renewals_by_count():
        yield


class InjectedError(Exception):
    """What a call of ours raises."""


# -------------------------------------------------------------------------------------------------------------- runs


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> int:
        return index


class Awaited(AsyncDataset[int]):
    def __len__(self) -> int:
        return 24

    async def __getitem__(self, index: int) -> int:
        await asyncio.sleep(0)
        return index


class Stream(IterableDataset[int]):
    """Each of two workers yields every other batch."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        mine = [batch for number, batch in enumerate(RIGHT) if number % 2 == info.id]
        flat = [index for batch in mine for index in batch]
        while self.at < len(flat):
            self.at += 1
            yield flat[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Failing(Numbers):
    """In each run one worker is killed, or hangs."""

    def __init__(self, folder: Path, *, hangs: bool = False) -> None:
        self.folder = folder
        self.hangs = hangs

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> int:
        if index == 9:
            with contextlib.suppress(FileExistsError):
                (self.folder / "failed").touch(exist_ok=False)
                if self.hangs:
                    time.sleep(1000)
                os.kill(os.getpid(), signal.SIGKILL)
        return index

    def prepare(self) -> None:
        (self.folder / "failed").unlink(missing_ok=True)


def make_loader(kind: str, folder: Path) -> DataLoader[Any]:
    """Return a loader whose run goes through this part of the engine."""
    data, options = Numbers(), {"batch_size": 4, "num_workers": 2}
    if kind == "threads":
        options["worker_backend"] = "thread"
    elif kind == "awaited":
        data, options["num_workers"] = Awaited(), 0
    elif kind == "awaited in workers":
        data = Awaited()
    elif kind == "stream":
        data = Stream()
    elif kind == "renewed":
        options |= inside.renewed_after(1)
    elif kind == "persistent":
        options["persistent_workers"] = True
    elif kind == "resized":
        options["num_workers"] = 1  # and then two, and one: more than two would be too many for small machines
    elif kind == "killed":
        data = Failing(folder)
    elif kind == "hung":
        data = Failing(folder, hangs=True)
        options |= {"timeout": 0.3, "on_timeout": "retry", "max_retries": 50}  # on a busy machine others are late too
    return DataLoader(data, **options)  # type: ignore[arg-type]


KINDS = [
    "processes",
    "threads",
    "awaited",
    "awaited in workers",
    "stream",
    "renewed",
    "persistent",
    "resized",
    "pinned",
    "killed",
    "hung",
]


def take(iterator: Any, taken: list[Any]) -> None:
    for batch in iterator:
        taken.append(batch.tolist())


async def take_async(iterator: Any, taken: list[Any]) -> None:
    async for batch in iterator:
        taken.append(batch.tolist())


def by_for(loader: DataLoader[Any], taken: list[Any], resize: Callable[[], None]) -> None:
    iterator = iter(loader)
    taken.append(next(iterator).tolist())
    resize()
    take(iterator, taken)


def by_async_for(loader: DataLoader[Any], taken: list[Any], resize: Callable[[], None]) -> None:
    async def consume() -> None:
        iterator = aiter(loader)
        taken.append((await anext(iterator)).tolist())
        resize()
        done = await asyncio.gather(*(take_async(iterator, taken) for _ in range(2)), return_exceptions=True)
        check_all(done)

    asyncio.run(consume())


def by_threads(loader: DataLoader[Any], taken: list[Any], resize: Callable[[], None]) -> None:
    iterator = iter(loader)
    resize()
    done: list[Any] = []

    def consume() -> None:
        try:
            take(iterator, taken)
            done.append(None)
        except BaseException as error:
            done.append(error)

    threads = [threading.Thread(target=consume, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(done) == 2, "one of two consumers waits for ever"
    check_all(done)


def check_all(done: list[Any]) -> None:
    """Raise what consumers of one iterator have got: each of them the error, or none."""
    errors = [error for error in done if error is not None]
    if any(isinstance(error, InternalError) for error in errors):
        assert len(errors) == len(done), f"one consumer has not heard of it: {errors!r}"
    if errors:  # perhaps of one batch, which one of them has got
        raise errors[0]


FACES = {"for": by_for, "async for": by_async_for, "threads": by_threads}


# ------------------------------------------------------------------------------------------------------- what fails

_GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR

TRUSTED = {
    # The guard itself, and what brings the answer of a call to the thread that waits for it.
    "GuardedLoop.run",
    "GuardedLoop.fail",
    "GuardedLoop.call_later",
    "_fulfil",
    "_answer",
    # What lets go of descriptors that nobody else knows, or returns something that nobody else knows.
    "Ends.close",
    "GuardedLoop.remove_reader",
    "WorkerProcess._close_descriptor",
    "start",
    "LocalWorker.start",
    "WorkerProcess.launch",
    "launch_all",
    "LocalPool._start_one",
    "Pool._starting",
    "Pool._start_other",
    "WorkerProcess._connect",
    "open_pair",
    # Called by the interpreter, which writes down what they raise: at forks, and at the end of a lease.
    "_before_fork",
    "_after_fork",
    "_Fork.__init__",
    "SlabPool.before_fork",
    "SlabPool.after_fork",
    "SlabPool._plan_drain",
    "SlabPool._await_end",
    "SlabPool._make_on_end.<locals>.on_end",
}


class Place(NamedTuple):
    """A call of a function on the loop thread."""

    name: str
    event: str

    def __str__(self) -> str:
        return f"{self.name} at its {'beginning' if self.event == 'call' else 'end'}"


class Watch:
    """Counts the calls on the loop thread, or has one of them raise."""

    def __init__(self, place: Place | None = None, number: int = 0) -> None:
        self.counts: Counter[Place] = Counter()
        self.has_raised = False
        self._place = place
        self._number = number
        self._pid = os.getpid()
        self._names: dict[CodeType, str] = {}

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        if event not in ("call", "return") or os.getpid() != self._pid or self.has_raised:
            return
        code = frame.f_code
        if event == "return" and code.co_flags & _GENERATORS:  # at each `yield`: what is raised there skips `finally`
            return
        if code.co_name == "<genexpr>":  # `all` drops it in the middle, and what is raised then reaches nobody
            return
        if (name := self._names.get(code)) is None:
            outermost = code.co_qualname.partition(".<locals>")[0]  # until Python 3.12, comprehensions are functions
            is_ours = code.co_filename.startswith(PACKAGE) and not {code.co_qualname, outermost} & TRUSTED
            module = Path(code.co_filename).stem
            name = self._names[code] = f"{module}.{code.co_qualname}" if is_ours else ""
        if not name:
            return
        place = Place(name, event)
        self.counts[place] += 1
        if place == self._place and self.counts[place] == self._number:
            self.has_raised = True
            raise InjectedError(str(place))


@contextlib.contextmanager
def watched(watch: Watch) -> Iterator[None]:
    portal = get_portal()
    portal.call(sys.setprofile, watch).result(PATIENCE_S)
    try:
        yield
    finally:
        watch.has_raised = True
        portal.call(sys.setprofile, None).result(PATIENCE_S)


class Case:
    """One kind of run, with one kind of consumer."""

    def __init__(self, kind: str, face: str, folder: Path) -> None:
        self.kind = kind
        self.face = face
        self._folder = folder

    def epoch(self, loader: DataLoader[Any]) -> BaseException | None:
        """Take an epoch, and see that it is right as far as it goes; return the error that ended it."""
        taken: list[Any] = []
        done: list[BaseException | None] = []
        if isinstance(loader.dataset, Failing):
            loader.dataset.prepare()
        numbers = iter((2, 1)) if self.kind == "resized" else iter(())

        def resize() -> None:
            if (number := next(numbers, None)) is not None:
                loader.set_num_workers(number)

        def consume() -> None:
            try:
                FACES[self.face](loader, taken, resize)
                done.append(None)
            except BaseException as error:
                done.append(error)

        thread = threading.Thread(target=consume, daemon=True)
        thread.start()
        thread.join(PATIENCE_S)
        assert done, f"the consumer waits for ever, after {len(taken)} batches"
        right = RIGHT[: len(taken)] if done[0] is not None else RIGHT
        if self.face == "for":
            assert taken == right
        elif done[0] is None:
            assert sorted(taken) == right
        return done[0]

    def run(self, watch: Watch) -> None:
        """Take epochs of one loader, the first with the fault."""
        loader = make_loader(self.kind, self._folder)
        with watched(watch):
            error = self.epoch(loader)
            if error is None and self.kind == "persistent":
                error = self.epoch(loader)
            loader.close()
        if error is not None:
            assert watch.has_raised
            assert_told(error)
        assert self.epoch(loader) is None, "the next run"
        loader.close()


def assert_told(error: BaseException) -> None:
    """Say that an error tells of the fault: itself, by its cause, or by what has become of a worker."""
    chain, link = [], error
    while link is not None:
        chain.append(link)
        link = link.__cause__ or link.__context__
    assert isinstance(chain[0], (InternalError, WorkerError)) or any(isinstance(e, InjectedError) for e in chain), chain


class CaseMaker(Protocol):
    def __call__(self, kind: str, face: str) -> Case: ...


@pytest.fixture
def make_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CaseMaker:
    make_finisher = WorkerIterator._make_finisher
    # pytest keeps all records until the test has ended, with the frames of what was raised, and all that these hold.
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)

    def make(kind: str, face: str) -> Case:
        pinned = lambda iterator, loop: pins(loop, lambda batch: batch.clone())  # noqa: E731
        monkeypatch.setattr(WorkerIterator, "_make_finisher", pinned if kind == "pinned" else make_finisher)
        return Case(kind, face, tmp_path)

    return make


def sweep(case: Case, choose: Callable[[list[tuple[Place, int]]], list[tuple[Place, int]]]) -> None:
    """Have calls fail, one in each run."""
    seen = Watch()
    case.run(seen)
    faults = sorted(
        {(place, number) for place, count in seen.counts.items() for number in (1, (count + 1) // 2, count)}
    )
    failed: list[str] = []

    def note(place: Place, number: int, what: str) -> None:
        failed.append(f"{place}, call {number}: {what}")
        print(failed[-1], flush=True)  # `pytest -s` shows it while others are played

    for place, number in choose(faults):
        before = Holdings.now()
        try:
            case.run(Watch(place, number))
        except (AssertionError, Exception) as error:
            note(place, number, f"{type(error).__name__}: {str(error)[:300]}")
        if left := before.more_than_before(8.0):
            note(place, number, f"left behind {left}")
    assert not failed, f"{len(failed)} of {len(faults)}:\n" + "\n".join(failed)


# A fault may come between the making of a coroutine and its task.
never_awaited = pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")


@never_awaited
@pytest.mark.slow  # on a busy machine it takes up to a minute
def test_a_few_calls_fail(make_case: CaseMaker) -> None:
    """In three of all kinds of runs, other ones each time."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")  # shown if it fails; the calls have names and numbers there
    chance = random.Random(seed)
    for kind in chance.sample(KINDS, 3):
        sweep(make_case(kind, chance.choice(list(FACES))), lambda faults: chance.sample(faults, 3))


@never_awaited
@pytest.mark.slow
@pytest.mark.timeout(1800)  # hundreds of runs, and in some kinds of runs workers hang for a while
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize(("kind", "face"), [(kind, face) for kind in KINDS for face in FACES])
def test_each_call_fails(make_case: CaseMaker, kind: str, face: str, part: int) -> None:
    """Each function that the loop thread calls: its first call, one in the middle, and its last."""
    sweep(make_case(kind, face), lambda faults: faults[part::PARTS])


@pytest.mark.parametrize(
    ("kind", "face", "name", "number"),
    [
        ("killed", "for", "executors.Running.__init__", 1),  # the pidfd was copied for it before it was made
        ("killed", "for", "pool.Pool.add", 1),  # the dead worker was taken for its successor, and nobody came
    ],
)
def test_calls_that_once_left_something_behind(
    make_case: CaseMaker, kind: str, face: str, name: str, number: int
) -> None:
    """Found by the tests above, which choose by chance, or run each night."""
    case = make_case(kind, face)
    case.run(Watch())  # what comes with a first run stays
    before = Holdings.now()
    place = Place(name, "call")
    watch = Watch(place, number)
    case.run(watch)
    assert watch.counts[place] == number
    assert not before.more_than_before(8.0)


@pytest.mark.covering(1)
@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("number", [1, 3, 6])
def test_a_broken_scheduler_ends_the_run(
    face: str, number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each consumer is told, with the traceback and what to do."""
    calls = []
    ready = Scheduler.ready

    def broken(self: Scheduler, *args: Any) -> Any:
        calls.append(args)
        if len(calls) >= number:
            raise InjectedError("ready")
        return ready(self, *args)

    case = Case("processes", face, tmp_path)
    loader = make_loader("processes", tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "ready", broken)
        error = case.epoch(loader)
    assert isinstance(error, InternalError)
    assert "please report it" in str(error)
    assert isinstance(error.__cause__, InjectedError)
    traceback = error.__cause__.__traceback__
    names = []
    while traceback is not None:
        names.append(traceback.tb_frame.f_code.co_name)
        traceback = traceback.tb_next
    assert "on_outcomes" in names
    assert names[-1] == "broken"
    assert case.epoch(loader) is None


@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_wakeup_that_fails_has_no_batch_come_twice(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was handed over before the error is given once, in order, and then the error."""
    calls = []
    wake = Handoff.wake

    def broken(self: Handoff[Any]) -> None:
        calls.append(threading.current_thread())
        if calls.count(calls[-1]) == number and calls[-1] is not threading.main_thread():
            raise InjectedError("wake")
        wake(self)

    got = []
    with monkeypatch.context() as patch:
        patch.setattr(Handoff, "wake", broken)
        with contextlib.suppress(InternalError):
            for batch in make_loader("processes", Path()):
                time.sleep(0.002)  # so that the workers are ahead
                got.append(batch.tolist())
    assert got == RIGHT[: len(got)]


def test_whoever_goes_on_after_the_error_comes_to_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not to the end of the epoch: a state says that it is in the middle of it."""

    def broken(self: Scheduler, *args: Any) -> Any:
        raise InjectedError("ready")

    loader = make_loader("processes", Path())
    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "ready", broken)
        iterator = iter(loader)
        with pytest.raises(InternalError):
            next(iterator)
        assert list(iterator) == []
    resumed = make_loader("processes", Path())
    resumed.load_state_dict(iterator.state_dict())
    assert [batch.tolist() for batch in resumed] == RIGHT
