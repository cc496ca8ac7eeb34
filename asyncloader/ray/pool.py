"""The workers on other machines, as one of the engine's backends: agents come and go, and their workers with them.

    Fleet: agents ── here, leaving, forgotten ──> RemotePool ── on_ready, on_outcome, on_lost, on_left ──> session
                  <── start, dismiss, tickets ───            <── want, send, add, discard, dismiss ───────

Where workers may come and go, a worker takes part in the run from the moment it is ready. Where they cannot, a run
begins with all of them: tickets for a worker that has not come wait, and a lost worker is replaced when there is an
agent with room. Each process is a life of its own, and frames say of which life they are: so a batch of a process that
was given up is dropped.

Tickets bound what waits here: each is answered once, and there are never more than the consumer's window and the
run-ahead allow. So an agent needs no other permission to send.
"""

from __future__ import annotations

import heapq
import logging
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any

from asyncloader.backends.backend import END_GRACE_S, Launch, Listener
from asyncloader.errors import WorkerStartError, describe_death
from asyncloader.messages.frames import BadFrame
from asyncloader.messages.messages import EpochSpec, Kind, WorkerSpec
from asyncloader.messages.outcome import OUTCOMES
from asyncloader.messages.tickets import pack_tickets, pickle_tickets
from asyncloader.observe.traffic import Traffic
from asyncloader.ray.fleet import Fleet
from asyncloader.ray.launcher import Access, Launcher
from asyncloader.ray.outcomes import outcome_of, pickled_keys
from asyncloader.ray.wire import NUMBER, Death, Frame, Word
from asyncloader.ray.worker import AgentState, RemoteAgent, RemoteWorker
from asyncloader.transport.slab import slab_pool
from asyncloader.worker.guarded_loop import GuardedLoop

log = logging.getLogger("asyncloader")

_LAST_S = 2.0
"""What is left of its workers when an agent goes is given so long. Seconds."""

_FAILED_STARTS = 3
"""Where there are no local workers, so many ends in a row before any worker was ready are the end of the run."""


