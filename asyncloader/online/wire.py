"""Messages between feeds and their handles in other processes: pickles, with large buffers beside them.

    [number of buffers, length of the pickle, tag] [lengths of the buffers] [pickle] [buffer] [buffer] ...

The tag is the number of a request, in its answer as well: so it is known whose message cannot be unpickled.

Both sides prove first that they know the secret of the feed: what follows is unpickled.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import pickle
import secrets
import socket
import struct
from collections.abc import Generator
from typing import Any, NamedTuple, TypeAlias

_HEAD = struct.Struct("<IQQ")
_NONCE = 32
_SMALL = 1 << 16

_LONGEST_PROOF_S = 10.0

Reading: TypeAlias = Generator[int, bytearray, tuple[int, Any]]
"""Yields how many bytes it is to be sent, as they come; returns a tag and a message."""


class Unreadable(NamedTuple):
    """In place of a message that could not be unpickled.

    Attributes:
        reason: The error.
    """

    reason: str


class Withdrawn(Exception):
    """In place of an answer: the request was withdrawn while it waited."""


def parts_of(tag: int, message: Any) -> list[Any]:
    """Return the bytes of a message, in few pieces; large buffers are not copied."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(message, 5, buffer_callback=buffers.append)
    views = [buffer.raw() for buffer in buffers]
    head = _HEAD.pack(len(views), len(pickled), tag) + struct.pack(f"<{len(views)}Q", *(view.nbytes for view in views))
    return [head + pickled, *views] if len(pickled) < _SMALL else [head, pickled, *views]


def _message() -> Reading:
    count, length, tag = _HEAD.unpack((yield _HEAD.size))
    rest = yield 8 * count + length
    lengths = struct.unpack_from(f"<{count}Q", rest)
    buffers = []
    for each in lengths:
        buffers.append((yield each))
    try:
        return tag, pickle.loads(memoryview(rest)[8 * count :], buffers=buffers)
    except Exception as error:  # of the user's classes; the next message is whole
        return tag, Unreadable(f"{type(error).__name__}: {error}")


def receive(sock: socket.socket) -> tuple[int, Any]:
    """Receive a tag and a message, in a thread; `Unreadable` if it cannot be unpickled.

    Raises:
        EOFError: if the other side has ended.
        OSError: if the connection is broken.
    """
    reading = _message()
    wanted = next(reading)
    while True:
        data = bytearray(wanted)
        rest = memoryview(data)
        while rest:
            if not (count := sock.recv_into(rest)):
                raise EOFError
            rest = rest[count:]
        try:
            wanted = reading.send(data)
        except StopIteration as end:
            found: tuple[int, Any] = end.value
            return found


async def receive_async(sock: socket.socket) -> tuple[int, Any]:
    """Receive a tag and a message, on an event loop: see `receive`."""
    loop, reading = asyncio.get_running_loop(), _message()
    wanted = next(reading)
    while True:
        data = bytearray(wanted)
        rest = memoryview(data)
        while rest:
            if not (count := await loop.sock_recv_into(sock, rest)):
                raise EOFError
            rest = rest[count:]
        try:
            wanted = reading.send(data)
        except StopIteration as end:
            found: tuple[int, Any] = end.value
            return found


def _proof(secret: bytes, side: bytes, nonce: bytes) -> bytes:
    # A process that is forked in the middle of OpenSSL, whose hashes hmac uses, would wait for its locks for ever.
    return hashlib.blake2b(side + nonce, key=secret, digest_size=32).digest()


def prove(sock: socket.socket, secret: bytes) -> None:
    """Prove to a feed that its secret is known, and have it prove the same.

    Raises:
        EOFError: if it does not agree, or has ended.
        OSError: if the connection is broken.
    """
    sock.settimeout(_LONGEST_PROOF_S)
    theirs, own = _exactly(sock, _NONCE), secrets.token_bytes(_NONCE)
    sock.sendall(_proof(secret, b"handle", theirs) + own)
    if not hmac.compare_digest(_exactly(sock, 32), _proof(secret, b"feed", own)):
        raise EOFError
    sock.settimeout(None)


async def check(sock: socket.socket, secret: bytes) -> None:
    """Have the other side prove that it knows a secret, and prove the same: see `prove`."""
    loop, own = asyncio.get_running_loop(), secrets.token_bytes(_NONCE)
    await loop.sock_sendall(sock, own)
    answer = b""
    while len(answer) < 32 + _NONCE:
        if not (more := await loop.sock_recv(sock, 32 + _NONCE - len(answer))):
            raise EOFError
        answer += more
    if not hmac.compare_digest(answer[:32], _proof(secret, b"handle", own)):
        raise EOFError
    await loop.sock_sendall(sock, _proof(secret, b"feed", answer[32:]))


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        if not (more := sock.recv(count - len(data))):
            raise EOFError
        data += more
    return data
