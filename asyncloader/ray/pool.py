"""The workers on other machines, as one of the engine's backends: agents come and go, and their workers with them.

    Fleet: agents ── here, leaving, forgotten ──> RemotePool ── on_ready, on_outcome, on_lost, on_left ──> session
                  <── start, dismiss, tickets ───            <── want, send, add, discard, dismiss ───────

A worker has a place (its id) from the moment it is ready. Each process that takes a place is a life of its own, and
what comes over the wire says of which life it is: so a batch of one that was given up counts for nothing.

What waits here is bounded by tickets: each is answered once, and no more of them are out than the consumer's window,
and what may be run ahead, allow. So the other side needs no other leave to send.
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
from asyncloader.messages.messages import EpochSpec, Kind, WorkerSpec, pack_tickets, pickle_tickets
from asyncloader.messages.outcome import OUTCOMES
from asyncloader.observe.traffic import Traffic
from asyncloader.ray.fleet import Fleet
from asyncloader.ray.launcher import Asked, Launcher
from asyncloader.ray.outcomes import outcome_of, pickled_keys
from asyncloader.ray.wire import NUMBER, SECONDS, Death, Frame, Word
from asyncloader.ray.worker import AgentState, RemoteAgent, RemoteWorker
from asyncloader.transport.slab import slab_pool
from asyncloader.worker.guarded_loop import GuardedLoop

log = logging.getLogger("asyncloader")

_LAST_S = 2.0
"""What is left of its workers when an agent goes is given so long. Seconds."""

_FAILED_STARTS = 3
"""Where there are no local workers, so many ends in a row before any worker was ready are the end of the run."""


class RemotePool:
    """Owner of the places of workers at agents. On the loop, but for `wait_dead`.

    Args:
        loop: The portal's.
        spec: What the workers work with.
        options: Of the user.
        launcher: Launches agents; it is open.
        first: The least id that workers of agents may have: below it are local ones.
        traffic: Counts what comes, or None.
        wanted: How many there are to be at the beginning; None for as many as the options say.
        slots: Where it matters who makes a batch, there are so many workers from the beginning on: what is for one that
            has not come waits, and one that is lost has a successor when there is an agent for it. 0 for workers that
            come and go.
    """

    has_processes = False
    takes_long = False

    def __init__(
        self,
        loop: GuardedLoop,
        spec: WorkerSpec,
        options: Asked,
        launcher: Launcher,
        first: int,
        traffic: Traffic | None = None,
        *,
        wanted: int | None = None,
        slots: int = 0,
    ) -> None:
        self.processes: dict[int, RemoteWorker] = {}
        self.listener: Listener | None = None
        self.fleet = Fleet(loop, self, spec, options, launcher, first, slots, self._allocate, traffic)
        self._loop = loop
        self._launcher = launcher
        self._has_others = first > 0
        self._most = options.num_workers or options.max_workers
        self._wanted = self._most if wanted is None else wanted
        self._asks = wanted is not None or slots > 0
        self._num_lives = 0
        self._num_staying = 0  # at agents that are here
        self._is_open = False
        self._has_slots = slots > 0
        self._started: Callable[[], None] = _nothing
        self._vacant = set(range(first, first + slots))  # slots that wait for an agent
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
        """Listen, and have agents launched: they come when they come. There is nothing to launch here.

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
        for agent in self.fleet.agents.values():
            for process in agent.lives.values():
                process.outstanding = 0
        self.fleet.begin_epoch(epoch)

    def end(self, grace_s: float) -> None:
        """Tell all agents to go, with their workers; give up who is left after the grace and a moment."""
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
        """Wait until all agents are gone, and who launched them has let go. In any thread but the loop's."""
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
        """Let go of workers that are too many, or have free places of agents filled: others are wanted, or are there.

        Where there are fewest they go first, for a node is given back with its last worker.
        """
        if self.fleet.is_closing or self._has_slots:
            return
        agents = tuple(self.fleet.agents.values())
        here = [agent for agent in agents if agent.state is AgentState.HERE]
        here.sort(key=lambda agent: len(agent.staying))
        for agent in here:
            for worker in heapq.nlargest(-self._num_lacking, agent.staying):
                self._let_go(agent, worker)
        for agent in reversed(here):
            self._fill(agent)
        lacking = self._num_lacking
        for agent in [agent for agent in agents if agent.state is AgentState.COMING]:
            if lacking <= 0:
                self.fleet.forget(agent)
            lacking -= len(agent.workers)

    @property
    def _num_lacking(self) -> int:
        return (sys.maxsize if self._wanted is None else self._wanted) - self._num_staying

    def _fill(self, agent: RemoteAgent) -> None:
        """Have workers started in the free places of an agent, as far as they are wanted; without any it goes."""
        if self.fleet.is_closing or agent.state is not AgentState.HERE:
            return
        if self._has_slots:
            for worker in sorted(agent.workers & self._vacant):
                self._vacant.discard(worker)
                self._put(self._begin_life(agent, worker))
            self._started()
            return
        while agent.free and self._num_lacking > 0:
            worker = heapq.heappop(agent.free)
            agent.staying[worker] = self._begin_life(agent, worker)
            self._num_staying += 1
        self._maybe_send_home(agent, 0.0)

    def _let_go(self, agent: RemoteAgent, worker: int) -> None:
        """Have a worker leave: one that has a place finishes what it has first."""
        if worker not in self.processes:
            self._finish(agent.staying[worker], 0.0)
            self._vacate(agent, worker)
            return
        del agent.staying[worker]
        self._num_staying -= 1
        if self.listener is not None:
            self.listener.on_left(worker)

    def _vacate(self, agent: RemoteAgent, worker: int) -> None:
        """Nobody is in this place of an agent any more."""
        self._num_staying -= agent.staying.pop(worker, None) is not None
        heapq.heappush(agent.free, worker)

    def _put(self, process: RemoteWorker) -> None:
        """Have a place be this worker's."""
        self._remove(process.worker_id)
        self.processes[process.worker_id] = process
        process.agent.num_placed += 1

    def _remove(self, worker: int) -> RemoteWorker | None:
        """Have a place be nobody's; return whose it was."""
        process = self.processes.pop(worker, None)
        if process is not None:
            process.agent.num_placed -= 1
        return process

    def add(self, worker: int, num_workers: int) -> None:
        """Have a worker started in the place of another, which is gone or finishes, by the same agent.

        A slot whose agent is gone, or about to go, waits for one.
        """
        if worker in self.processes:
            self._finish(self.processes[worker], END_GRACE_S)
        agent = self.fleet.homes.get(worker)
        if not self._has_slots or (agent is not None and agent.state is AgentState.HERE):
            self._put(self._begin_life(self.fleet.homes[worker], worker))
            return
        self._remove(worker)
        self._vacant.add(worker)
        if agent is not None and agent.state is AgentState.LEAVING:  # an agent that is coming keeps the place
            self.fleet.take_place(worker)
            self._maybe_send_home(agent, 0.0)

    def prepare(self, worker: int, num_workers: int) -> None:
        """Start nothing beforehand: an agent forks, which takes a moment."""

    def _begin_life(self, agent: RemoteAgent, worker: int) -> RemoteWorker:
        self._num_lives += 1
        life = self._num_lives
        made = agent.lives[life] = RemoteWorker(worker, life, agent, self._loop)
        starts, told = self.fleet.epoch.starts, self.fleet.num_places
        agent.send(Word.ADD, life, pickle.dumps((worker, told, None if starts is None else starts[worker])))
        return made

    def discard(self, worker: int) -> None:
        """Have this worker killed: another will take its place, and nothing that it has sent counts."""
        process = self.processes[worker]
        if process.agent.lives.pop(process.life, None) is not None:
            process.agent.send(Word.DISCARD, process.life)
            process.on_gone()

    def dismiss(self, worker: int, grace_s: float) -> None:
        """Let this worker finish, if it is there: it has no tickets. Its place is free."""
        process = self._remove(worker)
        if process is None:
            return
        self._vacate(process.agent, worker)
        self._finish(process, grace_s)
        self._maybe_send_home(process.agent, grace_s)
        self._loop.call_soon(self._fill, process.agent)  # by now others may be wanted

    def _finish(self, process: RemoteWorker, grace_s: float) -> None:
        if process.agent.lives.pop(process.life, None) is not None:
            process.agent.send(Word.DISMISS, process.life, SECONDS.pack(grace_s))
            process.on_gone()

    def _maybe_send_home(self, agent: RemoteAgent, grace_s: float) -> None:
        """Let an agent go that is leaving, or whose workers are not wanted any more, when it has none."""
        if agent.num_placed or self.fleet.is_closing:
            return
        if agent.state is AgentState.LEAVING or (agent.state is AgentState.HERE and not agent.lives):
            self.fleet.send_home(agent, grace_s)

    # -------------------------------------------------------------------------------------- agents come and go

    def on_here(self, agent: RemoteAgent) -> None:
        """An agent can be given workers."""
        self._fill(agent)

    def on_leaving(self, agent: RemoteAgent) -> None:
        """An agent wants no more tickets: its workers finish what they have, and go."""
        self._none_stay(agent)
        for worker in sorted(agent.workers):
            if worker in self.processes and self.listener is not None:
                self.listener.on_left(worker)
        self._maybe_send_home(agent, _LAST_S)
        self._loop.call_soon(self._fit)  # others may have places for as many

    def _none_stay(self, agent: RemoteAgent) -> None:
        self._num_staying -= len(agent.staying)
        agent.staying.clear()

    def on_forgotten(self, agent: RemoteAgent, why: str) -> None:
        """An agent was given up: its workers are lost, and their places free."""
        self._none_stay(agent)
        lost, agent.lives = tuple(agent.lives.values()), {}
        for process in lost:
            process.on_lost(why)
        listener = None if self.fleet.is_closing else self.listener
        if self._has_slots:  # there is to be another in each, and what it begins with has to be known
            for process in lost:
                if listener is not None:
                    listener.on_died(process.worker_id, process)
            return
        for worker in sorted(agent.workers):
            if self._remove(worker) is not None and listener is not None:
                listener.on_lost(worker)
        self._loop.call_soon(self._fit)  # others may have places for as many

    def not_started(self, why: str) -> None:
        """An agent or a worker has ended before it was of any use. What was said last is not said again."""
        if why != self._last_failure:
            log.warning("%s", why)
        self._last_failure = why
        self._failed_starts += 1
        if self._failed_starts < _FAILED_STARTS:
            return
        if self._has_slots or not (self._has_others or self.processes):
            others = "these batches cannot be made by others" if self._has_slots else "there are none here"
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
            process.outstanding += len(pickled)
        return refused

    def _allocate(self, nbytes: int) -> memoryview:
        """Return memory for a buffer that is about to come: a slab, or beyond their budget any other."""
        return self._slabs.receive(nbytes) or memoryview(bytearray(nbytes))

    def on_worker_frame(self, agent: RemoteAgent, frame: Frame) -> None:
        """Take a frame about a worker; one that was given up meanwhile, or is another agent's, is nobody's."""
        process = agent.lives.get(frame.life)
        if process is None:
            return
        if frame.kind not in OUTCOMES:
            self._on_told(process, frame)
            return
        arrived_at = perf_counter()
        outcome = outcome_of(frame, agent)
        if self.listener is None or outcome.record.epoch != self.fleet.epoch.number:
            return
        process.outstanding -= 1
        self.listener.on_outcome(process.worker_id, outcome, arrived_at)

    def _on_told(self, process: RemoteWorker, frame: Frame) -> None:
        kind = frame.kind
        if kind == Kind.READY:
            (process.pid,) = NUMBER.unpack(frame.body)
            self._on_ready(process)
        elif kind == Word.DIED:
            self._on_died(process, pickle.loads(frame.body))
        elif kind == Word.STACK:
            process.on_stack(str(frame.body, "utf-8", "replace"))
        else:
            raise BadFrame(f"a frame of kind {kind}, which is none of a worker's")

    def _on_ready(self, process: RemoteWorker) -> None:
        """A worker has opened the dataset: from now on it has a place."""
        agent, worker = process.agent, process.worker_id
        process.is_ready = agent.has_served = True
        self._failed_starts = 0
        if agent.state is AgentState.LEAVING or self.fleet.is_closing:
            return
        self._put(process)
        if self.listener is not None:
            self.listener.on_ready(worker)

    def _on_died(self, process: RemoteWorker, death: Death) -> None:
        """A worker has ended on its own. One that could not be set up is no loss, and no fault of a batch."""
        worker, agent = process.worker_id, process.agent
        del agent.lives[process.life]
        process.on_died(death)
        is_placed = self.processes.get(worker) is process
        if self._has_slots or (is_placed and death.was_set_up):
            if self.listener is not None:
                self.listener.on_died(worker, process)
            return
        self._vacate(agent, worker)
        if is_placed:
            self._remove(worker)
            if self.listener is not None:
                self.listener.on_lost(worker)
        said = describe_death(process.pid, death.exitcode) if death.exitcode is not None else ""
        words = process.output.decode(errors="replace")
        self.not_started(f"A worker on node {agent.node} ended before it was ready. {said} {words}")
        agent.failed += 1
        if agent.failed >= len(agent.workers):
            self.fleet.forget(agent)


def _nothing() -> None:
    """Have nothing sent."""
