"""The workers of one loader on other machines: actors of Ray, and what the loop thread knows of them.

    session ── start, send, add, end ──> RayPool ── RayWorker ── tell(number, kind, body) ──> WorkerActor
            <── on_ready, on_outcomes, on_died ──            <── hear(): messages ──────────

Ray places actors, starts them, finds out that they have ended, and carries batches. An actor that Ray has no room for
stays pending, so that an autoscaler sees it. Messages are those of worker processes, and so is what follows from them.
"""

from __future__ import annotations

import contextlib
import pickle
from asyncio import TimerHandle
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from time import monotonic, perf_counter
from typing import Any

import cloudpickle
import numpy as np
import ray
from ray.exceptions import RayActorError

from asyncloader.backends.backend import END_GRACE_S, Backend, Launch
from asyncloader.backends.worker import Worker, WorkerState
from asyncloader.datasets.records import pickled
from asyncloader.errors import LoaderClosedError, WorkerStartError
from asyncloader.log import log
from asyncloader.loops import GuardedLoop
from asyncloader.messages.messages import EpochSpec, Kind, WorkerSpec
from asyncloader.messages.outcome import OUTCOMES, unpack
from asyncloader.messages.pickled_spec import pickle_by_value
from asyncloader.messages.tickets import pack_tickets, pickle_tickets
from asyncloader.ray.actor import Hello, Message
from asyncloader.ray.facts import differences, facts
from asyncloader.transport.recycle import RECYCLED_MIN, Recycler

_NO_RAY = "ray.shutdown() was called while workers were needed."
_LOOK_S = 1.0
"""So often a look is taken whether Ray is there: calls that are on their way when it is shut down may never end."""


