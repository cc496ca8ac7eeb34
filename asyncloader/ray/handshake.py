"""The proofs: each side shows that it knows the session's secret, before anything that it sends is more than bytes.

    trainer                                                   agent
       ── magic, nonce ──────────────────────────────────────>
       <────────── magic, number, nonce, HMAC(both nonces, number) ──
       ── HMAC(both nonces, number) ─────────────────────────>

HMAC-SHA256 with a secret of 32 bytes, which was drawn for the session and reached the agent by way of its launcher.
Both nonces are in it, so nothing that was recorded is good again; the roles too, so no proof can be sent back to its
sender. Lengths are fixed. The secret proves the identity of both sides when the connection begins; TLS protects what
follows against changes on the way.

The number of an agent is good for one connection, once: an agent that was given up as silent, and comes back, is
refused.

Each side is a generator without I/O: it yields how many bytes it wants next, and is sent them. `prove` drives it.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import struct
import weakref
from collections.abc import Callable, Generator
from typing import Any, TypeAlias

MAGIC = b"asyncloader agent 1\n"
_NONCE_BYTES = _DIGEST_BYTES = 32
_HELLO = struct.Struct(f"<{len(MAGIC)}s{_NONCE_BYTES}s")
_PROOF = struct.Struct(f"<{len(MAGIC)}sI{_NONCE_BYTES}s32s")
_NUMBER = struct.Struct("<I")

PROOF_BYTES = _PROOF.size
"""No side has to send more before it has proven itself."""

Steps: TypeAlias = Generator[int, bytes, int]
Send: TypeAlias = Callable[[bytes], object]


class Refused(Exception):
    """The other side is not the one that it should be. The text says why in a word or two."""


class Stranger(asyncio.StreamReaderProtocol):
    """The protocol of a connection whose other end has yet to prove itself; a `Link` takes its place then."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        super().__init__(reader)
        self._proofs = weakref.ref(reader)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the reader why the connection ended; no future has this error, as nothing waits for the end itself."""
        if exc is not None and (reader := self._proofs()) is not None:
            reader.set_exception(exc)
        super().connection_lost(None)

    def eof_received(self) -> bool:
        """The other end has gone: no half-closed connection is kept."""
        super().eof_received()
        return False


async def prove(steps: Steps, reader: asyncio.StreamReader) -> Any:
    """Go through the steps of a side with what the other side sends.

    Returns:
        The agent's number.

    Raises:
        Refused: the other side is not the one that it should be.
        EOFError: it has gone.
        OSError: the connection broke.
    """
    try:
        wanted = next(steps)
        while True:
            wanted = steps.send(await reader.readexactly(wanted))
    except StopIteration as end:
        return end.value


def new_secret() -> bytes:
    """Draw a secret for a session."""
    return secrets.token_bytes(32)


def trainer_side(secret: bytes, send: Send, admit: Callable[[int], bool]) -> Steps:
    """Have an agent prove itself, then prove this side to it.

    Args:
        secret: The secret of the session.
        send: Sends bytes.
        admit: Is asked once the agent has proven itself: whether one of this number may come now.

    Raises:
        Refused: by the generator: it may not.
    """
    ours = secrets.token_bytes(_NONCE_BYTES)
    send(_HELLO.pack(MAGIC, ours))
    magic, number, theirs, proof = _PROOF.unpack((yield _PROOF.size))
    if magic != MAGIC:
        raise Refused("no agent")
    if not hmac.compare_digest(proof, _digest(secret, b"agent", number, ours, theirs)):
        raise Refused("wrong secret")
    if not admit(number):
        raise Refused("not expected")
    send(_digest(secret, b"trainer", number, ours, theirs))
    return int(number)


def agent_side(secret: bytes, send: Send, number: int) -> Steps:
    """Prove this agent to the trainer, and have that prove itself.

    Args:
        secret: The secret of the session.
        send: Sends bytes.
        number: The number of this agent.

    Raises:
        Refused: by the generator: it is no trainer of this session.
    """
    magic, theirs = _HELLO.unpack((yield _HELLO.size))
    if magic != MAGIC:
        raise Refused("no trainer")
    ours = secrets.token_bytes(_NONCE_BYTES)
    send(_PROOF.pack(MAGIC, number, ours, _digest(secret, b"agent", number, theirs, ours)))
    proof = yield _DIGEST_BYTES
    if not hmac.compare_digest(proof, _digest(secret, b"trainer", number, theirs, ours)):
        raise Refused("wrong secret")
    return number


def _digest(secret: bytes, role: bytes, number: int, of_trainer: bytes, of_agent: bytes) -> bytes:
    return hmac.digest(secret, role + _NUMBER.pack(number) + of_trainer + of_agent, "sha256")
