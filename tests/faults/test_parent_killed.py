"""The trainer is killed with SIGKILL: its workers go as well, and what they have started, whatever they are at."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from tests.faults.programs import HUNG, NUMBERS
from tests.support.nursery import Program

MAIN = """
if __name__ == "__main__":
    loader = DataLoader(Hung(sys.argv[1]), batch_size=4, num_workers=2, multiprocessing_context=sys.argv[2])
    for _ in loader:
        pass
"""

WAYS = ["sleep", "busy", "interpreter's lock held", "a loop that swallows everything", "a child"]
SLOW_METHODS = [pytest.param(method, marks=pytest.mark.slow) for method in ("forkserver", "spawn")]


@pytest.mark.covering(1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("method", ["fork", *SLOW_METHODS])
def test_workers_go_with_a_killed_trainer(start: Callable[..., Program], method: str, way: str) -> None:
    """Within 2 s nothing is left, neither workers nor their children, also where the interpreter's lock is held."""
    program = start(NUMBERS + HUNG + MAIN, way, method)
    program.read_until("hung")
    assert len(program.family()) > 1
    os.kill(program.pid, signal.SIGKILL)
    assert program.wait() == -signal.SIGKILL
    assert program.survivors(2.0) == {}


@pytest.mark.parametrize("delay_ms", [0, 10, 30, 60])
def test_workers_go_with_a_trainer_killed_while_they_start(start: Callable[..., Program], delay_ms: int) -> None:
    """At any moment of the start: a worker that comes up later finds that it is alone."""
    main = """
print("starting", flush=True)
iterators = [iter(DataLoader(Slow(), num_workers=2)) for _ in range(3)]
time.sleep(60)
"""
    program = start(NUMBERS + main)
    program.read_until("starting")
    signal.sigtimedwait([], delay_ms / 1000)
    os.kill(program.pid, signal.SIGKILL)
    assert program.wait() == -signal.SIGKILL
    assert program.survivors(2.0) == {}


def test_a_fork_of_the_trainer_does_not_keep_workers_alive(start: Callable[..., Program]) -> None:
    """A child of the trainer that lives on after it holds no end of the workers' connections."""
    main = """
import multiprocessing
iterator = iter(DataLoader(Hung("sleep"), batch_size=4, num_workers=2))
next(iterator)
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
child.start()
other = iter(DataLoader(Hung("sleep"), batch_size=4, num_workers=1))
print("child", child.pid, flush=True)
time.sleep(60)
"""
    program = start(NUMBERS + HUNG + main)
    program.read_until("child")
    (line,) = [line for line in program.out.splitlines() if line.startswith("child")]
    child = int(line.split()[1])
    os.kill(program.pid, signal.SIGKILL)
    program.wait()
    deadline_s = 2.0
    while len(program.family()) > 1 and deadline_s > 0:
        signal.sigtimedwait([], 0.02)
        deadline_s -= 0.02
    assert set(program.family()) == {child}


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP, signal.SIGABRT, signal.SIGSEGV])
def test_workers_go_with_a_trainer_that_dies_by_a_signal(start: Callable[..., Program], signum: int) -> None:
    """A signal for which nobody has a handler ends the trainer at once, without any exit hook."""
    program = start(NUMBERS + HUNG + MAIN, "busy", "fork")
    program.read_until("hung")
    os.kill(program.pid, signum)
    assert program.wait() == -signum
    assert program.survivors(2.0) == {}
