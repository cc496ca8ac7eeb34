"""Who launches agents on other machines, as the trainer's pool sees it: an interface.

    RemotePool ── begin, kill, close ──> Launcher     Ray's is :mod:`asyncloader.ray`; the tests launch processes here
               <── admit, on_gone ─────

The pool says who an agent is (`admit`); the launcher sees that a process somewhere becomes it, and tells when that is
gone. What the agent then does it does over its connection to the trainer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Order:
    """What an agent is told by who launches it.

    Attributes:
        host: Where the trainer listens.
        port: Where the trainer listens.
        number: Of the agent; never given twice in a session.
        secret: Of the session. Not shown.
        make_context: Makes the agent's TLS context, pickled by value; None for no TLS.
    """

    host: str
    port: int
    number: int
    secret: bytes = field(repr=False)
    make_context: bytes | None = field(default=None, repr=False)


class Yard(Protocol):
    """What a launcher sees of the pool. On the loop thread."""

    def admit(self, num_workers: int) -> Order | None:
        """One more agent is about to be launched, for so many workers: say who it is. None: it is too late."""

    def on_gone(self, number: int, why: str) -> None:
        """The process that was launched for this agent has gone, or never came to be."""


class Launcher(Protocol):
    """Launches agents. `open` runs in the thread that makes the pool, and may take its time; the rest on the loop.

    Attributes:
        address: By which agents reach this machine; the pool listens there, and nowhere else.
    """

    address: str

    def open(self, parts: list[Any]) -> None:
        """Take what all workers work with, in pieces of bytes: the dataset, which is to travel once to each machine.

        Raises:
            Exception: as whoever it launches with raises it.
        """

    def begin(self, yard: Yard) -> None:
        """Launch what there is room for; go on with what comes."""

    def kill(self, number: int) -> None:
        """See that this agent is gone. Does not wait, and may be called again."""

    def close(self) -> None:
        """Launch nothing more, and let go of everything. Does not wait."""

    def wait_closed(self, timeout_s: float) -> bool:
        """Wait until that is so. In any thread but the loop's."""
