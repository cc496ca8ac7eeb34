"""Messages between feeds and their handles in other processes: pickles, with large buffers beside them.

    [number of buffers, length of the pickle, tag] [lengths of the buffers] [pickle] [buffer] [buffer] ...

The tag is the number of a request, in its answer as well: so it is known whose message cannot be unpickled. Views of
tensors travel without the memory around them.
"""

from __future__ import annotations

import asyncio
import io
import pickle
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from asyncloader.datasets.records import Pickler

_HEAD = struct.Struct("<IQQ")
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_SMALL = 1 << 16


class Unreadable(NamedTuple):
    """In place of a message that could not be unpickled.

    Attributes:
        reason: The error.
    """

    reason: str


def parts_of(tag: int, message: Any) -> list[Any]:
    """Return the bytes of a message, in few pieces; large buffers are not copied."""
    file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    Pickler(file, protocol=5, buffer_callback=buffers.append).dump(message)
    pickled, views = file.getvalue(), [buffer.raw() for buffer in buffers]
    head = _HEAD.pack(len(views), len(pickled), tag) + struct.pack(f"<{len(views)}Q", *(view.nbytes for view in views))
    return [head + pickled, *views] if len(pickled) < _SMALL else [head, pickled, *views]


def peer(sock: socket.socket) -> int:
    """Return the user of the process that has connected, or listens."""
    _, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(user)


class Channel:
    """One end of a connection: messages go out and come in, in their order.

    Args:
        sock: Is closed at the end.
        loop: The event loop on which it runs, in a thread of its own.
    """

    def __init__(self, sock: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        sock.setblocking(False)
        self._sock, self._loop = sock, loop
        self._outbox: asyncio.Queue[list[Any]] = asyncio.Queue()

    def send(self, tag: int, message: Any) -> None:
        """Send a message, some time. In any thread, and in the garbage collector; to one that has ended, do nothing."""
        self.soon(self._outbox.put_nowait, parts_of(tag, message))

    def soon(self, call: Callable[..., object], *arguments: Any) -> None:
        """Have this be called on the loop. In any thread."""
        with suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(call, *arguments)

    async def run(self, receive: Callable[[int, Any], object]) -> None:
        """Have each message be received, until the other side ends, or there is an EOFError."""
        sending = asyncio.create_task(self._send_all())
        try:
            while True:
                receive(*await self._receive())
        except (EOFError, OSError):
            pass
        finally:
            sending.cancel()
            try:
                await asyncio.wait({sending})
            finally:  # also if this is cancelled here
                self._sock.close()

    def close(self) -> None:
        """End the connection. In any thread, and in the garbage collector."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    async def _send_all(self) -> None:
        with suppress(OSError):  # which the other direction sees as well
            while True:
                for part in await self._outbox.get():
                    await self._loop.sock_sendall(self._sock, part)

    async def _receive(self) -> tuple[int, Any]:
        count, length, tag = _HEAD.unpack(await self._exactly(_HEAD.size))
        rest = await self._exactly(8 * count + length)
        buffers = [await self._exactly(each) for each in struct.unpack_from(f"<{count}Q", rest)]
        try:
            return tag, pickle.loads(memoryview(rest)[8 * count :], buffers=buffers)
        except Exception as error:  # of the user's classes; the next message is whole
            return tag, Unreadable(f"{type(error).__name__}: {error}")

    async def _exactly(self, count: int) -> bytearray:
        data = bytearray(count)
        rest = memoryview(data)
        while rest:
            if not (received := await self._loop.sock_recv_into(self._sock, rest)):
                raise EOFError
            rest = rest[received:]
        return data
