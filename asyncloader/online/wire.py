"""Messages between feeds and their handles in other processes: pickles, with large buffers beside them.

    [number of buffers, length of the pickle, tag] [lengths of the buffers] [pickle] [buffer] [buffer] ...

The tag is the number of a request, in its answer as well: so it is known whose message cannot be unpickled. Views of
tensors travel without the memory around them.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from asyncloader.datasets.records import SMALL, packed
from asyncloader.signals import HandlersWait

_HEAD = struct.Struct("<IQQ")
if sys.platform == "darwin":
    _CREDENTIALS, _WHERE = struct.Struct("=2I68x"), (0, socket.LOCAL_PEERCRED)  # version, user
else:
    _CREDENTIALS, _WHERE = struct.Struct("3i"), (socket.SOL_SOCKET, socket.SO_PEERCRED)  # process, user, group


class Unreadable(Exception):
    """In place of what could not be unpickled. The message says why."""


def unpacked(data: bytes | memoryview, buffers: Sequence[Any] = ()) -> Any:
    """Return what was packed; `Unreadable` in place of what cannot be made again here."""
    try:
        return pickle.loads(data, buffers=buffers)
    except Exception as error:  # of the user's classes
        return Unreadable(f"{type(error).__name__}: {error}")


def parts_of(tag: int, message: Any) -> list[Any]:
    """Return the bytes of a message, in few pieces; large buffers are not copied."""
    pickled, views = packed(message)
    head = _HEAD.pack(len(views), len(pickled), tag) + struct.pack(f"<{len(views)}Q", *(view.nbytes for view in views))
    return [head + pickled, *views] if len(pickled) < SMALL else [head, pickled, *views]


def peer(sock: socket.socket) -> int:
    """Return the user of the process that has connected, or listens."""
    return int(_CREDENTIALS.unpack(sock.getsockopt(*_WHERE, _CREDENTIALS.size))[1])


class Channel:
    """One end of a connection: messages go out and come in, in their order.

    Args:
        sock: Is closed at the end.
        loop: The event loop on which it runs, in a thread of its own.
    """

    def __init__(self, sock: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        sock.setblocking(False)
        self._sock, self._loop = sock, loop
        self._outbox: deque[Any] = deque()
        self._sending = threading.Lock()

    def send(self, tag: int, message: Any, note: Callable[[], object] = bool) -> None:
        """Send a message: now, or behind others. In any thread, and in the garbage collector.

        Args:
            tag: Its number.
            message: The message.
            note: Is called when it was pickled. Handlers of signals are not, before it was sent.
        """
        parts = parts_of(tag, message)
        with HandlersWait():
            note()
            self._outbox.extend(parts)
            self._send_all()

    def soon(self, call: Callable[..., object], *arguments: Any) -> None:
        """Have this be called on the loop. In any thread."""
        with suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(call, *arguments)

    async def run(self, receive: Callable[[int, Any], object]) -> None:
        """Have each message be received, until the other side ends, or there is an EOFError."""
        try:
            while True:
                receive(*await self._receive())
        except (EOFError, OSError):
            pass
        finally:
            with self._sending:  # nobody sends to the number of this socket, which may be another one's afterwards
                self._loop.remove_writer(self._sock)
                self._sock.close()

    def close(self) -> None:
        """End the connection. In any thread, and in the garbage collector."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _send_all(self) -> None:
        """Send what is in the outbox, as far as there is room in the socket; the loop sends the rest."""
        # Whoever finds the lock taken has put its message into the outbox before: the one that has the lock sends it,
        # or looks again once the lock was let go.
        while self._outbox and self._sending.acquire(blocking=False):
            try:
                while self._outbox:
                    part = memoryview(self._outbox[0])
                    sent = self._sock.send(part)
                    if sent == len(part):
                        self._outbox.popleft()
                    else:
                        self._outbox[0] = part[sent:]
            except BlockingIOError:
                self.soon(self._watch)
                return
            except OSError:  # which the other direction sees as well
                self._outbox.clear()
            finally:
                self._sending.release()

    def _watch(self) -> None:
        """Send when there is room in the socket. On the loop."""
        if self._sock.fileno() >= 0:
            self._loop.add_writer(self._sock, self._send_rest)

    def _send_rest(self) -> None:
        self._send_all()
        if not self._outbox:
            self._loop.remove_writer(self._sock)

    async def _receive(self) -> tuple[int, Any]:
        count, length, tag = _HEAD.unpack(await self._exactly(_HEAD.size))
        rest = await self._exactly(8 * count + length)
        buffers = [await self._exactly(each) for each in struct.unpack_from(f"<{count}Q", rest)]
        return tag, unpacked(rest[8 * count :], buffers)

    async def _exactly(self, count: int) -> memoryview:
        data = rest = np.empty(count, np.uint8).data  # a bytearray is filled with zeros, which stops all threads
        while rest:
            if not (received := await self._loop.sock_recv_into(self._sock, rest)):
                raise EOFError
            rest = rest[received:]
        return data
