"""Clocks of other machines, and workers there that are asked where they are."""

from __future__ import annotations

import asyncio

import pytest

from asyncloader.ray.wire import Death
from asyncloader.ray.worker import Clock, RemoteAgent, RemoteWorker


def test_the_quickest_round_trip_says_how_far_ahead_a_clock_is() -> None:
    """One that was held up on one of its ways is off by as much."""
    clock = Clock()
    clock.note(10.0, 110.5, 11.0)
    assert clock.ahead_s == pytest.approx(100.0)
    clock.note(20.0, 121.8, 22.0)  # slow: not believed
    assert clock.ahead_s == pytest.approx(100.0)
    clock.note(30.0, 130.06, 30.1)
    assert clock.ahead_s == pytest.approx(100.01)


def test_a_clock_that_drifts_is_followed() -> None:
    """Though no round trip is as quick as the first was."""
    clock = Clock()
    clock.note(0.0, 50.0005, 0.001)
    for second in range(100):
        clock.note(float(second), second + 51.0, second + 0.002)
    assert clock.ahead_s == pytest.approx(50.999)


async def test_who_asks_where_a_worker_is_gets_an_answer_in_any_case() -> None:
    """Its stack, with its node; nothing of one that is not ready, or has gone meanwhile."""
    agent = RemoteAgent(1, [4])
    agent.node = "n1"
    worker = RemoteWorker(4, 1, agent, asyncio.get_running_loop())
    told: list[str] = []
    worker.ask_stack(0, told.append)
    assert told == [""]
    worker.is_ready = True
    worker.ask_stack(0, told.append)
    worker.ask_stack(1, told.append)
    worker.on_awaits("line 1")
    assert told[1:] == ["on node n1:\nline 1"] * 2
    worker.ask_stack(2, told.append)
    worker.on_died(Death(-9, b"words", was_set_up=True))
    assert told[3:] == [""]
    assert worker.output == b"On node n1. words"
    assert not worker.is_alive
