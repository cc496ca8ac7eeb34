"""What a step of the pool costs must not depend on how many workers there are. Operations are counted, not timed."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

import asyncloader
from asyncloader.engine.roster import Roster
from asyncloader.engine.workforce import Workforce
from asyncloader.messages.messages import EpochSpec
from asyncloader.ray import fleet as module
from asyncloader.ray.launcher import Access
from asyncloader.ray.pool import RemotePool
from asyncloader.ray.rooms import Place, find_rooms
from asyncloader.ray.wire import Word
from asyncloader.worker.guarded_loop import GuardedLoop
from tests import deciders
from tests.ray.test_places import SPEC, Launcher, Line, close, come

HERE = str(Path(asyncloader.__file__).parent)


async def operations(step: Callable[[], object]) -> int:
    """Return how many bytecodes of the package a step takes, with what it has the loop do next."""
    count = 0

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(HERE):
            return None
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        step()
        await asyncio.sleep(0)
    finally:
        sys.settrace(before)
    return count


class Left:
    """Notes which workers are to leave."""

    def __init__(self) -> None:
        self.told: list[int] = []

    def on_left(self, worker: int) -> None:
        self.told.append(worker)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: None


@pytest.fixture(params=["many agents", "one agent"])
async def make(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Callable[[int], tuple[RemotePool, list[Line]]]]:
    """Return what makes a pool with so many workers, at agents of one each or all at one, and their connections."""
    monkeypatch.setattr(module, "_BEAT_S", 3600.0)  # each agent is asked then whether it is there
    made: list[RemotePool] = []

    def pool(num_workers: int) -> tuple[RemotePool, list[Line]]:
        made.append(pool := RemotePool(GuardedLoop(asyncio.get_running_loop()), SPEC, Access(), Launcher(), 2))
        pool.listener = Left()  # type: ignore[assignment]
        assert list(pool.start(EpochSpec(0, (0, 0, 0)), lambda: None)) == []
        sizes = [1] * num_workers if request.param == "many agents" else [num_workers]
        return pool, [come(pool, size) for size in sizes]

    yield pool
    for each in made:
        await close(each)


async def steps(pool: RemotePool, lines: list[Line]) -> dict[str, int]:
    """Return by its name what each step costs."""
    life, worker = list(lines[-1].added().items())[-1]

    def replace() -> None:
        pool.discard(worker)
        pool.add(worker, 1)

    await operations(replace)  # Python 3.12 counts nothing in the first call that it traces by instructions
    costs = {
        "a frame comes": await operations(lambda: lines[-1].answer(life, 5)),
        "a pong comes": await operations(lambda: lines[-1].say(Word.PONG, 0, bytes(16))),
        "an agent comes": await operations(lambda: come(pool, 1)),
        "a worker is replaced": await operations(replace),
    }
    pool.want(len(pool.processes) - 2)
    left: Any = pool.listener
    costs["a worker has left"] = await operations(lambda: pool.dismiss(left.told.pop(), 0.0))
    pool.want(None)
    costs["another comes in its place"] = await operations(lambda: pool.dismiss(left.told.pop(), 0.0))
    return costs


async def test_no_step_costs_more_with_more_workers(make: Any) -> None:
    """With a thousand as with ten: but for workers of an agent that is lost, and where their number is changed."""
    few, many = await steps(*make(10)), await steps(*make(1000))
    assert min(few.values()) > 10
    assert {name: cost for name, cost in many.items() if cost > 1.2 * few[name]} == {}, few


async def test_a_worker_that_leaves_costs_the_workforce_no_more_with_more_workers() -> None:
    """One look at all of them for each of a thousand that leave would be a million."""

    async def cost(num_workers: int) -> int:
        workforce, roster = Workforce(deciders.options(num_at_start=num_workers)), Roster(num_workers, 0)

        def leave() -> None:
            workforce.leave(num_workers - 1, roster)

        return await operations(leave)

    assert await cost(1000) == await cost(10)


async def test_rooms_in_a_cluster_are_found_in_one_pass() -> None:
    """Each place is looked at once, not once for each that was found before."""

    async def cost(count: int) -> int:
        free = {Place(f"{number:04}"): {"CPU": 2.0} for number in range(count)}
        return await operations(lambda: find_rooms(free, {"CPU": 1.0}, 2 * count, "here"))

    assert await cost(1000) < 150 * await cost(10)
