"""Who launches agents on other machines, as the trainer's pool sees it: an interface.

    RemotePool ── begin, want, kill, close ──> Launcher     Ray's is `ray_launcher`; the tests launch processes here
               <── admit, on_draining, on_gone ─────

The pool says who an agent is (`admit`); the launcher sees that a process somewhere becomes it, and tells when that is
gone. What the agent then does it does over its connection to the trainer.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from asyncloader.worker.guarded_loop import GuardedLoop

OnMismatch = Literal["raise", "warn"]

MakeContext: TypeAlias = Callable[[ssl.Purpose], ssl.SSLContext]
"""Makes TLS contexts: for `CLIENT_AUTH` that of the trainer, for `SERVER_AUTH` that of an agent, in the agent."""

NODE_ID = "ASYNCLOADER_NODE_ID"
"""In the environment of an agent: what tells nodes apart that are on one host, by whoever has launched the agent."""


class Asked(Protocol):
    """What the user asks for: :class:`asyncloader.ray.RayWorkers` explains the fields."""

    @property
    def num_workers(self) -> int | None:
        """How many workers; None for as many as there is room for."""

    @property
    def max_workers(self) -> int | None:
        """The most there may be, where `num_workers` does not say; None for any number."""

    @property
    def port(self) -> int:
        """Where the trainer listens; 0 for any that is free."""

    @property
    def on_mismatch(self) -> OnMismatch:
        """What to do about agents whose versions or processor would make other bits."""

    @property
    def make_context(self) -> MakeContext | None:
        """What makes TLS contexts, or None for no TLS."""


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

    def on_draining(self, number: int) -> None:
        """This agent's machine is about to be taken away: it is to finish what it has, and to leave."""

    def on_gone(self, number: int, why: str, *, with_node: bool) -> None:
        """The process that was launched for this agent has gone, or never came to be.

        Args:
            number: The agent's.
            why: How it ended.
            with_node: Its machine is gone as well: then the end is no failed start.
        """


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

    def begin(self, yard: Yard, loop: GuardedLoop) -> None:
        """Launch what there is room for; go on with what comes. What is told to the yard is told on the loop."""

    def want(self, num_workers: int | None, *, ask: bool) -> None:
        """Have so many workers launched in all, by agents that are there or are to come.

        Args:
            num_workers: None for as many as there is room for.
            ask: For those that there is no room for, have whoever gives machines out know of it.
        """

    def kill(self, number: int) -> None:
        """See that this agent is gone. Does not wait, and may be called again."""

    def close(self) -> None:
        """Launch nothing more, and let go of everything. Does not wait."""

    def wait_closed(self, timeout_s: float) -> bool:
        """Wait until that is so. In any thread but the loop's."""
