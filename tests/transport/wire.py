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

import pytest
import torch

from asyncloader import machine
from asyncloader.transport import collate
from asyncloader.transport.codec import Encoder
from asyncloader.transport.free_list import Region
from asyncloader.transport.heap import Heap
from asyncloader.transport.slab import SlabPool
from asyncloader.transport.worker_heap import heap_for_a_worker

Make = Callable[[int], Any]


def serve(connection: Connection, heap: Heap | None, make: Make) -> None:
    """Be the worker: make the batch of each number that comes, until None comes."""
    torch.set_num_threads(1)
    encoder = Encoder(heap)
    collate.install(encoder)
    while True:
        kind, content = connection.recv()
        if kind == "end":
            if heap is not None:
                heap.trim()
            connection.send(("ended", None))
            return
        number, returned = content
        if heap is not None:
            heap.returned(returned)
        try:
            with encoder:
                batch = make(number)
            parts = encoder.encode(batch)
        except Exception as error:
            connection.send(("failure", pickle.dumps(error)))
            continue
        del batch
        connection.send(("result", b"".join(bytes(part) for part in parts)))


class Worker:
    """The parent's end of one worker."""

    def __init__(self, pool: SlabPool, make: Make, method: str = "fork") -> None:
        context: Any = multiprocessing.get_context(method)
        self._connection, theirs = context.Pipe()
        self.heap = heap_for_a_worker(pool)
        self.process = context.Process(target=serve, args=(theirs, self.heap.hand_over(1), make))
        self.process.start()
        theirs.close()
        self.payload_bytes = 0  # of the last result

    def send(self, number: int) -> None:
        self._connection.send(("ticket", (number, self.heap.returned())))

    def receive(self) -> Any:
        kind, content = self._connection.recv()
        if kind == "failure":
            raise pickle.loads(content)
        self.payload_bytes = len(content)
        return self.heap.decode(content)[0]

    def get(self, number: int) -> Any:
        """One batch, there and back."""
        self.send(number)
        return self.receive()

    def kill(self) -> None:
        self.process.kill()
        self._end()

    def close(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            self._connection.send(("end", None))
            while self._connection.recv()[0] != "ended":  # batches that nobody wants
                pass
        self._end()

    def _end(self) -> None:
        self.process.join()
        self.process.close()
        self._connection.close()
        self.heap.reclaim()


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


def receive(pool: SlabPool, nbytes: int) -> memoryview:
    """Return memory on lease, as that of a batch from a worker; it is given back when the lease ends."""
    first, _ = pool.new_heap()
    memory = pool.arena
    assert memory is not None
    assert memory.reserve(first, nbytes)
    return pool.lease(Region(first, nbytes), lambda region: memory.punch(region.offset, region.capacity) and None)


class Pool(SlabPool):
    """A pool that tests may empty, and let go of."""

    @property
    def leased_bytes(self) -> int:
        """The memory that tensors are in."""
        return sum(lease.region.capacity for lease in tuple(self._leases))

    def close(self) -> None:
        """Unmap the arena: there must be no lease and no worker."""
        self.drain()
        assert not self.leased_bytes
        if self.arena is not None:
            self.arena.close()
            self.arena = None


def bound(monkeypatch: pytest.MonkeyPatch, pool: SlabPool, nbytes: int) -> None:
    """Have the machine so much memory that slabs may take so many bytes: half of it."""
    monkeypatch.setattr(machine, "available_bytes", lambda: 2 * nbytes - pool.reserved_bytes)