class RayWorker(Worker):
    """A worker on another machine, as the loop thread knows it.

    Args:
        worker_id: From 0.
        loop: The portal's.
        actor: The handle of its actor, which may be pending.
        owner: Is told of its messages and of its end.
        overlaps: Its samples are fetched on a loop.
    """

    answers_within_s: float = Worker.answers_within_s + 1.0
    pid: int
    exitcode: int | None
    output: bytearray
    why_no_other: Exception | None

    def __init__(self, worker_id: int, loop: GuardedLoop, actor: Any, owner: RayPool, *, overlaps: bool) -> None:
        super().__init__(worker_id, loop)
        self.state: WorkerState = WorkerState.RUNNING
        self.started_at: float = monotonic()
        self._actor = actor
        self._owner = owner
        self._overlaps = overlaps
        self._num_told = 0
        self._node = ""  # Ray's id of it
        self._heard: deque[tuple[Message, Future[Any] | None]] = deque()  # with the buffers, which may be on their way
        self._timer: TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<RayWorker {self.worker_id} {self.state.name} pid={self.pid} on node {self._node}>"

    def open(self, parts: Any, are_read_only: Sequence[bool], epoch: EpochSpec) -> None:
        """Have the worker begin, as soon as its actor is there and has been found fit."""
        self._ask_actor("hello", partial(self._on_hello, parts, are_read_only, epoch))

    def put(self, kind: int, contents: Any) -> None:
        """Send it a message."""
        self.tell(kind, pickle.dumps(contents))

    def tell(self, kind: int, body: bytes) -> None:
        """Send it a message that is pickled."""
        self._call("tell", self._num_told, kind, body)
        self._num_told += 1

    def _call(self, method: str, *args: Any) -> Any:
        """Call the actor, unless there is none any more, or no Ray: a call would begin another one."""
        if self._actor is not None and ray.is_initialized():
            return getattr(self._actor, method).remote(*args)
        self._loop.call_soon(self.on_error, LoaderClosedError(_NO_RAY))
        return None

    def _ask_actor(self, method: str, take: Callable[[Any], None]) -> None:
        """Call a method, and take what it returns; what it raises ends the worker."""
        if (ref := self._call(method)) is not None:
            self._await(ref, partial(self._on_answer, take))

    def _on_answer(self, take: Callable[[Any], None], answer: Future[Any]) -> None:
        if not self.is_alive:
            return
        if (error := answer.exception()) is not None:
            self.on_error(error)
        else:
            take(answer.result())

    def _await(self, ref: Any, take: Callable[[Future[Any]], None]) -> Future[Any]:
        """Have an answer of the actor taken on the loop. Ray tells of it in a thread of its own."""

        def post(answer: Future[Any]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the interpreter ends
                self._loop.call_soon_threadsafe(take, answer)

        future: Future[Any] = ref.future()
        future.add_done_callback(post)
        return future

    def _on_hello(self, parts: Any, are_read_only: Sequence[bool], epoch: EpochSpec, hello: Hello) -> None:
        self._node, self.pid = hello.node, hello.pid
        if self._owner.accepts(hello):
            self._call("open", parts, are_read_only, epoch)
            self._listen()

    def _listen(self) -> None:
        self._ask_actor("hear", self._on_heard)

    def _on_heard(self, messages: list[Message]) -> None:
        if messages[-1].kind != Kind.END:  # a call that is never answered would keep the actor
            self._listen()
        for message in messages:
            buffers = None if message.buffers is None else self._await(message.buffers, self._take)
            self._heard.append((message, buffers))
        self._take()

    def _take(self, _: Future[Any] | None = None) -> None:
        """Take messages in the order in which they were sent, as far as their buffers are there."""
        arrived_at = perf_counter()
        while self.is_alive and self._heard:
            message, buffers = self._heard[0]
            if buffers is not None and not buffers.done():
                return
            self._heard.popleft()
            if message.kind == Kind.END:
                self._on_end(*pickle.loads(message.body))
            elif buffers is None or buffers.exception() is None:
                self._owner.on_heard(self, message, buffers and buffers.result(), arrived_at)
            else:  # a batch is lost, with the actor as a rule: no outcome would stand for it
                self.on_error(buffers.exception())

    # ------------------------------------------------------------------------------------------------------- the end

    def end(self, grace_s: float) -> None:
        """Tell the worker to finish; kill it after ``grace_s`` seconds, or at once if it has not begun."""
        if not self.is_alive:
            return
        if not self._node:
            self.kill()
            return
        self.state = WorkerState.ENDING
        self.put(Kind.END, None)
        if self._timer is None:
            self._timer = self._loop.call_later(max(grace_s, 0.0), self.kill)

    def kill(self) -> None:
        """End it at once."""
        if self.is_alive:
            self.state = WorkerState.ENDING
            self._gone()

    def _on_end(self, code: int, words: str) -> None:
        """The worker has ended by itself, or as it was told."""
        self.exitcode = code
        self.output += words.encode(errors="replace")
        self._actor = None  # Ray ends an actor that nobody refers to, which runs what the user has registered for that
        self._gone()

    def on_error(self, error: BaseException | None) -> None:
        """An answer of the actor will not come: the actor has ended, or its node cannot be reached any more."""
        if not self.is_alive:
            return
        self.output += str(error).encode(errors="replace")
        if isinstance(error, RayActorError) and not error.actor_init_failed:
            self._gone()
        else:
            self._owner.refuse(str(error))

    def _gone(self) -> None:
        was_told, self.state = self.state is WorkerState.ENDING, WorkerState.DEAD
        if self._timer is not None:
            self._timer.cancel()
        self._heard.clear()
        actor, self._actor = self._actor, None
        if actor is not None and ray.is_initialized():
            ray.kill(actor)
        self._dead.set()
        self._owner.on_exit(self, was_told)

    def refuse(self, error: Exception) -> None:
        """End it, as each in its place would end."""
        self.why_no_other = error
        if self.is_alive:
            self._gone()

    # -------------------------------------------------------------------------------------------------------- stacks

    def _ask(self, ticket: int) -> None:
        if not self._node:
            self.on_awaits("Its actor is pending: Ray has not started it yet (see `ray status`).\n")
        elif self._overlaps:
            self.put(Kind.WHERE, ticket)
        elif (ref := self._call("where")) is not None:  # an error ends nothing here: `hear` tells of it
            self._await(ref, self._on_where)

    def _on_where(self, answer: Future[str]) -> None:
        if answer.exception() is None:
            self.on_awaits(answer.result())

    def _stack(self, awaits: str) -> str:
        return awaits


class RayPool(Backend[RayWorker]):
    """Owner of the actors of one loader. On the loop, but for its constructor and `wait_dead`.

    Args:
        loop: The portal's.
        spec: The dataset, collation and options of the workers.
        actors: Ray's class of actors, with the user's options.
        on_mismatch: What is done about an actor whose batches would differ.
        are_alike: Any worker can make any batch, so those that are there do the work of those that are not.

    Raises:
        Exception: as the pickling of the dataset raises it.
    """

    def __init__(self, loop: GuardedLoop, spec: WorkerSpec, actors: Any, on_mismatch: str, *, are_alike: bool) -> None:
        super().__init__(loop, spec)
        self._actors = actors
        self._on_mismatch = on_mismatch
        self._are_alike = are_alike
        parts = [memoryview(part) for part in pickle_by_value(spec)]
        self._are_read_only = [part.readonly for part in parts]
        self._parts = ray.put([np.frombuffer(part, np.uint8) for part in parts])  # travels once to each node
        self._recycler = Recycler()
        self._look: TimerHandle | None = None

    def start(self, epoch: EpochSpec, started: Callable[[], None]) -> Iterator[Launch]:
        """Ask Ray for all actors; there is nothing left to launch. They come when there is room for them."""
        self._epoch = epoch
        for worker in range(self._spec.num_workers):
            self._start_one(worker, epoch)
        self._look_for_ray()
        started()
        yield from ()

    def _look_for_ray(self) -> None:
        """End the run soon after Ray was shut down."""
        if ray.is_initialized():
            self._look = self._loop.call_later(_LOOK_S, self._look_for_ray)
            return
        for worker in self._everyone():
            worker.on_error(LoaderClosedError(_NO_RAY))

    def _start_one(self, worker: int, epoch: EpochSpec) -> None:
        actor = self._actors.remote(worker) if ray.is_initialized() else None  # or another Ray would begin
        started = RayWorker(worker, self._loop, actor, self, overlaps=self._spec.overlaps)
        self.processes[worker] = started
        started.open(self._parts, self._are_read_only, epoch)
        self._tell_absence(started)

    def _tell_absence(self, worker: RayWorker) -> None:
        """Have others do the work of a worker whose actor is pending: there may be no room for it for long.

        Before it is sent any ticket, since it would do those as well.
        """
        if self._are_alike and not worker.is_ready and self.listener is not None:
            self.listener.on_away(worker.worker_id)

    def add(self, worker: int, num_workers: int) -> None:
        """Ask Ray for an actor under this id: one more, or in the place of another, which is gone, or finishes."""
        self.dismiss(worker, END_GRACE_S)
        self._start_one(worker, self._epoch_of_newcomer(num_workers))

    def begin_epoch(self, epoch: EpochSpec) -> None:
        """Begin a new run over the data; tickets of the last one are forgotten."""
        self._epoch = epoch
        body = pickle.dumps(epoch)
        for worker in self.processes.values():
            worker.tell(Kind.EPOCH, body)
            self._tell_absence(worker)

    def send(self, worker: int, tickets: Sequence[tuple[int, Any]]) -> Sequence[tuple[int, Exception]]:
        """Give the worker tickets; return those whose keys cannot be pickled."""
        pickled, refused = pickle_tickets(tickets, _pickled_keys)
        if pickled:
            self.processes[worker].tell(Kind.TICKETS, b"".join(pack_tickets(pickled)))
        return refused

    # ---------------------------------------------------------------------------------------------------- receiving

    def accepts(self, hello: Hello) -> bool:
        """Return whether an actor is to make batches; otherwise the run ends."""
        here, there = facts(), hello.facts
        if not (differs := differences(here, there)):
            return True
        words = f"Batches of a worker on node {hello.node} may differ from those made here: {', '.join(differs)}."
        is_other = here["asyncloader"] != there["asyncloader"]
        if self._on_mismatch == "warn" and not is_other:
            log.warning("%s", words)
            return True
        allow = "" if is_other else ', or allow it: RayWorkers(on_mismatch="warn")'
        self.refuse(f"{words} Have the same there, by runtime_env for example{allow}.")
        return False

    def refuse(self, why: str) -> None:
        """End all workers: Ray, or this pool, has refused an actor, and would refuse the next one."""
        error = WorkerStartError(f"No worker can be had on another machine. {why}")
        for worker in self._everyone():
            worker.refuse(error)

    def on_heard(self, worker: RayWorker, message: Message, buffers: Any, arrived_at: float) -> None:
        """Take a message. Outcomes get the times of this machine's clock."""
        kind, body, _ = message
        if kind not in OUTCOMES:
            self.on_message(worker, kind, pickle.loads(body) if body else None, arrived_at)
            return
        outcome = unpack(kind, memoryview(body), partial(self._decode, buffers or ()))
        record = outcome.record
        record = record._replace(began=arrived_at - record.fetch_s - record.collate_s - record.encode_s)
        self.on_message(worker, kind, outcome._replace(record=record), arrived_at)

    def _decode(self, buffers: Sequence[Any], payload: memoryview) -> tuple[Any, int]:
        self._recycler.begin_batch()
        own = [self._copy(buffer) for buffer in buffers]  # Ray's memory cannot be written to
        return pickle.loads(payload, buffers=own), len(payload) + sum(map(len, own))

    def _copy(self, buffer: Any) -> memoryview:
        memory = self._recycler.allocate(len(buffer)) if len(buffer) >= RECYCLED_MIN else None
        memory = memory or memoryview(bytearray(len(buffer)))
        np.copyto(np.frombuffer(memory, np.uint8), buffer)
        return memory

    def _close(self) -> None:
        if self._look is not None:
            self._look.cancel()
        super()._close()


def _pickled_keys(keys: Any) -> list[bytes]:
    """Pickle the keys of a ticket; by value if classes of the main module are in them, which is another one there."""
    data = pickled(keys)  # rows of an engine's batch go without the rest of it
    return [cloudpickle.dumps(keys, 5) if b"__main__" in data else data]
