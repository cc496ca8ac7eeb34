"""A worker process and its parent, reduced to transport: tickets out, payloads back, a pipe between them.

What the loader's channel, scheduler and sessions do in earnest is here a few lines, so that tests of slabs say what
they are about.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch

from asyncloader.transport import collate
from asyncloader.transport.arena import Arena
from asyncloader.transport.codec import Encoder
from asyncloader.transport.loans import WorkerSlabs
from asyncloader.transport.slab import SlabPool
from asyncloader.transport.worker_loans import WorkerLoans

Make = Callable[[int], Any]


def serve(connection: Connection, handle: Arena | None, make: Make) -> None:
    """Be the worker: make the batch of each number that comes, until None comes."""
    torch.set_num_threads(1)
    slabs = WorkerSlabs(handle) if handle is not None else None
    encoder = Encoder(slabs)
    collate.install(encoder)
    waiting: list[Any] = []

    def ask(sizes: list[int], returned: list[int]) -> Any:
        connection.send(("ask", (sizes, returned)))
        while (message := connection.recv())[0] != "loans":
            waiting.append(message)
        return message[1]

    if slabs is not None:
        slabs.ask = ask
    while True:
        kind, content = waiting.pop(0) if waiting else connection.recv()
        if kind == "end":
            return
        number, loans = content
        if slabs is not None:
            slabs.add(loans)
        try:
            with encoder:
                batch = make(number)
            parts = encoder.encode(batch)
        except Exception as error:
            connection.send(("failure", pickle.dumps(error)))
            continue
        del batch
        encoder.release()
        connection.send(("result", b"".join(bytes(part) for part in parts)))


class Worker:
    """The parent's end of one worker."""

    def __init__(self, pool: SlabPool, make: Make, method: str = "fork") -> None:
        context: Any = multiprocessing.get_context(method)
        self._connection, theirs = context.Pipe()
        self.loans = WorkerLoans(pool)
        self.process = context.Process(target=serve, args=(theirs, pool.handle(), make))
        with self.loans.starting():
            self.process.start()
        theirs.close()
        self.asks = 0
        self.num_outstanding = 0
        self.payload_bytes = 0  # of the last result

    def send(self, number: int) -> None:
        self.num_outstanding += 1
        self._connection.send(("ticket", (number, self.loans.lend(self.num_outstanding))))

    def receive(self) -> Any:
        while True:
            kind, content = self._connection.recv()
            if kind == "ask":
                self.asks += 1
                self._connection.send(("loans", self.loans.grant(*content)))
                continue
            self.num_outstanding -= 1
            if kind == "failure":
                raise pickle.loads(content)
            self.payload_bytes = len(content)
            return self.loans.decode(content)[0]

    def get(self, number: int) -> Any:
        """One batch, there and back."""
        self.send(number)
        return self.receive()

    def kill(self) -> None:
        self.process.kill()
        self._end()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.send(("end", None))
        self._end()

    def _end(self) -> None:
        self.process.join()
        self.process.close()
        self._connection.close()
        self.loans.reclaim()


@contextlib.contextmanager
def worker(pool: SlabPool, make: Make, method: str = "fork") -> Iterator[Worker]:
    """A worker that has ended after the block."""
    made = Worker(pool, make, method)
    try:
        yield made
    finally:
        with contextlib.suppress(ValueError):  # a test has ended it
            made.process.is_alive()
            made.close()


def make_pool(nbytes: int = 1 << 30, **options: Any) -> SlabPool:
    return SlabPool(lambda reserved: nbytes, **options)
