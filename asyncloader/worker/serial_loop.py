"""Answer tickets one after the other: messages in, outcomes out. In a worker process or a worker thread.

WorkerTransport ── messages ──> SerialLoop ── a ticket ──> BatchMaker ── an outcome ──>
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from time import perf_counter
from typing import Any

from asyncloader.messages.messages import EpochSpec, Kind, WorkerSpec
from asyncloader.messages.outcome import Exhausted
from asyncloader.worker.batch_maker import BatchMaker
from asyncloader.worker.transport import WorkerTransport

_LOOK_EVERY_S = 0.001


class Ending:
    """Holds back what follows from the end of the data until the worker has lived on for a word to the parent and back.

    Data may seem to end because the worker does: their source was killed with it, or it is being taken down.
    """

    def __init__(self, transport: WorkerTransport) -> None:
        self._transport = transport
        self._run = -1
        self._is_confirmed = False
        self._untold: list[Callable[[], None]] = []

    def begin(self, run: int) -> None:
        """Begin another run: what was not told of the last one is for nobody."""
        self._run, self._is_confirmed = run, False
        self._untold.clear()

    def tell(self, tell: Callable[[], None]) -> None:
        """Call `tell` when the end is confirmed."""
        if self._is_confirmed:
            tell()
            return
        self._untold.append(tell)
        if len(self._untold) == 1:
            self._transport.send(Kind.ENDING, self._run)

    def confirm(self, run: int) -> None:
        """The parent has answered."""
        if run == self._run:
            self._is_confirmed = True
            untold, self._untold = self._untold, []
            for tell in untold:
                tell()


class SerialLoop:
    """Answers tickets, one after the other.

    Args:
        worker_id: From 0.
        transport: To the parent.
        epoch: The run over the data that the first tickets belong to.
        spec: What to work with; or why there is nothing: then that answers every ticket.
    """

    def __init__(
        self, worker_id: int, transport: WorkerTransport, epoch: EpochSpec, spec: WorkerSpec | Exception
    ) -> None:
        self._transport = transport
        self._epoch = epoch
        self._maker = BatchMaker(worker_id, spec, transport, self._run_coroutine)
        self._ending = Ending(transport)
        self._tickets: deque[tuple[int, Any]] = deque()
        self._runner: asyncio.Runner | None = None  # for samples that turn out to be awaitables
        self._ended = False  # before the tickets that come from now on
        self._idle_since = perf_counter()
        self._looked_at = 0.0

    def modes(self) -> contextlib.AbstractContextManager[None]:
        """Give the calling thread the modes of the one that iterates."""
        return self._maker.modes()

    def open(self) -> None:
        """Become a worker, and open the dataset. What that raises answers every ticket."""
        self._maker.enter(self._epoch)
        self._begin()
        self._transport.send(Kind.READY)

    def _begin(self) -> None:
        self._maker.begin(self._epoch)
        self._ending.begin(self._epoch.number)
        self._ended = False

    def run(self) -> None:
        """Answer tickets until END."""
        while self._read_messages():
            seq, keys = self._tickets.popleft()
            if not self._ended:
                self._answer(seq, keys)
                self._idle_since = perf_counter()

    def _read_messages(self) -> bool:
        """Read what is there, wait if there is no ticket; False when told to end.

        Looked at before a ticket, so that END and a new epoch do not wait behind a queue; but not more often than every
        millisecond, for a look is a system call.
        """
        while not self._tickets or perf_counter() - self._looked_at > _LOOK_EVERY_S:
            message = self._transport.receive(wait=not self._tickets)
            self._looked_at = perf_counter()
            if message is None:
                return True
            kind, contents = message
            if kind == Kind.TICKETS:
                self._tickets.extend(contents)
            elif kind == Kind.EPOCH:
                self._tickets.clear()
                self._epoch = contents
                self._begin()
            elif kind == Kind.CONFIRM:
                self._ending.confirm(contents)
            elif kind == Kind.END:
                return False
        return True

    def _answer(self, seq: int, keys: Any) -> None:
        held = [self._maker.make(seq, keys, perf_counter() - self._idle_since)]
        self._ended = type(held[0]) is Exhausted
        if self._ended or self._maker.has_ended:
            self._ending.tell(partial(self._transport.send_outcome, held))
        else:
            self._transport.send_outcome(held)

    def _run_coroutine(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        if self._runner is None:
            self._runner = asyncio.Runner()
        # Otherwise the runner's own context, of its first run: `sample_rng` would be that of the sample then.
        return self._runner.run(coroutine, context=contextvars.copy_context())

    def close(self) -> None:
        """Let the dataset, its iterator and what they hold run their own cleanup."""
        self._transport.leave()
        self._maker.close()
        if self._runner is not None:
            self._runner.close()
