"""The loop thread: calls from any thread, one for each process, gone when the interpreter exits."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest
import uvloop

from asyncloader import loops
from asyncloader.engine.portal import Portal, get_portal
from asyncloader.errors import LoaderClosedError
from tests.support.nursery import Program

pytestmark = pytest.mark.interpreter


def test_call_gives_the_result() -> None:
    """A function runs on the loop thread; what it returns comes back."""
    portal = get_portal()
    assert portal.call(lambda: (portal.is_here, asyncio.get_running_loop() is portal.loop)).result(5) == (True, True)
    assert not portal.is_here


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), SystemExit(3), asyncio.CancelledError()])
def test_call_gives_what_was_raised(error: BaseException) -> None:
    """Whatever it is, it goes to the caller, and the loop lives on."""
    portal = get_portal()

    def fail() -> None:
        raise error

    future = portal.call(fail)
    assert future.exception(5) is error
    assert portal.call(lambda: 1).result(5) == 1


def test_calls_come_in_order() -> None:
    """What one thread posts runs in the order in which it was posted."""
    portal = get_portal()
    seen: list[int] = []
    for number in range(1000):
        portal.post(seen.append, number)
    portal.call(lambda: None).result(5)
    assert seen == list(range(1000))


def test_there_is_one_for_the_process() -> None:
    """However many threads ask for it at the same time."""
    with ThreadPoolExecutor(8) as threads:
        portals = set(threads.map(lambda _: get_portal(), range(64)))
    assert portals == {get_portal()}


def test_the_loop_thread_blocks_no_signals() -> None:
    """Threads and processes that are started there, by samples among others, would inherit that."""
    blocked = get_portal().call(lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ())).result(5)
    assert blocked == signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("kind", [asyncio, uvloop], ids=["asyncio", "uvloop"])
def test_nothing_that_is_raised_ends_a_loop_that_others_use(kind: Any, error: type[BaseException]) -> None:
    """In a task it is for whoever awaits the task; in a callback, for which nobody waits, it is reported."""
    reported = []

    def fail() -> None:
        raise error("callback")

    async def fail_in_task() -> None:
        raise error("task")

    async def main() -> str:
        running.set_exception_handler(lambda _, context: reported.append(str(context["exception"])))
        running.call_soon(fail)
        await asyncio.sleep(0)  # uvloop forgets the first of two in one turn
        task = running.create_task(fail_in_task())
        await asyncio.wait({task})
        assert isinstance(task.exception(), error)
        return "done"

    with asyncio.Runner(loop_factory=kind.new_event_loop) as runner:
        running = runner.get_loop()
        assert loops.run(runner, main()) == "done"
    assert reported == ["callback"]


def test_a_call_after_the_last_turn_of_the_loop_is_told_that_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop takes it until it is closed, and whoever waits for the answer would wait for ever."""
    late: list[Future[int]] = []

    def run_forever(loop: asyncio.AbstractEventLoop) -> None:
        loops.run_forever(loop)
        late.append(portal.call(os.getpid))

    monkeypatch.setattr("asyncloader.engine.portal.run_forever", run_forever)
    portal = Portal()
    portal.close()
    in_time, too_late = late
    assert in_time.result(5) == os.getpid()
    with pytest.raises(LoaderClosedError, match="exiting"):
        too_late.result(5)


def test_a_task_that_goes_on_though_it_is_cancelled_does_not_keep_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dataset may have begun it, and never awaited it."""

    async def go_on() -> None:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)

    monkeypatch.setattr("asyncloader.engine.portal._CANCELLED_WITHIN_S", 0.01)
    portal = Portal()
    task: Any = portal.call(lambda: portal.loop.create_task(go_on())).result(5)
    task._log_destroy_pending = False
    portal.close()
    assert portal.loop.is_closed()


def _interrupted_where_a_lock_is_taken(call: Callable[[], object]) -> int:
    """Raise KeyboardInterrupt where the function that takes a future's lock returns; return how often that was."""
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        if frame.f_code is threading.Condition.__enter__.__code__ and event == "return":
            count += 1
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with contextlib.suppress(KeyboardInterrupt, TimeoutError):
            call()
    finally:
        sys.settrace(before)
    return count


def test_an_interrupt_leaves_no_lock_held_that_the_loop_takes() -> None:
    """The loop stood still for all loaders of the process: a future's lock is taken by a function of Python."""
    gate = threading.Event()
    plain: Future[None] = Future()
    assert _interrupted_where_a_lock_is_taken(lambda: plain.result(0)) == 1  # what would happen
    portal = get_portal()
    answer = portal.call(gate.wait)
    assert _interrupted_where_a_lock_is_taken(lambda: answer.result(0.01)) == 0
    assert _interrupted_where_a_lock_is_taken(lambda: portal.call(os.getpid)) == 0
    gate.set()
    assert answer.result(5)
    assert portal.call(os.getpid).result(5) == os.getpid()


def test_closing_ends_the_thread_and_the_loop() -> None:
    """A closed portal refuses; closing twice is fine."""
    portal = Portal()
    assert portal.call(os.getpid).result(5) == os.getpid()
    portal.close()
    portal.close()
    assert portal.loop.is_closed()
    assert threading.active_count() >= 1
    with pytest.raises(RuntimeError, match="exiting"):
        portal.post(print)


WITH_OR_WITHOUT = """
import asyncio, sys
{absent}
import torch
from asyncloader import DataLoader
from asyncloader.engine.portal import get_portal

class Awaited(torch.utils.data.Dataset):
    def __len__(self): return 4
    async def __getitem__(self, index):
        await asyncio.sleep(0)
        return torch.tensor([index]), type(asyncio.get_running_loop()).__module__.split(".")[0]

async def taken(loader):
    return [batch async for batch in loader]

loader = DataLoader(Awaited(), batch_size=2, num_workers=2)
for batches in (list(loader), asyncio.run(taken(loader))):
    assert torch.cat([numbers for numbers, _ in batches]).flatten().tolist() == [0, 1, 2, 3]
    assert {{name for _, names in batches for name in names}} == {{"{name}"}}
assert type(get_portal().loop).__module__.split(".")[0] == "{name}"
"""


@pytest.mark.parametrize(("name", "absent"), [("uvloop", ""), ("asyncio", "sys.modules['uvloop'] = None")])
def test_with_and_without_uvloop(run: Callable[..., Program], name: str, absent: str) -> None:
    """Where uvloop does not exist for the interpreter, asyncio's loop serves the portal and the workers."""
    done = run(WITH_OR_WITHOUT.format(name=name, absent=absent))
    assert (done.returncode, done.err) == (0, "")


LEAVES_A_TASK = """
import asyncio
from asyncloader import DataLoader

class Leaving:
    def __len__(self):
        return 8

    async def __getitem__(self, index):
        if not index:
            self.tasks = [asyncio.create_task(self.watch()) for _ in range(3)]
            await asyncio.sleep(0)
        return index

    async def watch(self):
        try:
            await asyncio.sleep(1000)
        finally:
            print("cancelled")

print([len(batch) for batch in DataLoader(Leaving(), 4)])
"""


def test_tasks_that_a_dataset_leaves_behind_are_cancelled_at_the_end(run: Callable[..., Program]) -> None:
    """They end as `asyncio.run` would have them end; nothing is destroyed while it is pending."""
    done = run(LEAVES_A_TASK)
    assert (done.out.split("\n"), done.err) == (["[4, 4]", *["cancelled"] * 3, ""], "")
