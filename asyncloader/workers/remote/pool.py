"""The workers on other machines, as one of the engine's backends: agents come and go, and their workers with them.

    launcher ── admit, on_gone ──> RemotePool ── on_ready, on_lost, on_left ──> session
                                     │   ^
                                 order, tickets, welcome
                                     v   │ proofs, batches, deaths
                                   Link (one an agent) <── TCP ──> agents

A worker has a place (its id) from the moment it is ready. Each process that takes a place is a life of its own, and
what comes over the wire says of which life it is: so a batch of one that was given up counts for nothing.

What waits here is bounded by tickets: each is answered once, and no more of them are out than the consumer's window,
and what may be run ahead, allow. So the other side needs no other leave to send.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import pickle
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import cloudpickle

from asyncloader.errors import WorkerStartError, describe_death
from asyncloader.observe.traffic import Traffic
from asyncloader.protocols import RemoteWorkers
from asyncloader.transport.slab import slab_pool
from asyncloader.workers.backend import Launch, Listener
from asyncloader.workers.protocol.failure import RemoteError
from asyncloader.workers.protocol.frames import BadFrame
from asyncloader.workers.protocol.messages import EpochSpec, Kind, WorkerSpec, pack_tickets
from asyncloader.workers.protocol.outcome import OUTCOMES, Failure, Outcome, unpack
from asyncloader.workers.remote.door import Door
from asyncloader.workers.remote.facts import differences, facts
from asyncloader.workers.remote.launcher import Launcher, Order
from asyncloader.workers.remote.link import Link
from asyncloader.workers.remote.wire import NUMBER, SECONDS, Death, Frame, Word, decode
from asyncloader.workers.remote.worker import AgentState, RemoteAgent, RemoteWorker

log = logging.getLogger("asyncloader")

_PONG = struct.Struct("<dd")
_BEAT_S = 1.0
_SILENT_BEATS = 5
"""An agent from which nothing has come for so many turns of a second is given up."""

_LAST_S = 2.0
"""An agent that was told to end is given up so long after the grace of its workers. Seconds."""

_FAILED_STARTS = 3
"""Where there are no local workers, so many ends in a row before any worker was ready are the end of the run."""

_MISSING = frozenset({"FileNotFoundError", "ModuleNotFoundError", "ImportError", "NotADirectoryError"})
_ELSEWHERE = (
    " (if that is only on the trainer's machine: files belong on storage that all nodes have, modules into the "
    "runtime_env of RayWorkers)"
)


class RemotePool:
    """Owner of the connections to agents, and of the places of their workers. On the loop, but for `wait_dead`.

    Args:
        loop: The portal's.
        spec: What the workers work with.
        options: Of the user.
        launcher: Launches agents; it is open.
        first: The least id that workers of agents may have: below it are local ones.
        traffic: Counts what comes, or None.
    """

    has_processes = False
    takes_long = False

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        spec: WorkerSpec,
        options: RemoteWorkers,
        launcher: Launcher,
        first: int,
        traffic: Traffic | None = None,
    ) -> None:
        self.processes: dict[int, RemoteWorker] = {}
        self.listener: Listener | None = None
        self._loop = loop
        self._spec = replace(spec, dataset=None, collate_fn=None, worker_init_fn=None, origin=None)
        self._options = options
        self._launcher = launcher
        self._first = first
        self._epoch: EpochSpec
        self._agents: dict[int, RemoteAgent] = {}
        self._homes: dict[int, RemoteAgent] = {}  # by worker id
        self._lives: dict[int, RemoteWorker] = {}
        self._num_agents = self._num_lives = 0
        self._failed_starts = 0
        self._door = Door(loop, self, self._is_expected, self._allocate, traffic)
        self._slabs = slab_pool()
        self._slabs.live_on(loop)
        self._slabs.handle()
        self._slabs.enlist(self)
        self._beating: asyncio.TimerHandle | None = None
        self._last: asyncio.TimerHandle | None = None
        self._closing = False
        self._dead = threading.Event()

    def __repr__(self) -> str:
        return f"<RemotePool {list(self._agents.values())!r} refused={dict(self._door.refused)}>"

    # ---------------------------------------------------------------------------------------------- lifecycle

    def start(self, epoch: EpochSpec, started: Callable[[], None]) -> Iterator[Launch]:
        """Listen, and have agents launched: they come when they come. There is nothing to launch here.

        Raises:
            WorkerStartError: if this machine cannot listen where agents are to reach it.
        """
        self._epoch = epoch
        self._door.open(self._launcher.address, self._options.port, self._options.make_context)
        self._beating = self._loop.call_later(_BEAT_S, self._beat)
        self._launcher.begin(self)
        started()
        yield from ()

    def add(self, worker: int, num_workers: int) -> None:
        """Have a worker started in the place of one that has died or was discarded, by the same agent."""
        agent = self._homes[worker]
        self.processes[worker] = self._begin_life(agent, worker, num_workers)

    def _begin_life(self, agent: RemoteAgent, worker: int, num_workers: int) -> RemoteWorker:
        self._num_lives += 1
        life = self._num_lives
        made = self._lives[life] = RemoteWorker(worker, life, agent, self._loop)
        agent.send(Word.ADD, life, pickle.dumps((worker, num_workers)))
        return made

    def discard(self, worker: int) -> None:
        """Have this worker killed: another will take its place, and nothing that it has sent counts."""
        process = self.processes[worker]
        if self._lives.pop(process.life, None) is not None:
            process.agent.send(Word.DISCARD, process.life)
            process.on_gone()

    def dismiss(self, worker: int, grace_s: float) -> None:
        """Let this worker finish, if it is there: it has no tickets. Its place is free."""
        process = self.processes.pop(worker, None)
        if process is None:
            return
        if self._lives.pop(process.life, None) is not None:
            process.agent.send(Word.DISMISS, process.life, SECONDS.pack(grace_s))
            process.on_gone()
        self._maybe_end(process.agent, grace_s)

    def begin_epoch(self, epoch: EpochSpec) -> None:
        """Begin a new run over the data; tickets of the last one are forgotten."""
        self._epoch = epoch
        body = pickle.dumps(epoch)
        for agent in self._agents.values():
            if agent.state is not AgentState.COMING:  # otherwise its welcome says which run it is
                agent.send(Kind.EPOCH, 0, body)

    def end(self, grace_s: float) -> None:
        """Tell all agents to go, with their workers; give up who is left after the grace and a moment."""
        self._closing = True
        for agent in tuple(self._agents.values()):
            if agent.state is AgentState.COMING:
                self._forget(agent)
            else:
                agent.send(Word.END, 0, SECONDS.pack(grace_s))
        if self._last is not None:
            self._last.cancel()
        self._last = self._loop.call_later(grace_s + _LAST_S, self._give_up_all)
        self._maybe_closed()

    def _give_up_all(self) -> None:
        for agent in tuple(self._agents.values()):
            self._forget(agent)
        self._maybe_closed()

    def _maybe_closed(self) -> None:
        if not self._closing or self._agents or self._dead.is_set():
            return
        for timer in (self._beating, self._last):
            if timer is not None:
                timer.cancel()
        self._door.close()
        self._launcher.close()
        self._slabs.retire(self)
        self._dead.set()
        listener, self.listener = self.listener, None
        if listener is not None:
            listener.on_closed()

    def wait_dead(self, timeout_s: float) -> bool:
        """Wait until all agents are gone, and who launched them has let go. In any thread but the loop's."""
        deadline = time.monotonic() + timeout_s
        return self._dead.wait(timeout_s) and self._launcher.wait_closed(max(0.0, deadline - time.monotonic()))

    # ------------------------------------------------------------------------------------------ agents come and go

    def admit(self, num_workers: int) -> Order | None:
        """One more agent is about to be launched, for so many workers: say who it is. None: it is too late."""
        if self._closing:
            return None
        self._num_agents += 1
        number, free = self._num_agents, self._first
        ids: list[int] = []
        while len(ids) < num_workers:
            if free not in self._homes:
                ids.append(free)
            free += 1
        agent = self._agents[number] = RemoteAgent(number, ids)
        self._homes.update(dict.fromkeys(ids, agent))
        make_context = self._options.make_context
        context = None if make_context is None else cloudpickle.dumps(make_context)
        return Order(*self._door.address, number, self._door.secret, context)

    def on_gone(self, number: int, why: str) -> None:
        """The agent's process has gone. Of one that is connected the connection tells: it is read to its end first."""
        agent = self._agents.get(number)
        if agent is None or agent.state is not AgentState.COMING:
            return
        self._forget(agent)
        self._not_started(f"An agent for {len(agent.workers)} workers did not come: {why}")

    def _not_started(self, why: str) -> None:
        """An agent or a worker has ended before it was of any use."""
        log.warning("%s", why)
        self._failed_starts += 1
        if not self._first and not self.processes and self._failed_starts >= _FAILED_STARTS:
            self._fail(WorkerStartError(f"No worker can be had on another machine, and there are none here. {why}"))

    def _fail(self, error: Exception) -> None:
        if self.listener is not None and not self._closing:
            self.listener.on_failed(error)

    def _is_expected(self, link: Link, number: int) -> bool:
        """Whether an agent of this number may come now. One that was given up may not come back."""
        agent = self._agents.get(number)
        if agent is None or agent.link is not None or self._closing:
            return False
        agent.link = link
        return True

    def on_open(self, link: Link) -> None:
        """An agent has proven itself; it tells next what is there."""
        self._door.came_in(link)

    def _on_hello(self, agent: RemoteAgent, frame: Frame) -> None:
        there = {str(name): str(value) for name, value in json.loads(bytes(frame.body)).items()}
        agent.node = there.get("node", agent.link.peer if agent.link else "")
        here = facts()
        if differs := differences(here, there):
            words = f"Batches of the agent on node {agent.node} may differ from those made here: {', '.join(differs)}."
            is_other = here["asyncloader"] != there.get("asyncloader")
            if is_other or self._options.on_mismatch == "raise":
                allow = "" if is_other else ', or allow it: RayWorkers(on_mismatch="warn")'
                self._forget(agent)
                self._fail(WorkerStartError(f"{words} Have the same there, by runtime_env for example{allow}."))
                return
            log.warning("%s", words)
        agent.state = AgentState.HERE
        agent.send(Word.WELCOME, 0, pickle.dumps((self._spec, self._epoch)))
        self._ping(agent)
        count = self._first + len(self._homes)
        for worker in agent.workers:
            self._begin_life(agent, worker, count)

    def on_lost(self, link: Link, why: str) -> None:
        """A connection has ended: nothing more comes by it."""
        self._door.went_away(link, why)
        for agent in [agent for agent in self._agents.values() if agent.link is link]:
            self._lose(agent, why)

    def _lose(self, agent: RemoteAgent, why: str) -> None:
        placed = [worker for worker in agent.workers if worker in self.processes]
        is_due = self._closing or (agent.state is AgentState.LEAVING and not placed)
        self._forget(agent)
        if not is_due and agent.has_served:
            words = "The agent on node %s is lost, with %d workers, whose batches others make: %s"
            log.warning(words, agent.node, len(placed), why)
        elif not is_due:
            self._not_started(f"The agent on node {agent.node} ended before a worker of it was ready: {why}")
        self._maybe_closed()

    def _forget(self, agent: RemoteAgent) -> None:
        """Give an agent up: nothing that it sends counts, and its number is good for nothing."""
        agent.state = AgentState.GONE
        self._agents.pop(agent.number, None)
        link, agent.link = agent.link, None
        self._launcher.kill(agent.number)
        for life, process in tuple(self._lives.items()):
            if process.agent is agent:
                del self._lives[life]
                process.on_gone()
        for worker in agent.workers:
            del self._homes[worker]
            if self.processes.pop(worker, None) is not None and self.listener is not None and not self._closing:
                self.listener.on_lost(worker)
        if link is not None:
            link.drop("it was given up")

    def _maybe_end(self, agent: RemoteAgent, grace_s: float) -> None:
        """Let an agent go that is leaving, and has nothing in hand."""
        if agent.state is AgentState.LEAVING and not any(worker in self.processes for worker in agent.workers):
            agent.send(Word.END, 0, SECONDS.pack(grace_s))

    def _beat(self) -> None:
        """Ask who is there. Silence is counted in turns of this loop, so that its own pauses do not count."""
        self._beating = self._loop.call_later(_BEAT_S, self._beat)
        for agent in tuple(self._agents.values()):
            if agent.link is None:
                continue
            agent.silent_s = 0 if agent.link.has_heard else agent.silent_s + 1
            agent.link.has_heard = False
            if agent.silent_s >= _SILENT_BEATS:
                self._lose(agent, f"nothing has come from it for {agent.silent_s} s")
            elif agent.state is not AgentState.COMING:
                self._ping(agent)

    def _ping(self, agent: RemoteAgent) -> None:
        agent.send(Word.PING, 0, SECONDS.pack(perf_counter()))

    # ------------------------------------------------------------------------------------------------- tickets

    def send(self, worker: int, tickets: Sequence[tuple[int, Any]]) -> None:
        """Give the worker tickets."""
        process = self.processes[worker]
        process.agent.send(Kind.TICKETS, process.life, *pack_tickets(tickets, ()))

    def _allocate(self, nbytes: int) -> memoryview:
        """Return memory for a buffer that is about to come: a slab, or beyond their budget any other."""
        return self._slabs.receive(nbytes) or memoryview(bytearray(nbytes))

    def on_frame(self, link: Link, frame: Frame) -> None:
        """Take a frame from an agent."""
        if (process := self._lives.get(frame.life)) is not None and process.agent.link is link:
            if frame.kind in OUTCOMES:
                self._on_outcome(process, frame)
            else:
                self._on_told(process, frame)
            return
        agent = next((agent for agent in self._agents.values() if agent.link is link), None)
        if frame.life or agent is None:  # of a worker that was given up, or of an agent
            return
        if frame.kind == Word.PONG:
            sent_at, there = _PONG.unpack(frame.body)
            agent.clock.note(sent_at, there, perf_counter())
        elif frame.kind == Word.HELLO and agent.state is AgentState.COMING:
            self._on_hello(agent, frame)
        elif frame.kind == Word.LEAVING:
            self._on_leaving(agent)
        elif frame.kind == Word.BYE:
            self._lose(agent, "it has ended")
        else:
            raise BadFrame(f"a frame of kind {frame.kind}, which is none of an agent's")

    def _on_outcome(self, process: RemoteWorker, frame: Frame) -> None:
        arrived_at = perf_counter()
        outcome = unpack(frame.kind, frame.body, functools.partial(decode, frame.buffers))
        if self.listener is not None and outcome.record.epoch == self._epoch.number:
            self.listener.on_outcome(process.worker_id, _as_seen_here(outcome, process.agent), arrived_at)

    def _on_told(self, process: RemoteWorker, frame: Frame) -> None:
        kind, listener = frame.kind, self.listener
        if kind == Kind.READY:
            (process.pid,) = NUMBER.unpack(frame.body)
            self._on_ready(process)
        elif kind == Word.DIED:
            self._on_died(process, pickle.loads(frame.body))
        elif kind == Word.STACK:
            process.on_stack(str(frame.body, "utf-8", "replace"))
        elif kind == Kind.UNREADABLE:
            wanted = [] if listener is None else listener.keys_of(process.worker_id, pickle.loads(frame.body))
            process.agent.send(Kind.KEYS, process.life, pickle.dumps([(seq, _by_value(keys)) for seq, keys in wanted]))
        else:
            raise BadFrame(f"a frame of kind {kind}, which is none of a worker's")

    def _on_ready(self, process: RemoteWorker) -> None:
        """A worker has opened the dataset: from now on it has a place."""
        agent, worker = process.agent, process.worker_id
        process.is_ready = agent.has_served = True
        self._failed_starts = 0
        if agent.state is AgentState.LEAVING or self._closing:
            return
        self.processes[worker] = process
        if self.listener is not None:
            self.listener.on_ready(worker)

    def _on_died(self, process: RemoteWorker, death: Death) -> None:
        """A worker has ended on its own. One that could not be set up is no loss, and no fault of a batch."""
        worker, agent = process.worker_id, process.agent
        del self._lives[process.life]
        process.on_died(death)
        is_placed = self.processes.get(worker) is process
        if is_placed and death.was_set_up:
            if self.listener is not None:
                self.listener.on_died(worker, process)
            return
        if is_placed:
            del self.processes[worker]
            if self.listener is not None:
                self.listener.on_lost(worker)
        said = describe_death(process.pid, death.exitcode) if death.exitcode is not None else ""
        words = process.output.decode(errors="replace")
        self._not_started(f"A worker on node {agent.node} ended before it was ready. {said} {words}")
        agent.failed += 1
        if agent.failed == len(agent.workers):
            self._forget(agent)

    def _on_leaving(self, agent: RemoteAgent) -> None:
        """Who runs its machine wants that back: its workers finish what they have, and go."""
        agent.state = AgentState.LEAVING
        log.info("The agent on node %s leaves, with %d workers", agent.node, len(agent.workers))
        for worker in agent.workers:
            if worker in self.processes and self.listener is not None:
                self.listener.on_left(worker)
        self._maybe_end(agent, _LAST_S)


def _as_seen_here(outcome: Outcome, agent: RemoteAgent) -> Outcome:
    """Put times on this machine's clock, and say of an error on which machine it was raised."""
    record = outcome.record._replace(began=outcome.record.began - agent.clock.ahead_s)
    if type(outcome) is Failure and isinstance(error := outcome.error, RemoteError):
        hint = _ELSEWHERE if error.type_name in _MISSING else ""
        return outcome._replace(record=record, error=replace(error, where=f"{error.where} on node {agent.node}{hint}"))
    return outcome._replace(record=record)


def _by_value(keys: Any) -> bytes | RemoteError:
    """Pickle keys that did not come out there as they were pickled first: their classes may be the main module's."""
    try:
        return bytes(cloudpickle.dumps(keys, 5))
    except Exception as error:
        return RemoteError.capture(error, "in the main process")
