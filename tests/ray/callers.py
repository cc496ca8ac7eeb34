"""Who calls at the trainer's door, in tests: agents, and strangers of all kinds."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import Any

from asyncloader.messages.frames import BadFrame
from asyncloader.observe.traffic import Traffic
from asyncloader.ray.door import Door
from asyncloader.ray.handshake import Refused, Stranger, agent_side, prove
from asyncloader.ray.link import Link
from asyncloader.ray.wire import Frame, Word
from asyncloader.worker.guarded_loop import GuardedLoop
from tests.patience import until


class Heard:
    """The owner of links, on either side: notes what is told."""

    def __init__(self, expects: int | None = None) -> None:
        self.expects = expects  # the number of the agent that may come in; None for any
        self.open: list[Link] = []
        self.frames: list[Any] = []
        self.lost: list[str] = []
        self.door: Door | None = None
        self.traffic: Traffic | None = None
        self.context: ssl.SSLContext | None = None  # of who dials

    def is_expected(self, number: int) -> bool:
        return self.expects is None or number == self.expects

    def on_open(self, transport: Any, number: int) -> None:
        loop = GuardedLoop(asyncio.get_running_loop())
        self.open.append(Link(transport, self, loop, allocate, self.traffic))

    def on_frame(self, link: Link, frame: Frame) -> None:
        if frame.kind == Word.BYE:
            raise BadFrame("none of theirs")
        if frame.kind == Word.FAILED:
            raise KeyError("a bug of ours")
        self.frames.append((frame.kind, bytes(frame.body), [bytes(buffer) for buffer in frame.buffers]))

    def on_lost(self, link: Link, why: str) -> None:
        self.lost.append(why)


def allocate(nbytes: int) -> memoryview:
    return memoryview(bytearray(nbytes))


async def dial(trainer: Heard, secret: bytes | None = None, number: int = 1) -> Heard:
    """Knock as an agent."""
    assert trainer.door is not None
    agent, loop = Heard(), asyncio.get_running_loop()
    secret = secret or trainer.door.secret

    host, port = trainer.door.address
    hostname, reader = "localhost" if trainer.context else None, asyncio.StreamReader()
    transport, _ = await loop.create_connection(
        lambda: Stranger(reader), host, port, ssl=trainer.context, server_hostname=hostname
    )
    try:
        await prove(agent_side(secret, transport.write, number), reader)
        agent.on_open(transport, number)
    except (Refused, EOFError, ConnectionError) as error:
        transport.abort()
        agent.lost.append(repr(error))
    return agent


async def knock(trainer: Heard, data: bytes) -> asyncio.StreamWriter:
    """Knock as a stranger, and say something."""
    assert trainer.door is not None
    reader, writer = await asyncio.open_connection(*trainer.door.address)
    writer.write(data)
    trainer.__dict__.setdefault("readers", []).append(reader)
    return writer


async def gone(*links: Link) -> None:
    """Wait until the loop has closed these connections."""
    await until(lambda: all(link.fileno() == -1 for link in links))


async def leave(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
