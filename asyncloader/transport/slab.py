"""Slabs: shared memory that batches come in. Workers carve it and use it again; this process keeps what it looks at.

      the heap of a worker ── a payload names a region ──> on lease to tensors ── the last one died ──> nobody's
              ^                                                                                            │
              └──────── with the next tickets; or with all of the heap to the worker after this one <──────┘

- A region that a payload named is in use as long as it has users: the tensors of a batch; a process forked while there
  were some, for that may look at the batch. Without users it is returned to the owner of the heap that it is in, and
  not before: so nothing that anybody looks at is written over.
- A heap outlives its worker: the next worker that is started goes on with it, warm memory and regions in use included.
- A heap without an owner for a while is given back, in small pieces, because that costs as much as first use: 0.9 us a
  page.
"""

from __future__ import annotations

import os
import threading
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from asyncloader.machine import total_bytes
from asyncloader.transport import arena as arenas
from asyncloader.transport.arena import Arena
from asyncloader.transport.exporter import LeaseRef, exporter_at
from asyncloader.transport.free_list import Region
from asyncloader.transport.heap import PERIOD_S, SWEEP_BYTES, Heap

_HEAPS = 256
"""So many heaps have room in the arena; the workers after these send batches through their channels."""

_SMALLEST = 1 << 28  # a heap, where there are addresses for four
_LARGEST_ARENA = 1 << 44
_NO_BOUND = 1 << 60

_TENSORS = "tensors"
"""The user of a lease that is not a forked process."""


class Lease:
    """A region that tensors of this process refer to, or that a process may look at which was forked meanwhile.

    Attributes:
        region: The region.
        give_back: Called with the region when it has no users left.
        ref: Tells the end of the tensors.
        users: `_TENSORS`, and forked processes.
    """

    __slots__ = ("give_back", "ref", "region", "users")

    def __init__(self, region: Region, give_back: Callable[[Region], None], ref: LeaseRef) -> None:
        self.region = region
        self.give_back = give_back
        self.ref = ref
        self.users: set[object] = {_TENSORS}

    def release(self, user: object) -> None:
        """Take a user from it."""
        self.users.discard(user)
        if not self.users:
            self.give_back(self.region)


class _Fork:
    """A process that the trainer forks, for as long as it may look at slabs that were leased then.

    `WorkerHeap` notices the end of a worker. Any other process has the only writing end of a pipe, which hangs up when
    the process ends or runs another program. Without descriptors for a pipe its slabs are never used again.

    Attributes:
        worker: The record of the worker that it starts, a user of these leases; None where the fork itself is one.
        leases: The leases.
        ended: Leases whose tensors had died before: the fork has none of them.
        reading: The pipe, of which this process has the end for reading; -1 for none.
        writing: The other end.
    """

    def __init__(self, worker: object | None, leases: list[Lease]) -> None:
        self.worker = worker
        self.leases = leases
        self.ended: set[Lease] = set()
        self.reading = self.writing = -1


