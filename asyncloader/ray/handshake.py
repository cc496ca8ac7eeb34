"""Who may join: each side shows that it knows the session's secret, before what it sends is more than bytes.

    trainer                                                   agent
       ── magic, nonce ──────────────────────────────────────>
       <────────── magic, number, nonce, HMAC(both nonces, number) ──
       ── HMAC(both nonces, number) ─────────────────────────>

HMAC-SHA256 with a secret of 32 bytes that was drawn for the session and reached the agent by way of who launched it.
Both nonces are in it, so nothing that was recorded is good again; the roles too, so nothing can be sent back to where
it came from. Lengths are fixed: of a stranger no more than some 90 bytes are kept. The secret proves who is there when
the connection begins; against somebody on the way who changes what follows there is TLS.

The agent's number is good for one agent, once: one that was given up for silent, and comes back, is refused.

No I/O in here: each side is a generator that yields how many bytes it wants next, and is sent them.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from collections.abc import Callable, Generator
from typing import TypeAlias

MAGIC = b"asyncloader agent 1\n"
_NONCE_BYTES = _DIGEST_BYTES = 32
_HELLO = struct.Struct(f"<{len(MAGIC)}s{_NONCE_BYTES}s")
_PROOF = struct.Struct(f"<{len(MAGIC)}sI{_NONCE_BYTES}s32s")
_NUMBER = struct.Struct("<I")

Steps: TypeAlias = Generator[int, bytes, None]
Send: TypeAlias = Callable[[bytes], object]


class Refused(Exception):
    """The other side is not who it should be. The text is why, in a word or two, for who counts."""


def new_secret() -> bytes:
    """Draw a secret for a session."""
    return secrets.token_bytes(32)


def trainer_side(secret: bytes, send: Send, admit: Callable[[int], bool]) -> Steps:
    """Have an agent prove itself, then prove this side to it.

    Args:
        secret: Of the session.
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


def agent_side(secret: bytes, send: Send, number: int) -> Steps:
    """Prove this agent to the trainer, and have that prove itself.

    Args:
        secret: Of the session.
        send: Sends bytes.
        number: Of this agent.

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


def _digest(secret: bytes, role: bytes, number: int, of_trainer: bytes, of_agent: bytes) -> bytes:
    return hmac.digest(secret, role + _NUMBER.pack(number) + of_trainer + of_agent, "sha256")
