"""Who knocks at the trainer's door: strangers of all kinds, and agents; real connections, on both kinds of loops."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from asyncloader import WorkerStartError
from asyncloader.observe.traffic import Traffic
from asyncloader.workers.protocol.frames import BadFrame
from asyncloader.workers.remote import door as module
from asyncloader.workers.remote import link as link_module
from asyncloader.workers.remote.door import Door
from asyncloader.workers.remote.handshake import agent_side, new_secret
from asyncloader.workers.remote.link import Link
from asyncloader.workers.remote.wire import _HEAD, Frame, frame
from tests.patience import until


class Heard:
    """The owner of links, on either side: notes what is told."""

    def __init__(self) -> None:
        self.open: list[Link] = []
        self.frames: list[Any] = []
        self.lost: list[str] = []
        self.door: Door | None = None

    def on_open(self, link: Link) -> None:
        self.open.append(link)
        if self.door is not None:
            self.door.came_in(link)

    def on_frame(self, link: Link, frame: Frame) -> None:
        if frame.kind == 99:
            raise BadFrame("99")
        if frame.kind == 98:
            raise KeyError("98")
        self.frames.append((frame.kind, bytes(frame.body), [bytes(buffer) for buffer in frame.buffers]))

    def on_lost(self, link: Link, why: str) -> None:
        self.lost.append(why)
        if self.door is not None:
            self.door.went_away(link, why)


def allocate(nbytes: int) -> memoryview:
    return memoryview(bytearray(nbytes))


@pytest.fixture
async def trainer() -> AsyncIterator[Heard]:
    """A door that is open; agents of number 1 may come in."""
    heard = Heard()
    heard.door = Door(asyncio.get_running_loop(), heard, lambda link, number: number == 1, allocate)
    heard.door.open("127.0.0.1", 0, None)
    yield heard
    heard.door.close()
    for link in heard.open:
        link.drop("the test is over")
    await asyncio.sleep(0.01)


async def dial(trainer: Heard, secret: bytes | None = None, number: int = 1, context: Any = None) -> Heard:
    """Knock as an agent."""
    assert trainer.door is not None
    agent, loop = Heard(), asyncio.get_running_loop()
    secret = secret or trainer.door.secret

    def prove(link: Link, send: Any) -> Any:
        return agent_side(secret, send, number)

    host, port = trainer.door.address
    make = functools.partial(Link, agent, loop, prove, allocate)
    await loop.create_connection(make, host, port, ssl=context, server_hostname="localhost" if context else None)
    return agent


async def knock(trainer: Heard, data: bytes) -> asyncio.StreamWriter:
    """Knock as a stranger, and say something."""
    assert trainer.door is not None
    reader, writer = await asyncio.open_connection(*trainer.door.address)
    writer.write(data)
    trainer.__dict__.setdefault("readers", []).append(reader)
    return writer


async def leave(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def test_an_agent_comes_in_and_frames_go_both_ways(trainer: Heard) -> None:
    agent = await dial(trainer)
    await until(lambda: agent.open and trainer.open)
    large = b"x" * (5 << 20)
    agent.open[0].send_large(7, 1, [b"body"], [memoryview(large), memoryview(b"small")])
    trainer.open[0].send(8, 2, b"answer")
    await until(lambda: agent.frames and trainer.frames)
    assert trainer.frames == [(7, b"body", [large, b"small"])]
    assert agent.frames == [(8, b"answer", [])]
    assert trainer.open[0].has_heard
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
    await until(lambda: trainer.lost)
    assert trainer.door.refused == {"no agent": 1}
    await leave(writer)


async def test_who_is_slow_is_dropped(trainer: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who sends a byte now and then as well as who says nothing."""
    monkeypatch.setattr(link_module, "PROOF_S", 0.05)
    writers = [await knock(trainer, data) for data in (b"a", b"")]
    await until(lambda: len(trainer.lost) == 2)
    assert trainer.door is not None
    assert trainer.door.refused == {"too slow": 2}
    for writer in writers:
        await leave(writer)


async def test_who_hangs_up_is_counted(trainer: Heard) -> None:
    await leave(await knock(trainer, b""))
    await until(lambda: trainer.lost)
    assert trainer.door is not None
    assert sum(trainer.door.refused.values()) == 1


