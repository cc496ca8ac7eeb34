"""A worker on another machine, and the agent that runs it, as the trainer knows them."""

from __future__ import annotations

import enum
import time

from asyncloader.backends.worker import Worker, WorkerState
from asyncloader.ray.link import Link
from asyncloader.ray.wire import NUMBER, SECONDS, Death, Word
from asyncloader.worker.guarded_loop import GuardedLoop

_ON_THE_WAY_S = 1.0


class AgentState(enum.Enum):
    """Where an agent is in its life."""

    COMING = enum.auto()  # launched, or about to be
    HERE = enum.auto()  # it has proven itself, and has been given workers to start
    LEAVING = enum.auto()  # it wants no more tickets
    GONE = enum.auto()  # its number is good for nothing any more


class Clock:
    """How far ahead the agent's clock is of the trainer's: as the quickest of the last round trips says."""

    def __init__(self) -> None:
        self.ahead_s = 0.0
        self._least_s = float("inf")

    def note(self, sent_at: float, there: float, now: float) -> None:
        """A round trip has ended: sent at, answered at (by its clock), and back now. Seconds."""
        trip_s = now - sent_at
        self._least_s *= 1.05  # clocks drift: the quickest one is not believed for ever
        if trip_s <= self._least_s:
            self._least_s, self.ahead_s = trip_s, there - (sent_at + now) / 2


class RemoteAgent:
    """An agent, as the trainer knows it. No step of a pool looks through all agents or workers: each knows its own.

    Attributes:
        number: Its own, which is never given twice.
        size: How many workers it has room for.
        workers: Its workers, by their ids. A dead or discarded worker keeps its room until another is started.
        lives: Their processes that are alive, by the number of each.
        node: Its machine, by name.
        has_served: Whether any of its workers has been ready.
        went_with_node: Whether its process ended because its machine did; None until the launcher says so.
        failed: How many of its workers have ended before they were ready.
    """

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.size = size
        self.workers: dict[int, RemoteWorker] = {}
        self.lives: dict[int, RemoteWorker] = {}
        self.state = AgentState.COMING
        self.link: Link | None = None
        self.node = ""
        self.clock = Clock()
        self.has_served = False
        self.went_with_node: bool | None = None
        self.failed = 0

    def __repr__(self) -> str:
        return f"<RemoteAgent {self.number} {self.state.name} {self.node} workers={sorted(self.workers)}>"

    def send(self, kind: int, life: int = 0, *parts: bytes) -> None:
        """Send a frame, if it is there."""
        if self.link is not None:
            self.link.send(kind, life, *parts)


class RemoteWorker(Worker):
    """A worker on another machine. On the loop.

    Args:
        worker_id: Its id.
        life: The number of its process: another process under the same id has another number.
        agent: The agent that runs it.
        loop: The trainer's.
    """

    was_set_up = True
    answers_within_s = Worker.answers_within_s + _ON_THE_WAY_S

    def __init__(self, worker_id: int, life: int, agent: RemoteAgent, loop: GuardedLoop) -> None:
        super().__init__(worker_id, loop)
        self.life = life
        self.agent = agent
        self.stays = False  # it counts among the workers that are wanted
        self.state = WorkerState.RUNNING
        self.started_at = time.monotonic()

    def __repr__(self) -> str:
        return f"<RemoteWorker {self.worker_id} pid={self.pid} on {self.node}>"

    @property
    def node(self) -> str:
        """The machine that it is on, by name."""
        return self.agent.node

    @property
    def is_telling(self) -> bool:
        """Whether the worker can be asked where it is."""
        return self.is_alive and self.is_ready

    def _ask(self, ticket: int) -> None:
        """Have it tell the stacks of its threads."""
        self.agent.send(Word.STACK, self.life, NUMBER.pack(ticket))

    def _stack(self, awaits: str) -> str:
        return f"on node {self.node}:\n{awaits}" if awaits else ""

    def end(self, grace_s: float) -> None:
        """Have it finish, and drop the frames that its process still sends."""
        if self.agent.lives.pop(self.life, None) is not None:
            self.agent.send(Word.DISMISS, self.life, SECONDS.pack(grace_s))
            self.on_gone()

    def kill(self) -> None:
        """Give its agent up, which ends it."""
        if self.agent.link is not None:
            self.agent.link.drop("it was given up")

    def on_died(self, death: Death) -> None:
        """The worker has ended."""
        self.exitcode, self.was_set_up = death.exitcode, death.was_set_up
        self.output += f"On node {self.node}. ".encode() + death.output
        self.on_gone()

    def on_lost(self, why: str) -> None:
        """The worker is gone with its agent."""
        self.is_lost = True
        self.output += why.encode()
        self.on_gone()

    def on_gone(self) -> None:
        """The worker is there no more."""
        self.state = WorkerState.DEAD
        self._dead.set()
        self._tell_stack()
