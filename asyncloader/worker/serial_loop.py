"""Answer tickets one after the other: messages in, outcomes out. In a worker process or a worker thread.

WorkerTransport ── messages ──> SerialLoop ── a ticket ──> BatchMaker ── an outcome ──>
"""

from __future__ import annotations

from collections import deque
from time import perf_counter
from typing import Any

from asyncloader.messages.messages import EpochSpec, Kind, WorkerSpec
from asyncloader.messages.outcome import Outcome
from asyncloader.worker.batch_maker import BatchMaker
from asyncloader.worker.transport import WorkerTransport

_LOOK_EVERY_S = 0.001


class SerialLoop:
    """Answers tickets, one after the other; `OverlapLoop` has many samples in flight.

    Args:
        worker_id: From 0.
        transport: To the parent.
        epoch: The run over the data that the first tickets belong to.
        spec: The dataset and how batches are made of it; or an exception, which then answers every ticket.
    """

    def __init__(
        self, worker_id: int, transport: WorkerTransport, epoch: EpochSpec, spec: WorkerSpec | Exception
    ) -> None:
        self._transport = transport
        self._epoch = epoch
        self._maker = BatchMaker(worker_id, spec, transport)
        self._tickets: deque[tuple[int, Any]] = deque()
        self._ended = False  # before the tickets that come from now on
        self._idle_since = perf_counter()
        self._untold: list[list[Outcome]] = []
        self._is_confirmed = False
        self._looked_at = 0.0

    def work(self) -> None:
        """Become a worker, answer tickets until END, and clean up, in the modes of the thread that iterates."""
        with self._maker.modes():
            self.open()
            self.run()
            self.close()

    def open(self) -> None:
        """Become a worker. An exception answers every ticket."""
        self._maker.enter(self._epoch)

    def _begin(self) -> None:
        """Begin a run. Outcomes of the last run that were held back are dropped."""
        self._untold.clear()
        self._ended = self._is_confirmed = False
        self._maker.begin(self._epoch, self._open_source)

    def _open_source(self, dataset: Any) -> None:
        self._maker.open_fetcher(dataset)

    def _take_message(self, kind: int, contents: Any) -> None:
        """Take tickets, a new run, or the answer to ENDING."""
        if kind == Kind.TICKETS:
            self._tickets.extend(contents)
        elif kind == Kind.CONFIRM:
            self._confirm(contents)
        elif kind == Kind.EPOCH:
            self._tickets.clear()
            self._epoch = contents
            self._begin()

    def _tell_at_end(self, held: list[Outcome]) -> None:
        """Send an outcome that follows from the end of the data, once the parent has confirmed.

        By then the worker has lived on for a message to the parent and back. Data may seem to end because the worker
        ends: their source was killed with the worker, or the worker is being taken down.
        """
        if self._is_confirmed:
            self._transport.send_outcome(held)
            return
        self._untold.append(held)
        if len(self._untold) == 1:
            self._transport.send(Kind.ENDING, self._epoch.number)

    def _confirm(self, run: int) -> None:
        """The parent has answered."""
        if run == self._epoch.number:
            self._is_confirmed = True
            untold, self._untold = self._untold, []
            for held in untold:
                self._transport.send_outcome(held)

    def run(self) -> None:
        """Open the dataset, and answer tickets until END. An exception answers every ticket.

        Messages are looked for before a ticket, so that END and a new epoch do not wait behind a queue; but not more
        often than every millisecond, for a look is a system call.
        """
        self._begin()
        self._transport.send(Kind.READY)
        transport, maker, tickets = self._transport, self._maker, self._tickets
        while True:
            while not tickets or perf_counter() - self._looked_at > _LOOK_EVERY_S:
                message = transport.receive(wait=not tickets)
                self._looked_at = perf_counter()
                if message is None:
                    break
                kind, contents = message
                if kind == Kind.END:
                    return
                self._take_message(kind, contents)
            ticket, keys = tickets.popleft()
            if self._ended:
                continue
            held = [maker.answer(ticket, keys, perf_counter() - self._idle_since)]
            self._ended = held[0].kind == Kind.EXHAUSTED
            if self._ended or maker.has_ended:
                self._tell_at_end(held)
            else:
                transport.send_outcome(held)
            self._idle_since = perf_counter()

    def close(self) -> None:
        """Let the dataset, its iterator and what they hold run their own cleanup."""
        self._transport.leave()
        self._maker.close()
