"""Who knocks at the trainer's door: strangers of all kinds, and agents; real connections, on both kinds of loops."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

import pytest
import uvloop

from asyncloader.errors import WorkerStartError
from asyncloader.messages.messages import HEADER
from asyncloader.observe.traffic import Traffic
from asyncloader.ray import door as module
from asyncloader.ray.door import Door
from asyncloader.ray.handshake import new_secret
from asyncloader.ray.launcher import MakeContext
from asyncloader.ray.wire import Word, frame
from asyncloader.worker.guarded_loop import GuardedLoop
from tests import inside
from tests.patience import until
from tests.ray.callers import Heard, dial, gone, knock, leave


async def test_an_agent_comes_in_and_frames_go_both_ways(trainer: Heard) -> None:
    agent = await dial(trainer)
    await until(lambda: agent.open and trainer.open)
    large = b"x" * (5 << 20)
    agent.open[0].send_large(17, 1, [b"body"], [memoryview(large), memoryview(b"small")])
    trainer.open[0].send(6, 2, b"answer")
    await until(lambda: agent.frames and trainer.frames)
    assert trainer.frames == [(17, b"body", [large, b"small"])]
    assert agent.frames == [(6, b"answer", [])]
    assert [trainer.open[0].beat() for _ in range(3)] == [0, 1, 2]
    agent.open[0].close()
    await until(lambda: trainer.lost and agent.lost)
    assert trainer.lost == ["its connection ended"]
    assert trainer.door is not None
    assert not trainer.door.refused


async def test_agents_without_the_secret_or_a_number_that_is_expected(trainer: Heard) -> None:
    """Are turned away and counted, and get no proof of the trainer."""
    for secret, number in ((new_secret(), 1), (None, 2)):
        agent = await dial(trainer, secret, number)
        await until(lambda agent=agent: agent.lost)  # type: ignore[misc]
        assert not agent.open
    assert trainer.door is not None
    assert trainer.door.refused == {"wrong secret": 1, "not expected": 1}
    assert not trainer.open


async def test_garbage_is_dropped(trainer: Heard) -> None:
    """As soon as there is as much of it as of a proof."""
    writer = await knock(trainer, b"GET / HTTP/1.1\r\nHost: trainer\r\n\r\n" * 10)
    assert trainer.door is not None
    await until(lambda: trainer.door is not None and trainer.door.refused)
    assert trainer.door.refused == {"no agent": 1}
    await leave(writer)


async def test_who_is_slow_is_dropped(trainer: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who sends a byte now and then as well as who says nothing."""
    monkeypatch.setattr(module, "PROOF_S", 0.05)
    writers = [await knock(trainer, data) for data in (b"a", b"")]
    assert trainer.door is not None
    await until(lambda: trainer.door is not None and trainer.door.refused.total() == 2)
    assert trainer.door.refused == {"too slow": 2}
    for writer in writers:
        await leave(writer)


async def test_who_hangs_up_is_counted(trainer: Heard) -> None:
    await leave(await knock(trainer, b""))
    await until(lambda: trainer.door is not None and trainer.door.refused)
    assert trainer.door is not None
    assert trainer.door.refused == {"its connection ended": 1}


async def test_strangers_with_ever_other_reasons_keep_no_memory(trainer: Heard) -> None:
    """Reasons are texts, of errors among others: only so many of them are counted by themselves, and logged."""
    door = trainer.door
    assert door is not None
    for number in range(100):
        stranger: Any = asyncio.get_running_loop().create_future()
        stranger.set_result(f"reason {number % 50}")
        inside.end_stranger(door, stranger)
    assert door.refused["reason 1"] == 2
    assert door.refused["another reason"] == 36
    assert len(door.refused) == 33


