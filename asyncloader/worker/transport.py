"""A worker's end of its connection to the parent, whatever that is made of.

    parent ── tickets, epochs, END ──> receive / listen ──> SerialLoop
    parent <── outcomes ──────────── send, send_outcome <── SerialLoop, OverlapLoop

`ProcessTransport` serves a worker process: frames over the channel, batches encoded into slabs. Workers in the process
of the trainer have :mod:`asyncloader.backends.threads.transport`.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter, process_time
from typing import Any

import torch
import torch.utils.data._utils.worker as torch_worker

from asyncloader.loops import GuardedLoop
from asyncloader.messages.frames import Buffer
from asyncloader.messages.messages import Kind, WorkerSpec
from asyncloader.messages.outcome import Outcome, pack
from asyncloader.seeding.generators import unlock_in_child
from asyncloader.seeding.seeder import seed_worker
from asyncloader.transport import collate
from asyncloader.transport.codec import Encoder
from asyncloader.transport.heap import Heap
from asyncloader.transport.whole import Whole
from asyncloader.worker.batch_maker import Host
from asyncloader.worker.channel import WorkerChannel

_CUDA_HERE = (
    "A worker process has initialised CUDA. Each worker that does so holds a context of its own: hundreds of MB of GPU "
    "memory. If workers need no GPU, find what uses it (a tensor made or loaded there, a library at its import); "
    "os.environ['CUDA_VISIBLE_DEVICES'] = '' in worker_init_fn forbids it."
)


class ParentGone(BaseException):
    """The connection has ended: there is nobody to work for."""


class WorkerTransport(Host):
    """The connection of a loop over tickets. For the thread that serves."""

    _is_muted = False
    _loop: GuardedLoop | None = None  # that listens
    _ready: Callable[[], None]

    def leave(self) -> None:
        """Undo the changes of `enter` that others see; changes for this thread alone end with the thread."""

    def receive(self, *, wait: bool) -> tuple[int, Any] | None:
        """Return the next message, kind and contents; None if there is none and ``wait`` is false.

        Raises:
            ParentGone: if there will be none.
        """
        raise NotImplementedError

    def listen(self, loop: GuardedLoop, ready: Callable[[], None]) -> None:
        """From now on call ``ready`` on the loop whenever there may be something to receive."""
        self._ready, self._loop = ready, loop  # in this order: a parent in another thread looks for the loop
        loop.call_soon(ready)  # for what came before

    def unlisten(self) -> None:
        """Do so no more."""
        self._loop = None

    def send(self, kind: int, body: Any = None) -> None:
        """Send a message, which is small."""
        raise NotImplementedError

    def send_outcome(self, held: list[Outcome]) -> None:
        """Send what has become of a ticket; of a batch that cannot be sent, why.

        The outcome is taken out of the list, so that the caller does not refer to the batch any more.
        """
        raise NotImplementedError

    def mute(self) -> None:
        """Send nothing from now on: the worker is dying, and what is cancelled on the way says what is not so."""
        self._is_muted = True


class ProcessTransport(WorkerTransport):
    """The end that a worker process has.

    Args:
        worker_id: From 0.
        channel: To the parent.
        heap: Its part of the shared memory, or None.
    """

    is_remote = True
    cpu_clock: Callable[[], float] = staticmethod(process_time)

    def __init__(self, worker_id: int, channel: WorkerChannel, heap: Heap | None) -> None:
        self.where: str = f"in DataLoader worker process {worker_id}"
        self._channel = channel
        self._heap = heap
        self._encoder = Encoder(heap)
        self._stacker: collate.Stacker
        self._warns_of_cuda = worker_id == 0  # one warning is enough; the other workers run the same code

    def come_up(self) -> None:
        """Have the generators free, and tell that the worker is up: what follows may take as long as the user wants."""
        torch.set_num_threads(1)
        unlock_in_child()
        torch.default_generator.get_state()  # never returns where a thread of the parent held its lock at the fork
        self.send(Kind.UP)

    def enter(self, worker_id: int, spec: WorkerSpec, open_dataset: Callable[[], Any]) -> None:
        """Seed the generators, become a worker in torch's eyes."""
        seed = seed_worker(spec.base_seed, worker_id)
        torch_worker._worker_info = torch_worker.WorkerInfo(
            id=worker_id, num_workers=spec.num_workers, seed=seed, dataset=open_dataset()
        )
        self._stacker = collate.install(self._encoder)
        self._encoder.watch_forks()

    def leave(self) -> None:
        """Let go of the dataset that ``get_worker_info()`` refers to; no batch is made after this."""
        torch_worker._worker_info = None
        if self._heap is not None:
            self._heap.trim()  # here, where nobody waits: it takes a quarter of a second for a GB

    # ------------------------------------------------------------------------------------------------- receiving

    def receive(self, *, wait: bool) -> tuple[int, Any] | None:
        """Return the next message. Slabs that came back with it are known."""
        try:
            while (frame := self._channel.receive(wait=wait)) is None and wait:
                # Between two epochs, say: slabs that nobody uses are given back, since others may need them.
                if self._heap is not None and self._heap.reserved:
                    self.send(Kind.IDLE)
        except (EOFError, OSError) as error:
            raise ParentGone from error
        if frame is None:
            return None
        kind, body = frame
        if kind == Kind.TICKETS:
            return kind, self._tickets(body)
        return kind, pickle.loads(body) if body else None

    def _tickets(self, body: Buffer) -> list[tuple[int, Any]]:
        returned, tickets = pickle.loads(body)
        if self._heap is not None:
            self._heap.returned(returned)
            if not tickets:  # the answer to IDLE
                self._heap.trim()
        return [(ticket, self._keys(pickled)) for ticket, pickled in tickets]

    def _keys(self, pickled: Sequence[Buffer]) -> Any:
        """Unpickle keys; return what that raises as a `CapturedError` in their place."""
        try:
            return pickle.loads(b"".join(pickled))
        except BaseException as error:  # SystemExit too: it is that of the ticket
            return self.capture(error)

    def listen(self, loop: GuardedLoop, ready: Callable[[], None]) -> None:
        """Watch the socket, from which earlier messages may have been read already."""
        super().listen(loop, ready)
        loop.add_reader(self._channel.fileno(), ready)
        os.set_blocking(self._channel.fileno(), True)  # which libuv has ended; sending relies on it

    def unlisten(self) -> None:
        """Leave the socket alone."""
        if self._loop is not None:
            self._loop.remove_reader(self._channel.fileno())
        super().unlisten()

    # --------------------------------------------------------------------------------------------------- sending

    def ends(self, error: BaseException) -> bool:
        """As torch: SystemExit and the like end the process. A cancelled task of the dataset's own is no reason to."""
        return not isinstance(error, (Exception, asyncio.CancelledError))

    def collator(self, collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return what makes a batch, straight into slabs where torch's default does it."""
        return partial(self._collate, collate_fn)

    def _collate(self, collate_fn: Callable[[Any], Any], samples: Any) -> Any:
        with self._encoder:
            return samples.batch(self._stacker.rows) if isinstance(samples, Whole) else collate_fn(samples)

    def send(self, kind: int, body: Any = None) -> None:
        """Send a frame."""
        self._send(kind, *([] if body is None else [pickle.dumps(body)]))

    def send_outcome(self, held: list[Outcome]) -> None:
        """Send what has become of a ticket, a batch encoded."""
        outcome: Outcome = held.pop()
        payload: list[Any] = []
        encode_s = 0.0
        if outcome.kind == Kind.BATCH:
            began = perf_counter()
            try:
                if self._warns_of_cuda:
                    self._warn_of_cuda()
                payload = self._encoder.encode(outcome.data)
            except BaseException as error:
                if self.ends(error):
                    raise
                outcome = outcome._replace(kind=Kind.FAILURE, data=None, error=self.capture(error))
            encode_s = perf_counter() - began
        kind, parts = pack(outcome, payload, encode_s)
        del outcome  # the memory of a batch is free while the frame is sent
        self._send(kind, *parts)

    def _warn_of_cuda(self) -> None:
        """Warn where this worker has initialised CUDA: often an import or a default device did it, unnoticed."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._warns_of_cuda = False
            warnings.warn(_CUDA_HERE, stacklevel=1)

    def _send(self, kind: int, *parts: Any) -> None:
        if self._is_muted:
            return
        try:
            self._channel.send(kind, *parts)
        except OSError as error:
            raise ParentGone from error