class SlabPool:
    """All slabs of a process. Everything runs on the loop thread, except that tensors die in any thread.

    Args:
        max_bytes: A bound of what slabs take, besides what machine and cgroups have left.
        create_arena: makes the shared memory, at the first use.

    Attributes:
        loop: Gives back what nobody needs, and watches processes that were forked; None before the first loader.
    """

    def __init__(self, max_bytes: int = _NO_BOUND, create_arena: Callable[[int], Arena | None] = arenas.create) -> None:
        self.max_bytes = max_bytes
        self.arena: Arena | None = None
        self.ownerless: list[Any] = []  # `WorkerHeap`s whose worker has ended, the last one last
        self._create_arena = create_arena
        self._end_of_heaps = 0
        self._own: Heap | None = None
        self._leases: set[Lease] = set()  # whose tensors are alive, as far as is known
        self._ended: deque[Lease] = deque()
        self._on_end = self._make_on_end()
        self._trim_planned = False
        self.loop: AbstractEventLoop | None = None
        self._forks: dict[int, _Fork] = {}  # by thread, between the hooks of a fork
        self._forked: set[_Fork] = set()  # whose ends are waited for
        self._starting: dict[int, tuple[object, list[Lease]]] = {}  # by thread: the worker, what its fork shows it

    def __repr__(self) -> str:
        return f"<SlabPool reserved={self.reserved_bytes} leased={self.leased_bytes}>"

    @property
    def reserved_bytes(self) -> int:
        """The memory of all heaps."""
        return 0 if self.arena is None else self.arena.reserved_bytes()

    @property
    def leased_bytes(self) -> int:
        """The memory that tensors are in."""
        return sum(lease.region.capacity for lease in tuple(self._leases))

    def close(self) -> None:
        """Unmap the arena, for pools of their own in tests: there must be no lease and no worker."""
        self.trim()
        if self._leases or (self._own is not None and self._own.regions()):
            raise RuntimeError(f"slabs are in use: {self!r}")
        if self.arena is not None:
            self.arena.close()
            self.arena = None

    # --------------------------------------------------------------------------------------------------------- heaps
    def new_heap(self) -> tuple[int, int]:
        """Return addresses for one more heap, the first and how many there are; none if there is no room."""
        if self.arena is None:
            # No heap can be larger than what slabs may take in all: half of the memory.
            self.arena = self._create_arena(min(_HEAPS * total_bytes() // 2, _LARGEST_ARENA))
        if self.arena is None:
            return 0, 0
        size = self.arena.size
        length = max(size // _HEAPS, min(size // 4, _SMALLEST)) // arenas.PAGE * arenas.PAGE
        first = self._end_of_heaps
        if first + length > size:
            return 0, 0
        self._end_of_heaps += length
        return first, length

    @property
    def own(self) -> Heap | None:
        """The heap of this process; None if there is no shared memory."""
        if self._own is None:
            first, length = self.new_heap()
            if self.arena is not None and length:
                self._own = Heap(self.arena, first, length, max_bytes=self.max_bytes)
        return self._own

    def receive(self, nbytes: int) -> memoryview | None:
        """Return memory that this process fills itself, on lease from here on; None: over the budget."""
        self.drain()
        if (own := self.own) is None or (region := own.take(nbytes)) is None:
            return None
        return self.lease(region, own.put_back)[:nbytes]

    def lease(self, region: Region, give_back: Callable[[Region], None]) -> memoryview:
        """Return the memory of a region; the lease lasts as long as anything refers to that."""
        assert self.arena is not None
        exporter = exporter_at(self.arena.base + region.offset, region.capacity)
        ref = LeaseRef(exporter, self._on_end)
        ref.lease = lease = Lease(region, give_back, ref)
        self._leases.add(lease)
        return memoryview(exporter).cast("B")[: region.capacity]

    def _make_on_end(self) -> Callable[[Any], None]:
        """The tensors of a lease die in any thread, inside gc, or in a forked child that has its own copy of them."""
        owner, getpid, append = os.getpid(), os.getpid, self._ended.append

        def on_end(ref: Any) -> None:
            if getpid() == owner:
                append(ref.lease)
                if (self.ownerless or self._own) and not self._trim_planned and self.loop is not None:
                    with suppress(RuntimeError):  # at interpreter exit the loop is closed
                        self.loop.call_soon_threadsafe(self.plan_trim)

        return on_end

    def drain(self) -> None:
        """Take back regions whose tensors have died."""
        # Between the hooks of a fork nothing is taken back: tensors that died after the fork may live on in the child.
        while self._ended and not self._forks:
            lease = self._ended.popleft()
            self._leases.discard(lease)
            # In a cycle both would stay until a collection. A thread that forks may still ask whether tensors live.
            del lease.ref.lease
            lease.release(_TENSORS)

    # ------------------------------------------------------------------------------------------------------ forks
    @contextmanager
    def starting(self, worker: object) -> Iterator[list[Lease]]:
        """While active in this thread, a fork makes the process of a worker; what that shows it gets into the list.

        The worker is then a user of these leases, and whoever started it releases them when it has ended.
        """
        thread = threading.get_ident()
        watched: list[Lease] = []
        self._starting[thread] = worker, watched
        try:
            yield watched
        finally:
            del self._starting[thread]

    def before_fork(self) -> None:
        """Called in the thread that forks."""
        thread = threading.get_ident()
        worker, watched = self._starting.get(thread, (None, []))
        # Noted first: Python forks as well where a signal's handler raises in here.
        self._forks[thread] = fork = _Fork(worker, watched)
        fork.ended = {lease for lease in tuple(self._leases) if lease.ref() is None}
        if worker is None and self._leases and self.loop is not None:
            with suppress(OSError):
                fork.reading, fork.writing = os.pipe()

    def after_fork(self) -> None:
        """Called in the thread that forked. The child has a copy of every batch, so no region leased may be reused.

        1. before_fork: leases that have ended already are told apart; from now on none is taken back.
        2. fork. Until it happens, other threads go on: leases begin and end.
        3. Here: what was leased when the fork happened is still in `_leases`, and gets another user: the worker just
           started, until it ends, or a process that we know by a pipe alone, until that hangs up.
        """
        thread = threading.get_ident()
        fork = self._forks[thread]
        for lease in self._leases - fork.ended:  # in one step of the interpreter: other threads begin leases
            lease.users.add(fork.worker or fork)
            fork.leases.append(lease)
        del self._forks[thread]
        if fork.reading >= 0:
            self._await_end(fork)

    def _await_end(self, fork: _Fork) -> None:
        os.close(fork.writing)
        if not fork.leases:
            os.close(fork.reading)
            return
        self._forked.add(fork)
        assert self.loop is not None
        with suppress(RuntimeError):  # at interpreter exit the loop is closed
            self.loop.call_soon_threadsafe(self.loop.add_reader, fork.reading, self._on_fork_ended, fork)

    def _on_fork_ended(self, fork: _Fork) -> None:
        """Take back what a forked process, which is gone, might have looked at. On the loop thread."""
        assert self.loop is not None
        self.loop.remove_reader(fork.reading)
        self._forked.discard(fork)
        os.close(fork.reading)
        for lease in fork.leases:
            lease.release(fork)
        self.plan_trim()

    # ------------------------------------------------------------------------------------------------------- idle
    def plan_trim(self, delay_s: float = PERIOD_S) -> None:
        """Give back after a while what is in heaps without an owner then. On the loop thread."""
        if self.loop is not None and not self._trim_planned:
            self._trim_planned = True
            self.loop.call_later(delay_s, self._trim_some)

    def _trim_some(self) -> None:
        """Give a piece back, and plan the next."""
        self._trim_planned = False
        self.drain()
        if (own := self._own) is not None:
            has_given = own.turn()
            if own.idle_bytes:
                self.plan_trim(0.0 if has_given and own.has_surplus else PERIOD_S)
        heap = next((heap for heap in self.ownerless if heap.idle), None)
        if heap is not None and heap.give_back_some(SWEEP_BYTES):
            self.plan_trim(0.0)

    def trim(self) -> None:
        """Give back all that nobody uses, now, but what workers have."""
        self.drain()
        if self._own is not None:
            self._own.trim()
        for heap in self.ownerless:
            while heap.give_back_some(SWEEP_BYTES):
                pass


_pools: dict[int, SlabPool] = {}  # by process: a forked child makes its own, and never frees what it inherited


def slab_pool() -> SlabPool:
    """Return the pool of this process."""
    return _pools.get(os.getpid()) or _pools.setdefault(os.getpid(), SlabPool())


def _before_fork() -> None:
    if (pool := _pools.get(os.getpid())) is not None:
        pool.before_fork()


def _after_fork() -> None:
    if (pool := _pools.get(os.getpid())) is not None:
        pool.after_fork()


def _after_fork_in_child() -> None:
    """Leave the reading ends to the trainer; the end for writing stays open, and so it shall."""
    if (pool := _pools.get(os.getppid())) is not None:
        for fork in [*pool._forked, *pool._forks.values()]:
            with suppress(OSError):
                os.close(fork.reading)
        pool._forked.clear()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)