async def test_many_at_once_do_not_keep_memory(trainer: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are more than so many strangers the oldest of them are turned away."""
    monkeypatch.setattr(module, "_MOST_STRANGERS", 3)
    writers = [await knock(trainer, b"") for _ in range(5)]
    assert trainer.door is not None
    await until(lambda: trainer.door is not None and trainer.door.refused["too many at once"] == 2)
    for writer in writers:
        await leave(writer)


@pytest.mark.parametrize(
    ("sent", "why"),
    [(HEADER.pack(1 << 50, 1), "no frame"), (frame(Word.BYE)[0], "none of theirs"), (HEADER.pack(8, 99), "no frame")],
)
async def test_an_agent_that_sends_what_is_no_frame_is_dropped(trainer: Heard, sent: bytes, why: str) -> None:
    agent = await dial(trainer)
    await until(lambda: agent.open)
    inside.transport(agent.open[0]).write(sent)
    await until(lambda: trainer.lost)
    assert why in trainer.lost[0]


async def test_large_frames_are_counted_while_they_are_on_their_way(trainer: Heard) -> None:
    """Not small ones, which come in one piece; and one whose connection breaks ends with it."""
    assert trainer.door is not None
    traffic = trainer.traffic = Traffic()
    agent = await dial(trainer)
    await until(lambda: agent.open and trainer.open)
    agent.open[0].send(6, 2, b"small")
    await until(lambda: len(trainer.frames) == 1)
    assert traffic.received.nbytes == 0
    large = memoryview(bytes(5 << 20))
    agent.open[0].send_large(17, 1, [b"body"], [large])
    await until(lambda: len(trainer.frames) == 2)
    received = traffic.received
    assert len(large) <= received.nbytes <= len(large) + 100
    assert 1.001 * received.seconds >= received.cpu_s >= 0  # the system may set one clock by 0.05 %
    head, _ = frame(17, 1, [b"body"], [large])
    inside.transport(agent.open[0]).write(head + large[:1000])
    await until(lambda: inside.frames_underway(traffic))
    agent.open[0].drop("enough")
    await until(lambda: trainer.lost)
    assert inside.frames_underway(traffic) == 0
    assert traffic.received.nbytes == received.nbytes + len(head) + 1000


async def test_what_dealing_with_a_frame_raises_is_told(trainer: Heard) -> None:
    """To whoever guards the loop: it is a bug of ours, which ends the run; nobody is there in this test."""
    told: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context["exception"]))
    agent = await dial(trainer)
    await until(lambda: agent.open)
    agent.open[0].send(Word.FAILED)
    await until(lambda: told)
    assert isinstance(told[0], KeyError)


async def test_a_port_that_is_taken_is_said(trainer: Heard) -> None:
    assert trainer.door is not None
    other = Door(GuardedLoop(asyncio.get_running_loop()), trainer.is_expected, trainer.on_open)
    with pytest.raises(WorkerStartError, match="cannot listen"):
        other.open(*trainer.door.address, None)
    other.close()


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("turns", range(4))
def test_a_door_that_closes_says_nothing_and_listens_no_more(new_loop: Any, turns: int) -> None:
    """However far the server has come by then, on any loop."""
    told: list[Any] = []

    async def open_and_close() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: told.append(context))
        heard = Heard()
        door = heard.door = Door(GuardedLoop(loop), heard.is_expected, heard.on_open)
        door.open("127.0.0.1", 0, None)
        address = door.address
        for _ in range(turns):
            await asyncio.sleep(0)
        door.close()
        door.close()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*address)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(open_and_close())
    assert told == []


async def test_frames_cross_tls(make_context: MakeContext) -> None:
    """Frames cross."""
    heard = Heard()
    door = heard.door = Door(GuardedLoop(asyncio.get_running_loop()), heard.is_expected, heard.on_open)
    heard.context = make_context(ssl.Purpose.SERVER_AUTH)
    door.open("127.0.0.1", 0, make_context)
    agent = await dial(heard)
    await until(lambda: agent.open and heard.open)
    assert agent.open[0].peer == "{}:{}".format(*door.address)
    large = b"x" * (1 << 20)
    agent.open[0].send_large(17, 1, [b"body"], [memoryview(large)])
    await until(lambda: heard.frames)
    assert heard.frames == [(17, b"body", [large])]
    agent.open[0].drop("enough")
    await until(lambda: heard.lost)
    door.close()
    await gone(*agent.open, *heard.open)
