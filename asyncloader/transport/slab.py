"""Slabs: shared memory that batches come in. Workers carve it and use it again; this process keeps what it looks at.

      the heap of a worker ── a payload names a region ──> on lease to tensors ── the last one died ──> nobody's
              ^                                                                                            │
              └── with the next tickets; if the worker has ended, to the machine <─────────────────────────┘

- A region that a payload named is in use as long as it has users: the tensors of a batch; a process forked while there
  were some, a worker or any other, for that may look at the batch. Without users it is returned to the owner of the
  heap that it is in, and not before: so nothing that anybody looks at is written over.
- The addresses of a heap outlive its worker: the next worker that is started has them, regions in use included. The
  memory does not: what is not in use is given back.
"""

from __future__ import annotations

import os
import threading
import weakref
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from asyncloader.machine import total_bytes
from asyncloader.transport import arena as arenas
from asyncloader.transport.arena import Arena, exporter_at
from asyncloader.transport.free_list import Region

_HEAPS = 256
"""So many heaps have room in the arena; the workers after these send batches through their channels."""

_SMALLEST = 1 << 28  # a heap, where there are addresses for four
_LARGEST_ARENA = 1 << 44

_TENSORS = "tensors"
"""The user of a lease that is not a forked process."""


class Lease(weakref.ref[Any]):
    """A region that tensors of this process refer to, or that a process may look at which was forked meanwhile.

    It is a reference to the object that all tensors, arrays and views of the region refer to, and hears of its end.

    Attributes:
        region: The region.
        give_back: Called with the region when it has no users left.
        users: `_TENSORS`, and forked processes.
    """

    __slots__ = ("give_back", "region", "users")
    region: Region
    give_back: Callable[[Region], None]
    users: set[object]
    # Each lease is itself, and not what it refers to.
    __hash__: Callable[..., int] = object.__hash__
    __eq__: Callable[..., bool] = object.__eq__

    def release(self, user: object) -> None:
        """Take a user from it."""
        self.users.discard(user)
        if not self.users:
            self.give_back(self.region)


class _Fork:
    """A process that the trainer forks, for as long as it may look at slabs that were leased then: a user of leases.

    It has the only writing end of a pipe, which hangs up when the process, and all that it has forked in turn, have
    ended or run other programs. Without descriptors for a pipe its slabs are never used again.

    Attributes:
        leases: The leases.
        ended: Leases whose tensors had died before: the fork has none of them.
        reading: The pipe, of which this process has the end for reading; -1 for none.
        writing: The other end.
    """

    def __init__(self) -> None:
        self.leases: list[Lease] = []
        self.ended: set[Lease] = set()
        self.reading = self.writing = -1


class SlabPool:
    """All slabs of a process. Everything runs on the loop thread, except that tensors die in any thread.

    Args:
        create_arena: makes the shared memory, at the first use.

    Attributes:
        loop: Takes back what ownerless heaps have on lease, and watches processes that were forked; None before the
            first loader.
    """

    def __init__(self, create_arena: Callable[[int], Arena | None] = arenas.create) -> None:
        self.arena: Arena | None = None
        self.ownerless: list[Any] = []  # `WorkerHeap`s whose worker has ended, the last one last
        self._create_arena = create_arena
        self._end_of_heaps = 0
        self._leases: set[Lease] = set()  # whose tensors are alive, as far as is known
        self._ended: deque[Lease] = deque()
        self._on_end = self._make_on_end()
        self._drain_planned = False
        self.loop: AbstractEventLoop | None = None
        self._forks: dict[int, _Fork] = {}  # by thread, between the hooks of a fork
        self._forked: set[_Fork] = set()  # whose ends are waited for

    def __repr__(self) -> str:
        return f"<SlabPool reserved={self.reserved_bytes} leases={len(self._leases)}>"

    @property
    def reserved_bytes(self) -> int:
        """The memory of all heaps."""
        return 0 if self.arena is None else self.arena.reserved_bytes()

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

    def lease(self, region: Region, give_back: Callable[[Region], None]) -> memoryview:
        """Return the memory of a region; the lease lasts as long as anything refers to that."""
        assert self.arena is not None
        exporter = exporter_at(self.arena.base + region.offset, region.capacity)
        lease = Lease(exporter, self._on_end)
        lease.region, lease.give_back, lease.users = region, give_back, {_TENSORS}
        self._leases.add(lease)
        return memoryview(exporter).cast("B")[: region.capacity]

    def _make_on_end(self) -> Callable[[Any], None]:
        """The tensors of a lease die in any thread, inside gc, or in a forked child that has its own copy of them."""
        owner, getpid, append = os.getpid(), os.getpid, self._ended.append

        def on_end(lease: Any) -> None:
            if getpid() == owner:
                append(lease)
                self._plan_drain()

        return on_end

    def _plan_drain(self) -> None:
        """Have the loop take back what has ended, where no worker is there on whose account it is done. In any thread.

        Two threads that both find nothing planned call twice, and the second call changes nothing. A thread that finds
        something planned has appended already: the loop drains after it has cleared the mark.
        """
        if self.ownerless and not self._drain_planned and self.loop is not None:
            self._drain_planned = True
            with suppress(RuntimeError):  # at interpreter exit the loop is closed
                self.loop.call_soon_threadsafe(self.drain)

    def drain(self) -> None:
        """Take back regions whose tensors have died. On the loop thread."""
        self._drain_planned = False
        # Between the hooks of a fork nothing is taken back: tensors that died after the fork may live on in the child.
        while self._ended and not self._forks:
            lease = self._ended.popleft()
            self._leases.discard(lease)
            lease.release(_TENSORS)

    # ------------------------------------------------------------------------------------------------------ forks
    def before_fork(self) -> None:
        """Called in the thread that forks."""
        # Noted first: Python forks as well where a signal's handler raises in here.
        self._forks[threading.get_ident()] = fork = _Fork()
        fork.ended = {lease for lease in tuple(self._leases) if lease() is None}
        if self.arena is not None and self.loop is not None:
            with suppress(OSError):
                fork.reading, fork.writing = os.pipe()

    def after_fork(self) -> None:
        """Called in the thread that forked. The child has a copy of every batch, so no region leased may be reused.

        1. before_fork: leases that have ended already are told apart; from now on none is taken back.
        2. fork. Until it happens, other threads go on: leases begin and end.
        3. Here: what was leased when the fork happened is still in `_leases`, and gets another user, the fork, until
           its pipe hangs up.
        """
        thread = threading.get_ident()
        fork = self._forks.get(thread) or _Fork()  # none where another thread has made this pool since `before_fork`
        for lease in self._leases - fork.ended:  # in one step of the interpreter: other threads begin leases
            lease.users.add(fork)
            fork.leases.append(lease)
        self._forks.pop(thread, None)
        self._plan_drain()  # of what has ended since `before_fork`
        if fork.reading >= 0:
            self._await_end(fork)

    def _await_end(self, fork: _Fork) -> None:
        os.close(fork.writing)  # the child has the only other one: while this was open, too, nothing could hang up
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
