"""An agent: a process on another machine that runs workers of ours there, and dials the trainer.

    trainer ── Link ── Agent ── AgentPool ── one worker process, with its slabs, per place
       tickets ──────────────────> (slabs are lent here) ──> worker
       <── pickle, buffers ─────── (straight from the slabs) <── batch

The pool beneath it is that of local workers. Tickets and batches pass through as they are: nothing of the user's is
unpickled here. Batches are sent from the slabs that the workers have written, which are on lease until the socket
has taken them.

The process is its workers' fork server: it has imported torch and us, has no thread that computes, and is told what to
do by its stdin. The process ends when the trainer says so, when the connection ends, or when its launcher is gone.

python -m asyncloader.ray.agent
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from time import perf_counter
from types import SimpleNamespace
from typing import Any, cast

from asyncloader.backends.backend import Listener
from asyncloader.backends.processes.pool import Pool
from asyncloader.backends.processes.process import WorkerProcess
from asyncloader.messages.frames import BadFrame, Buffer
from asyncloader.messages.mapped_pickle import open_mapped
from asyncloader.messages.messages import EpochSpec, Kind, WorkerSpec
from asyncloader.messages.outcome import split
from asyncloader.messages.snapshot import WorkerStart
from asyncloader.messages.tickets import with_loans
from asyncloader.ray.facts import facts
from asyncloader.ray.handshake import PROOF_BYTES, Refused, Stranger, agent_side, prove
from asyncloader.ray.launcher import Order
from asyncloader.ray.link import Link
from asyncloader.ray.wire import NUMBER, SECONDS, Death, Frame, Word
from asyncloader.transport.codec import open_payload
from asyncloader.worker.bootstrap import die_with_parent
from asyncloader.worker.guarded_loop import GuardedLoop

log = logging.getLogger("asyncloader")

_DIAL_S = 20.0
"""So long it may take until the trainer is reached, and has proven itself. Seconds."""

_SILENT_S = 60
"""So long the trainer may be silent: its machine may have been suspended, or its interpreter held up. Seconds."""

_LAST_S = 5.0
"""What has not ended so long after it should have is ended with the process."""


class AgentPool(Pool):
    """The workers of this machine, for a trainer on another one.

    Args:
        loop: The agent's loop.
        spec: The workers' options, without the user's objects.
        source: The pickle of the user's objects.
        epoch: The run that is going on.
        pass_on: Sends a frame to the trainer: kind, worker, parts, large buffers.
    """

    def __init__(
        self,
        loop: GuardedLoop,
        spec: WorkerSpec,
        source: Any,
        epoch: EpochSpec,
        pass_on: Callable[[int, WorkerProcess, list[Buffer], list[Any]], None],
    ) -> None:
        super().__init__(loop, multiprocessing.get_context("fork"), spec)
        self._source = source
        self._epoch = epoch
        self._pass_on = pass_on

    def start_one(self, worker: int, num_workers: int, start: WorkerStart | None) -> WorkerProcess:
        """Start a worker under an id, at a place in its data if that matters."""
        if self._epoch.starts is not None and start is not None:
            self._epoch.starts[worker] = start
        self.add(worker, num_workers)
        return self.processes[worker]

    def give(self, process: WorkerProcess, body: memoryview) -> None:
        """Give a worker tickets, as the trainer packed them, and slabs to do them in."""
        process.channel.send(Kind.TICKETS, with_loans(body, functools.partial(self._lend_for, process)))

    def _lend_for(self, process: WorkerProcess, count: int) -> list[Any]:
        self._outstanding[process.worker_id] += count
        return list(self._loans[process].lend(self._outstanding[process.worker_id]))

    def _on_outcome(self, process: WorkerProcess, kind: int, body: memoryview, arrived_at: float) -> None:
        """Pass on to the trainer what has become of a ticket."""
        self._outstanding[process.worker_id] = max(0, self._outstanding[process.worker_id] - 1)
        if kind == Kind.BATCH:
            self._pass_batch(process, body)
        else:
            self._pass_on(kind, process, [body], [])

    def _pass_batch(self, process: WorkerProcess, body: memoryview) -> None:
        head, payload = split(body)
        try:
            stream, buffers, is_placed, _ = open_payload(payload, self._loans[process])
        except (LookupError, ValueError) as error:
            raise BadFrame(f"a batch that names what is not there: {error}") from error
        if is_placed:
            self._pass_on(Kind.BATCH, process, [head], [*buffers, stream])
        else:
            self._pass_on(Kind.BATCH, process, [head, stream], buffers)


class Agent:
    """Owner of the connection to the trainer, and of the pool. On its loop.

    Args:
        loop: The loop of the process.
        order: The launcher's order.
        source: The pickle of the user's objects.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, order: Order, source: Any) -> None:
        self.failure = ""  # why it ended, if it should not have
        self._loop = GuardedLoop(loop, self._fail)
        self._order = order
        self._source = source
        self._link: Link
        self._pool: AgentPool | None = None
        self._workers: dict[int, WorkerProcess] = {}  # by the number of their lives
        self._lives: dict[WorkerProcess, int] = {}
        self._is_leaving = False  # its machine is taken away
        self._is_ending = False
        self._is_closed = False  # no worker is left
        self._has_met = False  # the trainer
        self._is_gone = False  # the trainer, or the connection to it
        self._over = asyncio.Event()

    async def run(self) -> None:
        """Dial the trainer, and stay until it says to go or is gone."""
        order, context = self._order, None
        if order.make_context is not None:
            import ssl

            context = pickle.loads(order.make_context)(ssl.Purpose.SERVER_AUTH)
        self._loop.loop.add_signal_handler(signal.SIGTERM, self._leave)
        try:
            async with asyncio.timeout(_DIAL_S):
                self._link = await self._dial(order, context)
        except (Refused, EOFError, OSError) as error:  # TimeoutError among them
            self.failure = f"the trainer cannot be reached at {order.host}:{order.port}: {error!r}"
            return
        os.register_at_fork(after_in_child=functools.partial(_leave_alone, self._link.fileno()))
        self._has_met = True
        self._link.send(Word.HELLO, 0, json.dumps(facts()).encode())
        if self._is_leaving:
            self._link.send(Word.LEAVING)
        self._loop.call_later(1.0, self._watch)
        await self._over.wait()

    async def _dial(self, order: Order, context: Any) -> Link:
        """Connect to the trainer; return the connection when each has proven itself to the other."""
        reader = asyncio.StreamReader(PROOF_BYTES)
        transport, _ = await self._loop.loop.create_connection(
            lambda: Stranger(reader), order.host, order.port, ssl=context, server_hostname=context and order.host
        )
        try:
            await prove(agent_side(order.secret, transport.write, order.number), reader)
            return Link(transport, self, self._loop, lambda nbytes: memoryview(bytearray(nbytes)))
        except BaseException:
            transport.abort()
            raise

    # ---------------------------------------------------------------------------------------------- the trainer

    def on_lost(self, link: Link, why: str) -> None:
        """The trainer has gone, or let go of this agent: nobody waits for anything."""
        if not self._is_ending:
            self.failure = why
        self._is_gone = True
        self._end(0.0)

    def on_frame(self, link: Link, frame: Frame) -> None:
        """Do what the trainer says."""
        kind, life, body, _ = frame
        if kind == Word.PING:
            link.send(Word.PONG, 0, body, SECONDS.pack(perf_counter()))
        elif kind == Word.END:
            self._end(*SECONDS.unpack(body))
        elif kind == Word.WELCOME:
            spec, epoch = pickle.loads(body)
            self._pool = AgentPool(self._loop, spec, self._source, epoch, self._pass_on)
            self._pool.listener = cast(Listener, self)  # of which it calls what is below
        elif self._pool is None:
            raise BadFrame(f"a frame of kind {kind} before the welcome")
        elif kind == Kind.EPOCH:
            self._pool.begin_epoch(pickle.loads(body))
        elif kind == Word.ADD:
            self._add(self._pool, life, *pickle.loads(body))
        else:
            self._for_worker(self._pool, kind, life, body)

    def _add(self, pool: AgentPool, life: int, worker: int, num_workers: int, start: WorkerStart | None) -> None:
        if self._is_ending:
            return
        try:
            process = pool.start_one(worker, num_workers, start)
        except Exception as error:
            self._link.send(Word.DIED, life, pickle.dumps(Death(None, str(error).encode(), was_set_up=False)))
            return
        self._workers[life], self._lives[process] = process, life

    def _for_worker(self, pool: AgentPool, kind: int, life: int, body: memoryview) -> None:
        """Do what the trainer says of a worker; if that has ended meanwhile the trainer hears of it."""
        process = self._workers.get(life)
        if process is None or not process.is_alive:
            return
        worker = process.worker_id
        if pool.processes.get(worker) is not process:
            return
        if kind == Kind.TICKETS:
            pool.give(process, body)
        elif kind == Word.STACK:
            (ticket,) = NUMBER.unpack(body)
            process.ask_stack(ticket, lambda text: self._link.send(Word.STACK, life, text.encode(errors="replace")))
        elif kind in (Word.DISMISS, Word.DISCARD):
            if kind == Word.DISCARD:
                pool.discard(worker)
            else:
                pool.dismiss(worker, *SECONDS.unpack(body))
            del self._workers[life], self._lives[process]
        else:
            raise BadFrame(f"a frame of kind {kind}, which is none of the trainer's")

    def _watch(self) -> None:
        """Give the trainer up if it has been silent for too long."""
        if self._link.beat() >= _SILENT_S:
            self._link.drop(f"the trainer was silent for {_SILENT_S} s")
        else:
            self._loop.call_later(1.0, self._watch)

    def _leave(self) -> None:
        """Finish what is in hand, because this machine is taken away. A trainer that is not met yet is told later."""
        if not self._is_leaving and self._has_met:
            self._link.send(Word.LEAVING)
        self._is_leaving = True

    # ---------------------------------------------------------------------------------------------- the workers

    def _pass_on(self, kind: int, process: WorkerProcess, parts: list[Buffer], buffers: list[Any]) -> None:
        self._link.send_large(kind, self._lives[process], parts, buffers)

    def on_ready(self, worker: int) -> None:
        """A worker has opened the dataset."""
        assert self._pool is not None
        process = self._pool.processes[worker]
        self._link.send(Kind.READY, self._lives[process], NUMBER.pack(process.pid))

    def on_died(self, worker: int, process: Any) -> None:
        """A worker has ended on its own."""
        life = self._lives.pop(process)
        del self._workers[life]
        death = Death(process.exitcode, bytes(process.output), process.was_set_up)
        self._link.send(Word.DIED, life, pickle.dumps(death))

    def on_closed(self) -> None:
        """All workers are gone."""
        self._is_closed = True
        if self._is_gone:
            self._over.set()
        else:  # what has been sent goes first
            self._link.send(Word.BYE)
            self._link.close()

    # -------------------------------------------------------------------------------------------------- the end

    def _fail(self, error: BaseException) -> None:
        """Something in this agent itself has failed: the trainer is told, and ends the run."""
        self.failure = "".join(traceback.format_exception(error))
        self._link.send(Word.FAILED, 0, self.failure.encode())
        self._link.close()
        self._end(0.0)

    def _end(self, grace_s: float) -> None:
        self._is_ending = True
        if self._is_closed or (self._pool is None and self._is_gone):
            self._over.set()
            return
        self._loop.call_later(grace_s + _LAST_S, self._over.set)
        if self._pool is None:
            self._link.close()
        else:
            self._pool.end(grace_s)


