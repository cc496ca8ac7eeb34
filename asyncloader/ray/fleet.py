"""The agents of a pool: which may come, are there, have fallen silent, or leave.

    launcher ── admit, on_draining, .. > Fleet ── on_here, on_leaving, on_forgotten ──> RemotePool
    door ────── proofs, then frames ─>  │    ── frames of workers ──────────────────>
                                        └ HELLO, PONG, LEAVING, BYE are the agents' own

An agent has room for so many workers. Its number is good for one connection, once.
"""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
import struct
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter
from typing import Any, Protocol

import cloudpickle

from asyncloader.errors import WorkerStartError
from asyncloader.messages.frames import BadFrame
from asyncloader.messages.messages import EpochSpec, Kind, WorkerSpec
from asyncloader.observe.traffic import Traffic
from asyncloader.ray.door import Door
from asyncloader.ray.facts import differences, facts
from asyncloader.ray.launcher import Access, Launcher, Order
from asyncloader.ray.link import Link
from asyncloader.ray.wire import SECONDS, Frame, Word
from asyncloader.ray.worker import AgentState, RemoteAgent
from asyncloader.worker.guarded_loop import GuardedLoop

log = logging.getLogger("asyncloader")

_PONG = struct.Struct("<dd")
_BEAT_S = 1.0
_SILENT_BEATS = 5
"""An agent from which nothing has come for so many turns of a second is given up."""

_LAST_S = 2.0
"""An agent that was told to end is given up so long after the grace of its workers. Seconds."""


class Owner(Protocol):
    """The pool that has workers at the agents."""

    def on_here(self, agent: RemoteAgent) -> None:
        """The agent can be given workers."""

    def on_worker_frame(self, agent: RemoteAgent, frame: Frame) -> None:
        """A frame about one of the agent's workers has come."""

    def on_leaving(self, agent: RemoteAgent) -> None:
        """The agent wants no more tickets."""

    def on_forgotten(self, agent: RemoteAgent, why: str) -> None:
        """The agent was given up, with all of its workers."""

    def not_started(self, why: str) -> None:
        """An agent has ended before it was of any use."""

    def fail(self, error: Exception) -> None:
        """No agent can be had that would make the same batches."""

    def on_empty(self) -> None:
        """All agents are gone, after `Fleet.end`."""


