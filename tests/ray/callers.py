"""Who calls at the trainer's door, in tests: agents, and strangers of all kinds."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ssl
from typing import Any

from asyncloader.messages.frames import BadFrame
from asyncloader.ray.door import Door
from asyncloader.ray.handshake import agent_side
from asyncloader.ray.link import Link
from asyncloader.ray.wire import Frame
from asyncloader.worker.guarded_loop import GuardedLoop
from tests.patience import until


class Heard:
    """The owner of links, on either side: notes what is told."""

    def __init__(self) -> None:
        self.open: list[Link] = []
        self.frames: list[Any] = []
        self.lost: list[str] = []
        self.door: Door | None = None
        self.context: ssl.SSLContext | None = None  # of who dials

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


async def dial(trainer: Heard, secret: bytes | None = None, number: int = 1) -> Heard:
    """Knock as an agent."""
    assert trainer.door is not None
    agent, loop = Heard(), asyncio.get_running_loop()
    secret = secret or trainer.door.secret

    def prove(link: Link, send: Any) -> Any:
        return agent_side(secret, send, number)

    host, port = trainer.door.address
    make, hostname = (
        functools.partial(Link, agent, GuardedLoop(loop), prove, allocate),
        "localhost" if trainer.context else None,
    )
    await loop.create_connection(make, host, port, ssl=trainer.context, server_hostname=hostname)
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