def _leave_alone(fd: int) -> None:
    """In a worker: the connection is the agent's. Its number stays taken, by ``/dev/null``."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, fd, inheritable=False)
    os.close(null)


def open_for_each(fd: int, sizes: list[int]) -> Callable[[], WorkerSpec]:
    """Return what every worker that is forked opens its dataset with: each has a descriptor of its own."""
    return functools.partial(open_mapped, SimpleNamespace(detach=functools.partial(os.dup, fd)), sizes)


def main() -> None:
    """Be an agent, as stdin says."""
    order, spec_fd, sizes, liveness, path = pickle.loads(sys.stdin.buffer.read())
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.close(null)
    for fd in (spec_fd, liveness):
        os.set_inheritable(fd, False)
    die_with_parent(liveness)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.path[:] = path
    sys.exit(run(order, open_for_each(spec_fd, sizes)))


def run(order: Order, source: Any) -> str | None:
    """Be an agent until the end. Returns why it should not have ended, or None."""
    loop_factory: Any = asyncio.new_event_loop
    try:
        import uvloop

        loop_factory = uvloop.new_event_loop
    except ImportError:
        pass
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        agent = Agent(runner.get_loop(), order, source)
        runner.run(agent.run())
    return f"asyncloader's agent {order.number} ended: {agent.failure}" if agent.failure else None


if __name__ == "__main__":
    main()
