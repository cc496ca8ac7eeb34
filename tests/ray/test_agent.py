"""An agent in this process, and a trainer that is played: what it says, and when it gives up."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from typing import Any

import pytest

from asyncloader.ray import agent as module
from asyncloader.ray.agent import Agent
from asyncloader.ray.handshake import new_secret
from asyncloader.ray.launcher import Order
from asyncloader.ray.wire import SECONDS, Word
from tests.patience import until
from tests.ray.callers import Heard


@pytest.fixture
async def handlers(monkeypatch: pytest.MonkeyPatch) -> dict[int, Callable[[], None]]:
    """Those of signals, which are not set for this process; nor is anything that it does when it forks."""
    noted: dict[int, Callable[[], None]] = {}
    monkeypatch.setattr(asyncio.get_running_loop(), "add_signal_handler", noted.__setitem__)
    monkeypatch.setattr(os, "register_at_fork", lambda **functions: None)
    return noted


@pytest.mark.parametrize("when", ["dialing", "proving itself", "met"])
async def test_one_that_is_to_leave_says_so_however_early_it_was_told(
    trainer: Heard, handlers: dict[int, Any], when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, and after it has said who it is."""
    assert trainer.door is not None
    agent = Agent(asyncio.get_running_loop(), Order(*trainer.door.address, 1, trainer.door.secret, None), None)

    def is_expected(number: int) -> bool:
        if when == "proving itself":
            handlers[signal.SIGTERM]()
        return True

    monkeypatch.setattr(trainer.door, "_is_expected", is_expected)
    running = asyncio.create_task(agent.run())
    if when == "dialing":
        await asyncio.sleep(0)
        assert not trainer.open
        handlers[signal.SIGTERM]()
    await until(lambda: trainer.frames)
    if when == "met":
        handlers[signal.SIGTERM]()
        await until(lambda: len(trainer.frames) == 2)
    trainer.open[0].send(Word.END, 0, SECONDS.pack(0.0))
    await running
    assert [kind for kind, *_ in trainer.frames] == [Word.HELLO, Word.LEAVING]
    assert agent.failure == ""


async def test_one_whose_trainer_says_nothing_gives_up(
    handlers: dict[int, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is connected, as the trainer's kernel takes connections in by itself."""
    monkeypatch.setattr(module, "_DIAL_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        agent = Agent(asyncio.get_running_loop(), Order(*sock.getsockname(), 1, new_secret(), None), None)
        await agent.run()
        assert "the trainer cannot be reached" in agent.failure


async def test_one_that_is_refused_ends(trainer: Heard, handlers: dict[int, Any]) -> None:
    """At once, and says why."""
    assert trainer.door is not None
    agent = Agent(asyncio.get_running_loop(), Order(*trainer.door.address, 1, new_secret(), None), None)
    await agent.run()
    assert "the trainer cannot be reached" in agent.failure
    await until(lambda: trainer.door is not None and trainer.door.refused)
    assert trainer.door.refused == {"wrong secret": 1}
