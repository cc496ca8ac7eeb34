"""Ctrl-C and SIGTERM: for the trainer, at once and once; workers say nothing about it."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
from collections.abc import Callable

import pytest

from tests.faults.programs import HUNG, NUMBERS, assert_within, end_alone, seconds_after
from tests.support.nursery import Program

pytestmark = pytest.mark.interpreter

Start = Callable[..., Program]

LOOPS = {
    "for": """
def train(loader, body=lambda batch: None):
    for batch in loader:
        body(batch)
""",
    "async for, asyncio": """
def train(loader, body=lambda batch: None):
    async def main():
        async for batch in loader:
            body(batch)
            await asyncio.sleep(0)
    asyncio.run(main())
""",
    "async for, uvloop": """
import uvloop
def train(loader, body=lambda batch: None):
    async def main():
        async for batch in loader:
            body(batch)
            await asyncio.sleep(0)
    uvloop.run(main())
""",
}


def interrupt(program: Program, everybody: bool) -> None:
    """Send SIGINT as a terminal does, to the foreground group; or as some job schedulers do, to every process."""
    if everybody:
        for pid in program.family():
            with contextlib.suppress(ProcessLookupError):  # the trainer, which was first, has ended it since
                os.kill(pid, signal.SIGINT)
    else:
        os.killpg(program.pid, signal.SIGINT)


@pytest.mark.covering(2)
@pytest.mark.parametrize(
    "everybody", [pytest.param(False, id="group"), pytest.param(True, id="every process", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_ctrl_c_while_waiting(start: Start, loop: str, num_workers: int, everybody: bool) -> None:
    """KeyboardInterrupt in the loop, at once, and one traceback if nobody catches it."""
    if num_workers == 0 and loop != "for":
        pytest.skip("the thread that fetches goes on sleeping, as any thread")
    main = f"""
loader = DataLoader(Hung("sleep"), batch_size=4, num_workers={num_workers})
try:
    train(loader)
except KeyboardInterrupt:
    print("interrupted", time.monotonic(), flush=True)
    raise
"""
    program = start(NUMBERS + HUNG + LOOPS[loop] + main)
    program.read_until("hung")
    interrupt(program, everybody)
    program.wait()
    assert program.returncode == -signal.SIGINT
    assert program.out.count("interrupted") == 1
    assert program.err.endswith("KeyboardInterrupt\n")
    assert "serve.py" not in program.err
    assert not re.search(r"^Process ", program.err, re.MULTILINE)  # as multiprocessing tells of a worker
    if loop == "for":
        assert program.err.count("Traceback") == 1
    assert program.survivors(2.0) == {}


@pytest.mark.parametrize("loop", LOOPS)
def test_ctrl_c_is_prompt(start: Start, run: Start, loop: str) -> None:
    """The loop is left within 0.2 s, and the program has ended 3 s later, though its workers hang."""
    main = """
loader = DataLoader(Hung("interpreter's lock held"), batch_size=4, num_workers=2)
from tests.support.patience import Stopwatch
def interrupt(*_):
    global watch
    watch = Stopwatch()
    os.killpg(0, signal.SIGINT)
signal.signal(signal.SIGUSR1, interrupt)
try:
    train(loader)
except KeyboardInterrupt:
    took_s = watch.seconds()
    say("caught")
    print("took", took_s, flush=True)
"""

    def attempt() -> float:
        program = start(NUMBERS + HUNG + LOOPS[loop] + main)
        program.read_until("hung")
        os.kill(program.pid, signal.SIGUSR1)
        assert program.wait() == 0, program.explain("failed")
        assert program.err == ""
        ended = seconds_after(program, "caught")
        assert ended < 6.0 or ended - end_alone(run) < 6.0
        (took,) = (line for line in program.out.splitlines() if line.startswith("took"))  # workers say something too
        return float(took.removeprefix("took"))

    assert_within(0.2, attempt)


@pytest.mark.parametrize("loop", LOOPS)
def test_ctrl_c_in_the_body(start: Start, loop: str) -> None:
    """Nothing is special about an interrupt between two batches."""
    main = """
def body(batch):
    print("body", flush=True)
    time.sleep(1)