async def test_many_at_once_do_not_keep_memory(trainer: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than so many strangers are turned away at once; those before them are not."""
    monkeypatch.setattr(module, "_MOST_STRANGERS", 3)
    writers = [await knock(trainer, b"") for _ in range(5)]
    assert trainer.door is not None
    await until(lambda: trainer.door is not None and trainer.door.refused["too many at once"] == 2)
    assert len(trainer.lost) == 2
    for writer in writers:
        await leave(writer)


@pytest.mark.parametrize(
    ("sent", "why"),
    [(_HEAD.pack(1, 0, 0, 1 << 50), "no frame"), (_HEAD.pack(99, 0, 0, 0), "no frame")],
)
async def test_an_agent_that_sends_what_is_no_frame_is_dropped(trainer: Heard, sent: bytes, why: str) -> None:
    agent = await dial(trainer)
    await until(lambda: agent.open)
    agent.open[0]._transport.write(sent)
    await until(lambda: trainer.lost)
    assert why in trainer.lost[0]


async def test_large_frames_are_counted_while_they_are_on_their_way(trainer: Heard) -> None:
    """Not small ones, which come in one piece; and one whose connection breaks ends with it."""
    assert trainer.door is not None
    traffic = trainer.door._traffic = Traffic()
    agent = await dial(trainer)
    await until(lambda: agent.open and trainer.open)
    agent.open[0].send(8, 2, b"small")
    await until(lambda: len(trainer.frames) == 1)
    assert traffic.received.nbytes == 0
    large = memoryview(bytes(5 << 20))
    agent.open[0].send_large(7, 1, [b"body"], [large])
    await until(lambda: len(trainer.frames) == 2)
    received = traffic.received
    assert len(large) <= received.nbytes <= len(large) + 100
    assert 1.001 * received.seconds >= received.cpu_s >= 0  # the system may set one clock by 0.05 %
    head, _ = frame(7, 1, [b"body"], [large])
    agent.open[0]._transport.write(head + large[:1000])
    await until(lambda: traffic._open)
    agent.open[0].drop("enough")
    await until(lambda: trainer.lost)
    assert traffic._open == 0
    assert traffic.received.nbytes == received.nbytes + len(head) + 1000


async def test_an_error_over_one_frame_costs_none_behind_it(trainer: Heard) -> None:
    """It goes to the loop's handler of exceptions."""
    told: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context["exception"]))
    agent = await dial(trainer)
    await until(lambda: agent.open)
    agent.open[0].send(98)
    agent.open[0].send(5, 0, b"next")
    await until(lambda: trainer.frames)
    assert trainer.frames == [(5, b"next", [])]
    assert isinstance(told[0], KeyError)


async def test_a_port_that_is_taken_is_said(trainer: Heard) -> None:
    assert trainer.door is not None
    other = Door(asyncio.get_running_loop(), trainer, lambda link, number: True, allocate)
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
        door = heard.door = Door(loop, heard, lambda link, number: True, allocate)
        door.open("127.0.0.1", 0, None)
        address = door.address
        for _ in range(turns):
            await asyncio.sleep(0)
        door.close()
        door.close()
        await asyncio.sleep(0.01)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*address)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(open_and_close())
    assert told == []


async def test_with_tls(tmp_path: Path) -> None:
    """Frames cross, and who does not speak it is dropped."""
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    )
    subprocess.run([*command.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)  # noqa: ASYNC221

    def make_context(purpose: ssl.Purpose) -> ssl.SSLContext:
        context = ssl.create_default_context(purpose, cafile=str(certificate))
        if purpose is ssl.Purpose.CLIENT_AUTH:
            context.load_cert_chain(certificate, key)
        return context

    heard = Heard()
    door = heard.door = Door(asyncio.get_running_loop(), heard, lambda link, number: True, allocate)
    door.open("127.0.0.1", 0, make_context)
    agent = await dial(heard, context=make_context(ssl.Purpose.SERVER_AUTH))
    await until(lambda: agent.open and heard.open)
    large = b"x" * (1 << 20)
    agent.open[0].send_large(7, 1, [b"body"], [memoryview(large)])
    await until(lambda: heard.frames)
    assert heard.frames == [(7, b"body", [large])]
    agent.open[0].drop("enough")
    await until(lambda: heard.lost)
    door.close()
    await asyncio.sleep(0.01)