class RemotePool:
    """Owner of the workers of agents, and of their ids. On the loop, but for `wait_dead`.

    Args:
        loop: The portal's.
        spec: The dataset, collation and options of the workers.
        access: How agents may connect.
        launcher: Launches agents; it is open.
        first: The least id of a worker of an agent: below it are local ones.
        traffic: Counts what comes, or None.
        most: How many workers the options ask for at most; None for any number.
        num_wanted: How many there are to be at the beginning; None for `most`.
        num_fixed: How many workers a run begins with, because they cannot come and go; otherwise 0.
    """

    has_processes = False
    takes_long = False

    def __init__(
        self,
        loop: GuardedLoop,
        spec: WorkerSpec,
        access: Access,
        launcher: Launcher,
        first: int,
        traffic: Traffic | None = None,
        *,
        most: int | None = None,
        num_wanted: int | None = None,
        num_fixed: int = 0,
    ) -> None:
        self.processes: dict[int, RemoteWorker] = {}
        self.listener: Listener | None = None
        self.fleet = Fleet(loop, self, spec, access, launcher, num_fixed or None, self._allocate, traffic)
        self._loop = loop
        self._launcher = launcher
        self._has_others = first > 0
        self._most = most
        self._wanted = most if num_wanted is None else num_wanted
        self._asks = num_wanted is not None or num_fixed > 0
        self._is_fixed = num_fixed > 0
        self._free = list(range(first, first + num_fixed))  # a heap: ids that no worker has
        self._num_ids = first + num_fixed  # no id is as large as this, now or before
        self._num_lives = 0
        self._num_staying = 0
        self._is_open = False
        self._started: Callable[[], None] = _nothing
        self._failed_starts = 0
        self._last_failure = ""
        self._slabs = slab_pool()
        self._slabs.live_on(loop.loop)
        self._slabs.handle()
        self._slabs.enlist(self)
        self._dead = threading.Event()

    def __repr__(self) -> str:
        return f"<RemotePool {self.fleet!r}>"

    # ---------------------------------------------------------------------------------------------- lifecycle

    def start(self, epoch: EpochSpec, started: Callable[[], None]) -> Iterator[Launch]:
        """Listen, and have agents launched: they come when they come, so there is nothing left to launch.

        Raises:
            WorkerStartError: if this machine cannot listen where agents are to reach it.
        """
        self._started = started  # has what is for workers sent
        self.fleet.open(epoch)
        self._is_open = True
        self._launcher.want(self._wanted, ask=self._asks)
        started()
        yield from ()

    def begin_epoch(self, epoch: EpochSpec) -> None:
        """Begin a new run over the data; tickets of the last one are forgotten."""
        self.fleet.begin_epoch(epoch)

    def end(self, grace_s: float) -> None:
        """Tell all agents to go, with their workers; give up those that are left after the grace and a moment."""
        self.fleet.end(grace_s)

    def on_empty(self) -> None:
        """All agents are gone."""
        self._slabs.retire(self)
        self._dead.set()
        self._started = _nothing
        if self.listener is not None:
            self.listener.on_closed()
            self.listener = None

    def wait_dead(self, timeout_s: float) -> bool:
        """Wait until all agents are gone, and the launcher has let go of them. In any thread but the loop's."""
        deadline = time.monotonic() + timeout_s
        return self._dead.wait(timeout_s) and self._launcher.wait_closed(max(0.0, deadline - time.monotonic()))

    # ---------------------------------------------------------------------------------------- workers come and go

    def want(self, num_workers: int | None) -> None:
        """Have so many workers from now on, as far as there is room; None for as many as the options say."""
        self._asks = num_workers is not None
        self._wanted = self._most if num_workers is None else num_workers
        if self._is_open:  # local workers, which are started first, may have made batches by then
            self._launcher.want(self._wanted, ask=self._asks)
            self._fit()

    def _fit(self) -> None:
        """Let workers go that are too many, or have the room of agents filled, now that others are wanted or there.

        Workers of the agents with the fewest go first, for a node is given back with its last worker.
        """
        if self.fleet.is_closing or self._is_fixed:
            return
        agents = tuple(self.fleet.agents.values())
        here = [agent for agent in agents if agent.state is AgentState.HERE]
        staying = {agent: [worker for worker, process in agent.workers.items() if process.stays] for agent in here}
        here.sort(key=lambda agent: len(staying[agent]))
        for agent in here:
            for worker in heapq.nlargest(-self._num_lacking, staying[agent]):
                self._let_go(agent.workers[worker])
        for agent in reversed(here):
            self._fill(agent)
        lacking = self._num_lacking
        for agent in [agent for agent in agents if agent.state is AgentState.COMING]:
            if lacking <= 0:
                self.fleet.forget(agent)
            lacking -= agent.size

    @property
    def _num_lacking(self) -> int:
        return (sys.maxsize if self._wanted is None else self._wanted) - self._num_staying

    def _fill(self, agent: RemoteAgent) -> None:
        """Have workers started in the room of an agent, as far as they are wanted; without any worker it goes."""
        if self.fleet.is_closing or agent.state is not AgentState.HERE:
            return
        while len(agent.workers) < agent.size and (self._free if self._is_fixed else self._num_lacking > 0):
            if not self._free:
                self._free.append(self._num_ids)
                self._num_ids += 1
            self._start(agent, heapq.heappop(self._free))
        if self._is_fixed:
            self._started()
        else:
            self._maybe_send_home(agent, 0.0)

    def _start(self, agent: RemoteAgent, worker: int) -> RemoteWorker:
        """Have an agent start a worker. Where workers come and go it takes part in the run when it is ready."""
        self._num_lives += 1
        life = self._num_lives
        process = agent.lives[life] = agent.workers[worker] = RemoteWorker(worker, life, agent, self._loop)
        process.stays = True
        self._num_staying += 1
        if self._is_fixed:
            self.processes[worker] = process
        starts = self.fleet.epoch.starts
        agent.send(Word.ADD, life, pickle.dumps((worker, self._num_ids, None if starts is None else starts[worker])))
        return process

    def _let_go(self, process: RemoteWorker) -> None:
        """Have a worker leave. A worker that takes part in the run finishes its tickets first."""
        self._unwant(process)
        if self.processes.get(process.worker_id) is not process:
            process.end(0.0)
            self._release(process)
        elif self.listener is not None:
            self.listener.on_left(process.worker_id)

    def _unwant(self, process: RemoteWorker) -> None:
        self._num_staying -= process.stays
        process.stays = False

    def _release(self, process: RemoteWorker) -> None:
        """Have the id of a worker, and its room at its agent, be free."""
        self._unwant(process)
        del process.agent.workers[process.worker_id]
        heapq.heappush(self._free, process.worker_id)

    def add(self, worker: int, num_workers: int) -> None:
        """Have a worker started in the place of another, which is gone or finishes, by the same agent.

        Where workers cannot come and go, an id whose agent is gone, or about to go, waits for an agent with room.
        """
        if (before := self.processes.pop(worker, None)) is None:
            return  # it waits already
        before.end(END_GRACE_S)
        agent = before.agent
        if agent.state is AgentState.HERE or not self._is_fixed:
            self._unwant(before)
            self.processes[worker] = self._start(agent, worker)
            return
        if agent.state is AgentState.LEAVING:
            self._release(before)
            self._maybe_send_home(agent, 0.0)
        else:
            heapq.heappush(self._free, worker)
        for other in tuple(self.fleet.agents.values()):
            self._fill(other)

    def prepare(self, worker: int, num_workers: int) -> None:
        """Start nothing beforehand: an agent forks, which takes a moment."""

    def discard(self, worker: int) -> None:
        """Have this worker killed: another will take its place, and nothing that it has sent counts."""
        process = self.processes[worker]
        if process.agent.lives.pop(process.life, None) is not None:
            process.agent.send(Word.DISCARD, process.life)
            process.on_gone()

    def dismiss(self, worker: int, grace_s: float) -> None:
        """Let this worker finish, if it is there: it has no tickets. Its id is free."""
        if (process := self.processes.pop(worker, None)) is None:
            return
        process.end(grace_s)
        self._release(process)
        self._maybe_send_home(process.agent, grace_s)
        self._loop.call_soon(self._fill, process.agent)  # by now others may be wanted

    def _maybe_send_home(self, agent: RemoteAgent, grace_s: float) -> None:
        """Let an agent go that has no workers, because it is leaving or they are not wanted any more."""
        if not agent.workers and not self.fleet.is_closing and agent.state in (AgentState.LEAVING, AgentState.HERE):
            self.fleet.send_home(agent, grace_s)

    # -------------------------------------------------------------------------------------- agents come and go

    def on_here(self, agent: RemoteAgent) -> None:
        """An agent can be given workers."""
        self._fill(agent)

    def on_leaving(self, agent: RemoteAgent) -> None:
        """An agent wants no more tickets: its workers finish what they have, and go."""
        for _, process in sorted(agent.workers.items()):
            self._let_go(process)
        self._maybe_send_home(agent, _LAST_S)
        self._loop.call_soon(self._fit)  # others may have room for as many

    def on_forgotten(self, agent: RemoteAgent, why: str) -> None:
        """An agent was given up: its workers are lost, and their ids free."""
        lost, agent.lives = tuple(agent.lives.values()), {}
        for process in lost:
            process.on_lost(why)
        listener = None if self.fleet.is_closing else self.listener
        if self._is_fixed:  # each is replaced, and the place in its data at which the next one begins has to be known
            for process in lost:
                if listener is not None:
                    listener.on_died(process.worker_id, process)
            return
        for worker, process in sorted(agent.workers.items()):
            self._release(process)
            if self.processes.pop(worker, None) is not None and listener is not None:
                listener.on_lost(worker)
        self._loop.call_soon(self._fit)  # others may have room for as many

    def not_started(self, why: str) -> None:
        """An agent or a worker has ended before it was of any use. The same reason is not logged twice in a row."""
        if why != self._last_failure:
            log.warning("%s", why)
        self._last_failure = why
        self._failed_starts += 1
        if self._failed_starts < _FAILED_STARTS:
            return
        if self._is_fixed or not (self._has_others or self.processes):
            others = "these batches cannot be made by others" if self._is_fixed else "there are none here"
            self.fail(WorkerStartError(f"No worker can be had on another machine, and {others}. {why}"))

    def fail(self, error: Exception) -> None:
        """The run cannot go on."""
        if self.listener is not None and not self.fleet.is_closing:
            self.listener.on_failed(error)

    # ------------------------------------------------------------------------------------------------- tickets

    def send(self, worker: int, tickets: Sequence[tuple[int, Any]]) -> Sequence[tuple[int, Exception]]:
        """Give the worker tickets; return those whose keys cannot be pickled."""
        process = self.processes[worker]
        pickled, refused = pickle_tickets(tickets, pickled_keys)
        if pickled:
            process.agent.send(Kind.TICKETS, process.life, pack_tickets(pickled))
        return refused

    def _allocate(self, nbytes: int) -> memoryview:
        """Return memory for a buffer that is about to come: a slab, or beyond their budget any other."""
        return self._slabs.receive(nbytes) or memoryview(bytearray(nbytes))

    def on_worker_frame(self, agent: RemoteAgent, frame: Frame) -> None:
        """Take a frame about a worker. Drop those about workers given up, or of another agent."""
        process, kind = agent.lives.get(frame.life), frame.kind
        if process is None:
            return
        if kind in OUTCOMES:
            arrived_at = perf_counter()
            outcome = outcome_of(frame, agent)
            if self.listener is not None and outcome.record.epoch == self.fleet.epoch.number:
                self.listener.on_outcome(process.worker_id, outcome, arrived_at)
        elif kind == Kind.READY:
            (process.pid,) = NUMBER.unpack(frame.body)
            self._on_ready(process)
        elif kind == Word.DIED:
            self._on_died(process, pickle.loads(frame.body))
        elif kind == Word.STACK:
            process.on_awaits(str(frame.body, "utf-8", "replace"))
        else:
            raise BadFrame(f"a frame of kind {kind}, which is none of a worker's")

    def _on_ready(self, process: RemoteWorker) -> None:
        """A worker has opened the dataset: from now on it takes part in the run."""
        process.is_ready = process.agent.has_served = True
        self._failed_starts = 0
        if not process.stays or self.fleet.is_closing:
            return
        self.processes[process.worker_id] = process
        if self.listener is not None:
            self.listener.on_ready(process.worker_id)

    def _on_died(self, process: RemoteWorker, death: Death) -> None:
        """Note that a worker has ended by itself. One that was not set up yet is no loss, and no batch's fault."""
        worker, agent = process.worker_id, process.agent
        del agent.lives[process.life]
        process.on_died(death)
        takes_part = self.processes.get(worker) is process
        if self._is_fixed or (takes_part and death.was_set_up):
            if self.listener is not None:
                self.listener.on_died(worker, process)
            return
        self._release(process)
        if takes_part:
            del self.processes[worker]
            if self.listener is not None:
                self.listener.on_lost(worker)
        said = describe_death(process.pid, death.exitcode) if death.exitcode is not None else ""
        words = process.output.decode(errors="replace")
        self.not_started(f"A worker on node {agent.node} ended before it was ready. {said} {words}")
        agent.failed += 1
        if agent.failed >= agent.size:
            self.fleet.forget(agent)


def _nothing() -> None:
    """Have nothing sent."""