train(DataLoader(Slow(), batch_size=4, num_workers=2), body)
"""
    program = start(NUMBERS + LOOPS[loop] + main)
    program.read_until("body")
    interrupt(program, everybody=True)
    assert program.wait() == -signal.SIGINT
    assert program.err.count("\nKeyboardInterrupt\n") == 1
    assert "serve.py" not in program.err
    assert not re.search(r"^Process ", program.err, re.MULTILINE)  # as multiprocessing tells of a worker
    assert program.survivors(2.0) == {}


def test_ctrl_c_at_any_moment(start: Start) -> None:
    """However often, and wherever it hits: the loader goes on, in order, and an interrupt costs one batch at most."""
    main = """
loader = DataLoader(Numbers(4000), batch_size=4, num_workers=2)
interrupts, seen = 0, []
iterator = iter(loader)
print("begun", flush=True)
while True:
    try:
        for batch in iterator:
            seen += batch.tolist()
        break
    except KeyboardInterrupt:
        interrupts += 1
signal.signal(signal.SIGINT, signal.SIG_IGN)
assert seen == sorted(set(seen)), seen
print("interrupts", interrupts, "lost", (4000 - len(seen)) // 4)
"""
    chance = random.Random(5)
    program = start(NUMBERS + main)
    program.read_until("begun")
    while program.survivors(chance.random() * 0.01):
        with contextlib.suppress(ProcessLookupError):
            os.kill(program.pid, signal.SIGINT)
    if program.wait() == -signal.SIGINT:  # after the loop, before it was ignored
        return
    assert program.returncode == 0, program.explain("failed")
    words = program.out.split()
    assert int(words[4]) <= int(words[2])
    assert program.survivors(2.0) == {}


def test_ctrl_c_during_the_start(start: Start) -> None:
    """While workers are started: KeyboardInterrupt, and no worker is left."""
    main = """
def go(signum, frame):
    raise KeyboardInterrupt
list(DataLoader(Numbers(), num_workers=2))  # imports all: an interrupted import leaves a file to the garbage collector
signal.signal(signal.SIGALRM, go)
import sys
dropped = []  # Python drops what is raised in the callback of a weak reference, as a WeakSet of its own has one
sys.unraisablehook = lambda raised: dropped.append((raised.exc_type, getattr(raised.object, "__qualname__", "")))
interrupts = 0
for delay in range(1, 25):
    try:
        signal.setitimer(signal.ITIMER_REAL, delay / 1000)
        iterator = iter(DataLoader(Slow(), num_workers=2))
        time.sleep(0.1)
    except KeyboardInterrupt:
        interrupts += 1
    iterator = None
assert set(dropped) <= {(KeyboardInterrupt, "WeakSet.__init__.<locals>._remove")}, dropped
assert interrupts + len(dropped) == 24
import psutil
while psutil.Process().children():
    time.sleep(0.01)
print(list(map(int, DataLoader(Numbers(), num_workers=2))) == list(range(40)))
"""
    program = start(NUMBERS + main)
    assert program.wait() == 0, program.explain("failed")
    assert (program.out, program.err) == ("True\n", "")
    assert program.survivors(2.0) == {}


@pytest.mark.parametrize("handler", ["asyncio", "signal"])
def test_sigterm_to_a_worker_is_not_the_trainers(start: Start, handler: str) -> None:
    """A worker inherits neither the trainer's handlers nor its wake-up descriptor; it dies, and is replaced."""
    main = f"""
async def main():
    def say(*_):
        print("handler", flush=True)
    if {handler!r} == "asyncio":
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, say)
    else:
        signal.signal(signal.SIGTERM, say)
    seen = []
    iterator = aiter(DataLoader(Slow(), batch_size=4, num_workers=2))
    async for batch in iterator:
        seen += batch.tolist()
        if len(seen) == 8:
            for worker in iterator._workers:
                os.kill(worker.pid, signal.SIGTERM)
        await asyncio.sleep(0)
    print(seen == list(range(40)), flush=True)
import logging
logging.getLogger("asyncloader").setLevel(logging.ERROR)
asyncio.run(main())
"""
    program = start(NUMBERS + main)
    assert program.wait() == 0, program.explain("failed")
    assert (program.out, program.err) == ("True\n", "")


def test_sigterm_to_the_trainer_runs_its_handler(start: Start) -> None:
    """A trainer that ends itself orderly on SIGTERM (as under Slurm) can: workers do not get in its way."""
    main = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
for batch in DataLoader(Slow(4000), batch_size=4, num_workers=2):
    print("batch", flush=True)
"""
    program = start(NUMBERS + main)
    program.read_until("batch")
    os.kill(program.pid, signal.SIGTERM)
    assert program.wait() == 9
    assert program.err == ""
    assert program.survivors(2.0) == {}
