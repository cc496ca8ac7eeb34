"""The launcher of agents on other machines, as the trainer's pool sees it: an interface.

    RemotePool ── begin, want, kill, close ──> Launcher     Ray's is `ray_launcher`; the tests launch processes here
               <── admit, on_draining, on_gone ─────

The pool says who an agent is (`admit`). The launcher sees that a process somewhere becomes this agent, and tells when
the process is gone. Everything else goes over the agent's own connection to the trainer.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from asyncloader.worker.guarded_loop import GuardedLoop

OnMismatch = Literal["raise", "warn"]

MakeContext: TypeAlias = Callable[[ssl.Purpose], ssl.SSLContext]
"""Makes TLS contexts: for `CLIENT_AUTH` that of the trainer, for `SERVER_AUTH` that of an agent, in the agent."""

NODE_ID = "ASYNCLOADER_NODE_ID"
"""In the environment of an agent: what tells nodes on one host apart. The launcher sets it."""


class Access(NamedTuple):
    """How agents may connect: :class:`asyncloader.ray.RayWorkers` explains the fields."""

    port: int = 0
    make_context: MakeContext | None = None
    on_mismatch: OnMismatch = "raise"


@dataclass(frozen=True, slots=True)
class Order:
    """The launcher's order to an agent.

    Attributes:
        host: The address at which the trainer listens.
        port: The port at which the trainer listens.
        number: The agent's number; no number is given twice in a session.
        secret: The session's secret. Not shown.
        make_context: Makes the agent's TLS context, pickled by value; None for no TLS.
    """

    host: str
    port: int
    number: int
    secret: bytes = field(repr=False)
    make_context: bytes | None = field(default=None, repr=False)


class Yard(Protocol):
    """The pool, as a launcher sees it. On the loop thread."""

    def admit(self, num_workers: int) -> Order | None:
        """Return the order for one more agent, for so many workers; None if it is not to be launched any more."""

    def not_started(self, why: str) -> None:
        """No agent can be launched."""

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
        """Take the pickle of what all workers work with, in pieces. The dataset is to travel once to each machine.

        Raises:
            Exception: as the system that launches agents raises it.
        """

    def begin(self, yard: Yard, loop: GuardedLoop) -> None:
        """Launch agents where there is room, and go on as room comes. The yard is called on the loop."""

    def want(self, num_workers: int | None, *, ask: bool) -> None:
        """Have so many workers launched in all, by agents that are there or are to come.

        Args:
            num_workers: None for as many as there is room for.
            ask: For workers without room, let the system that gives machines out know of them.
        """

    def kill(self, number: int) -> None:
        """See that this agent is gone. Does not wait, and may be called again."""

    def close(self) -> None:
        """Launch nothing more, and let go of everything. Does not wait."""

    def wait_closed(self, timeout_s: float) -> bool:
        """Wait until that is so. In any thread but the loop's."""