class Fleet:
    """Owner of the agents and of the connections to them. On the loop.

    Args:
        loop: The portal's.
        owner: Has workers there.
        spec: The dataset, collation and options of the workers.
        access: How agents may connect.
        launcher: Launches agents; it is open.
        most: For how many workers there may be agents; None for any number.
        allocate: Gives memory for large buffers.
        traffic: Counts what comes, or None.

    Attributes:
        agents: By number.
        epoch: The run that is going on.
        is_closing: They have been told to go.
    """

    def __init__(
        self,
        loop: GuardedLoop,
        owner: Owner,
        spec: WorkerSpec,
        access: Access,
        launcher: Launcher,
        most: int | None,
        allocate: Callable[[int], memoryview],
        traffic: Traffic | None = None,
    ) -> None:
        self.agents: dict[int, RemoteAgent] = {}
        self.epoch: EpochSpec
        self.is_closing = False
        self._loop = loop
        self._owner = owner
        self._spec = replace(spec, dataset=None, collate_fn=None, worker_init_fn=None, thread=None)
        self._access = access
        self._launcher = launcher
        self._linked: dict[Link, RemoteAgent] = {}
        self._most = most
        self._num_agents = 0
        self._node_ids: dict[str, str] = {}  # by name
        self._lost: dict[int, str] = {}  # lost before they served: what to say once the launcher knows of their node
        self._allocate = allocate
        self._traffic = traffic
        self._door = Door(loop, self.is_expected, self.on_open)
        self._beating: asyncio.TimerHandle | None = None
        self._last: asyncio.TimerHandle | None = None
        self._is_empty = False

    def __repr__(self) -> str:
        return f"<Fleet {list(self.agents.values())!r} refused={dict(self._door.refused)}>"

    # ---------------------------------------------------------------------------------------------- lifecycle

    def open(self, epoch: EpochSpec) -> None:
        """Listen, and have agents launched as they are wanted.

        Raises:
            WorkerStartError: if this machine cannot listen where agents are to reach it.
        """
        self.epoch = epoch
        self._door.open(self._launcher.address, self._access.port, self._access.make_context)
        self._beating = self._loop.call_later(_BEAT_S, self.beat)
        self._launcher.begin(self, self._loop)

    def begin_epoch(self, epoch: EpochSpec) -> None:
        """Begin a new run over the data."""
        self.epoch = epoch
        body = pickle.dumps(epoch)
        for agent in self.agents.values():
            if agent.state is not AgentState.COMING:  # otherwise its welcome says which run it is
                agent.send(Kind.EPOCH, 0, body)

    def end(self, grace_s: float) -> None:
        """Tell all agents to go, with their workers; give up who is left after the grace and a moment."""
        if self._is_empty:
            return  # a timer would keep the options alive for nothing
        self.is_closing = True
        self._lost.clear()
        for agent in tuple(self.agents.values()):
            if agent.state is AgentState.COMING:
                self.forget(agent)
            else:
                agent.send(Word.END, 0, SECONDS.pack(grace_s))
        if self._last is not None:
            self._last.cancel()
        self._last = self._loop.call_later(grace_s + _LAST_S, self.give_up_all)
        self._maybe_empty()

    def give_up_all(self) -> None:
        """Wait for nobody any more."""
        for agent in tuple(self.agents.values()):
            self.forget(agent)
        self._maybe_empty()

    def _maybe_empty(self) -> None:
        if not self.is_closing or self.agents or self._is_empty:
            return
        for timer in (self._beating, self._last):
            if timer is not None:
                timer.cancel()
        self._door.close()
        self._launcher.close()
        self._owner.on_empty()
        self._is_empty = True

    # ----------------------------------------------------------------------------------------- they come and go

    def admit(self, num_workers: int) -> Order | None:
        """Enter another agent, for so many workers, before it is launched, or return None: it is not to be launched."""
        if self.is_closing or (self._most is not None and num_workers > self._most - self._count_taken()):
            return None
        self._num_agents += 1
        number = self._num_agents
        self.agents[number] = RemoteAgent(number, num_workers)
        make_context = self._access.make_context
        context = None if make_context is None else cloudpickle.dumps(make_context)
        return Order(*self._door.address, number, self._door.secret, context)

    def _count_taken(self) -> int:
        """Count the workers for which there are agents. The workers of an agent that leaves move one by one."""
        agents = self.agents.values()
        return sum(len(agent.workers) if agent.state is AgentState.LEAVING else agent.size for agent in agents)

    def not_started(self, why: str) -> None:
        """No agent can be launched."""
        self._owner.not_started(why)

    def on_draining(self, number: int) -> None:
        """The cluster is about to take this agent's machine away. An agent that has not come need not come."""
        agent = self.agents.get(number)
        if agent is not None and agent.state is AgentState.COMING:
            self.forget(agent, "its node is drained")
        elif agent is not None and agent.state is AgentState.HERE:
            self._on_leaving(agent)

    def on_gone(self, number: int, why: str, *, with_node: bool) -> None:
        """The agent's process has gone. The connection of an agent that is here is read to its end first."""
        agent = self.agents.get(number)
        if agent is None:
            if words := self._lost.pop(number, ""):
                self._on_not_started(words, with_node)
        elif agent.state is AgentState.COMING:
            self.forget(agent, why)
            self._on_not_started(f"An agent for {agent.size} workers did not come: {why}", with_node)
        else:
            agent.went_with_node = with_node

    def _on_not_started(self, why: str, with_node: bool) -> None:
        """An agent has ended before it served. The death of its node is no failed start: another node is waited for."""
        if with_node:
            log.warning("%s (its node has died: another is waited for)", why)
        else:
            self._owner.not_started(why)

    def is_expected(self, number: int) -> bool:
        """Whether an agent of this number may come now. An agent that was given up may not come back."""
        agent = self.agents.get(number)
        return agent is not None and agent.link is None and not self.is_closing

    def on_open(self, transport: Any, number: int) -> None:
        """An agent has proven itself; it tells next what is there."""
        link = Link(transport, self, self._loop, self._allocate, self._traffic)
        agent = self._linked[link] = self.agents[number]
        agent.link = link

    def on_lost(self, link: Link, why: str) -> None:
        """A connection has ended: nothing more comes by it."""
        if (agent := self._linked.get(link)) is not None:
            self._lose(agent, why)

    def _lose(self, agent: RemoteAgent, why: str) -> None:
        is_due = self.is_closing or (agent.state is AgentState.LEAVING and not agent.workers)
        lost = sum(process.is_ready for process in agent.workers.values())
        self.forget(agent, why)
        if not is_due and agent.has_served:
            words = "The agent on node %s is lost, with %d workers, whose batches others make: %s"
            log.warning(words, agent.node, lost, why)
        elif not is_due:
            words = f"The agent on node {agent.node} ended before a worker of it was ready: {why}"
            if agent.went_with_node is None:  # a connection may end long before the launcher knows why
                self._lost[agent.number] = words
            else:
                self._on_not_started(words, agent.went_with_node)
        self._maybe_empty()

    def forget(self, agent: RemoteAgent, why: str = "it was given up") -> None:
        """Give an agent up: nothing that it sends counts, and its number is good for nothing."""
        agent.state = AgentState.GONE
        if agent.link is not None:
            del self._linked[agent.link]
            agent.link.drop(why)
            agent.link = None
        self._launcher.kill(agent.number)
        self.agents.pop(agent.number, None)
        self._owner.on_forgotten(agent, why)

    def send_home(self, agent: RemoteAgent, grace_s: float) -> None:
        """Have an agent go that has nothing in hand."""
        agent.state = AgentState.LEAVING
        agent.send(Word.END, 0, SECONDS.pack(grace_s))

    # --------------------------------------------------------------------------------------------- what they say

    def on_frame(self, link: Link, frame: Frame) -> None:
        """Take a frame from an agent."""
        agent = self._linked.get(link)
        if agent is None:  # it was given up
            return
        if frame.life:
            self._owner.on_worker_frame(agent, frame)
        elif frame.kind == Word.PONG:
            sent_at, there = _PONG.unpack(frame.body)
            agent.clock.note(sent_at, there, perf_counter())
        elif frame.kind == Word.HELLO and agent.state is AgentState.COMING:
            self._on_hello(agent, frame)
        elif frame.kind == Word.LEAVING:
            self._on_leaving(agent)
        elif frame.kind == Word.BYE:
            self._lose(agent, "it has ended")
        elif frame.kind == Word.FAILED:
            raise RuntimeError(f"The agent on node {agent.node} has failed:\n{str(frame.body, errors='replace')}")
        else:
            raise BadFrame(f"a frame of kind {frame.kind}, which is none of an agent's")

    def _on_hello(self, agent: RemoteAgent, frame: Frame) -> None:
        there = {str(name): str(value) for name, value in json.loads(bytes(frame.body)).items()}
        agent.node = self._name(there.get("node", agent.link.peer if agent.link else ""), there.get("node_id", ""))
        here = facts()
        if differs := differences(here, there):
            words = f"Batches of the agent on node {agent.node} may differ from those made here: {', '.join(differs)}."
            is_other = here["asyncloader"] != there.get("asyncloader")
            if is_other or self._access.on_mismatch == "raise":
                allow = "" if is_other else ', or allow it: RayWorkers(on_mismatch="warn")'
                self.forget(agent)
                self._owner.fail(WorkerStartError(f"{words} Have the same there, by runtime_env for example{allow}."))
                return
            log.warning("%s", words)
        agent.state = AgentState.HERE
        agent.send(Word.WELCOME, 0, pickle.dumps((self._spec, self.epoch)))
        self._ping(agent)
        self._owner.on_here(agent)

    def _name(self, host: str, node_id: str) -> str:
        """Return how a node is called: as its host; from the second one on the same host on, with its id too."""
        name = host if self._node_ids.setdefault(host, node_id) == node_id else f"{host}/{node_id[:8]}"
        self._node_ids[name] = node_id
        return name

    def _on_leaving(self, agent: RemoteAgent) -> None:
        """The cluster takes its machine back: the agent's workers finish what they have, and go."""
        agent.state = AgentState.LEAVING
        log.info("The agent on node %s leaves, with %d workers", agent.node, len(agent.workers))
        self._owner.on_leaving(agent)

    def beat(self) -> None:
        """Ask all agents whether they are there, and give those up that have been silent for too long."""
        self._beating = self._loop.call_later(_BEAT_S, self.beat)
        for agent in tuple(self.agents.values()):
            if agent.link is None:
                continue
            if agent.link.beat() >= _SILENT_BEATS:
                self._lose(agent, f"nothing has come from it for {_SILENT_BEATS} s")
            elif agent.state is not AgentState.COMING:
                self._ping(agent)

    def _ping(self, agent: RemoteAgent) -> None:
        agent.send(Word.PING, 0, SECONDS.pack(perf_counter()))
