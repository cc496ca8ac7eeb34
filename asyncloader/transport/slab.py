"""Slabs: shared memory that the parent owns, lends to workers, leases to batches, and uses again.

      cold ──────────── carve ────────────> on loan to a worker ── a payload names it ──> on lease to tensors
       ^            ┌──── lend, grant ──────────^    │                                          │
       │            │                                │ returned, or the worker died             │ the last one died
       └─ sweep ─ free (warm) <─────────────────────┴──────────────────────────────────────────┘

- cold: addresses of the arena without memory. free: memory that was used before, so that nobody takes page faults
  again.
- A region is in use as long as it has users: the worker it is lent to; the lease of a batch; a worker that still refers
  to what it sent; a process forked while it was leased, for that may look at the batch. Without users it is free.
- Free regions fit requests of somewhat smaller sizes. How much stays warm follows the recent peak of use; the rest is
  given back (swept), in small pieces, because giving back costs as much as first use: 0.9 us a page.
- Nothing here waits. Over the budget there is no loan, and the buffer travels through the channel.
"""

from __future__ import annotations

import os
import threading
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import monotonic
from typing import Any, NamedTuple

from asyncloader.machine import total_bytes
from asyncloader.transport import arena as arenas
from asyncloader.transport.arena import Arena, Extents
from asyncloader.transport.budget import Budget
from asyncloader.transport.free_list import FreeList, Region
from asyncloader.transport.loans import LeaseRef, capacity_for, exporter_at

PERIOD_S = 5.0  # use is looked at in periods: what neither this one nor the last one needed is given back
LOSS_BYTES = 32 << 20  # with more than that unused in regions on lease, they have to fit better
SWEEP_BYTES = 4 << 20  # given back at a time: 1 ms
_LARGEST_ARENA = 1 << 40


_LEASE = "lease"
"""The user of a region that tensors refer to."""


class _Fork:
    """A process that the trainer forks, for as long as it may look at slabs that were leased then.

    `WorkerLoans` notices the end of a worker. Any other process has the only writing end of a pipe, which hangs up when
    the process ends or runs another program. Without descriptors for a pipe its slabs are never used again.

    Attributes:
        worker: The record of the worker that it starts, a user of these slabs; None where the fork itself is one.
        regions: The slabs.
        ended: Leases that had ended before, by id: as long as they are here no other gets the id of one.
        reading: The pipe, of which this process has the end for reading; -1 for none.
        writing: The other end.
    """

    def __init__(self, worker: object | None, regions: list[Region], ended: dict[int, LeaseRef]) -> None:
        self.worker = worker
        self.regions = regions
        self.ended = ended
        self.reading = self.writing = -1


class Statistics(NamedTuple):
    """Bytes of slabs."""

    reserved: int  # all that has memory
    free: int
    leased: int


class SlabPool:
    """All slabs of a process. Everything runs on the loop thread, except that leases end in any thread.

    Args:
        limit: Returns the bytes that may be reserved, those included that are, which it is given; by default from the
            memory of machine and cgroups.
        create_arena: makes the shared memory, at the first use.
    """

    def __init__(
        self, limit: Callable[[int], int] | None = None, create_arena: Callable[[int], Arena | None] = arenas.create
    ) -> None:
        self._limit = limit or Budget().limit
        self._create_arena = create_arena
        self._arena: Arena | None = None
        self._cold = Extents(0)
        self._free = FreeList()
        self._keep = 0  # bytes that may stay reserved, as of the last look
        self._swept: Region | None = None  # that is given back, piece by piece
        self._reserved = 0
        self._unused = 0  # of what is leased
        self._numbers = 0
        self._regions: dict[int, Region] = {}
        self._leases: dict[int, LeaseRef] = {}
        self._ended: deque[int] = deque()
        self._on_end = self._make_on_end()
        self._workers: set[object] = set()  # records of those that may have loans
        self._peaks = [0, 0]  # bytes in use at most, in the last period and in this one
        self._period_ends = 0.0
        self._can_sweep = True
        self._trim_planned = False
        self._loop: AbstractEventLoop | None = None  # sees that what comes free while nobody uses slabs is given back
        self._forks: dict[int, _Fork] = {}  # by thread, between the hooks of a fork
        self._forked: set[_Fork] = set()  # whose ends are waited for
        self._starting: dict[int, tuple[object, list[Region]]] = {}  # by thread: the worker, what its fork shows it

    def __repr__(self) -> str:
        reserved, free, leased = self.statistics()
        return f"<SlabPool reserved={reserved} free={free} leased={leased} workers={len(self._workers)}>"

    def handle(self) -> Arena | None:
        """Return what a worker is launched with to use slabs, or None if there can be none."""
        if self._arena is None:
            self._arena = self._create_arena(min(2 * total_bytes(), _LARGEST_ARENA))
            if self._arena is not None:
                self._cold = Extents(self._arena.size)
        return self._arena

    def live_on(self, loop: AbstractEventLoop) -> None:
        """From now on have this loop give back what comes free, and watch processes that were forked. In any thread."""
        if loop is not self._loop:
            self._loop = loop
            for fork in tuple(self._forked):
                self._watch(fork)

    def leave_loop(self) -> None:
        """Give free memory back, and do without a loop. On the loop thread, when there is no worker."""
        self.trim()
        if self._loop is not None:
            for fork in self._forked:
                self._loop.remove_reader(fork.reading)
        self._loop, self._trim_planned = None, False

    def enlist(self, worker: object) -> None:
        """Count a worker process as one that may have loans, until `retire`."""
        self._workers.add(worker)

    def statistics(self) -> Statistics:
        """Return how much there is of what."""
        leased = sum(self._regions[number].capacity for number in list(self._leases))
        return Statistics(self._reserved, self._free.nbytes, leased)

    def trim(self) -> None:
        """Give all free memory back, now."""
        self._drain()
        self._sweep(self._reserved, keep=0)

    def close(self) -> None:
        """Unmap the arena, for pools of their own in tests: there must be no lease and no worker."""
        self.trim()
        if self._regions:
            raise RuntimeError(f"slabs are in use: {list(self._regions.values())}")
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    # ------------------------------------------------------------------------------------------ regions come and go
    def obtain(self, nbytes: int, may_carve: bool) -> Region | None:
        """Return a region without users for a buffer, a new one only if allowed; None: over the budget."""
        region = self._free.take(nbytes, self.is_loose)
        if region is None and may_carve:
            region = self._carve(capacity_for(nbytes))
        self._peaks[1] = max(self._peaks[1], self._in_use())
        return region

    def receive(self, nbytes: int) -> memoryview | None:
        """Return memory that this process fills itself, on lease from here on; None: over the budget."""
        self.turn()
        region = self.obtain_reserved(nbytes)
        return None if region is None else self.lease(region, nbytes)[:nbytes]

    def obtain_reserved(self, nbytes: int) -> Region | None:
        """Return a region without users that this process fills itself; None: over the budget."""
        if (region := self.obtain(nbytes, may_carve=True)) is None:
            return None
        assert self._arena is not None
        if region.is_fresh and not self._arena.reserve(region.offset, region.capacity):
            self._free.put(region)
            return None
        region.is_fresh = False
        return region

    def memory_of(self, region: Region) -> memoryview:
        """Return the memory of a region, which has users as long as anything refers to that."""
        assert self._arena is not None
        return memoryview(exporter_at(self._arena.base + region.offset, region.capacity)).cast("B")[: region.capacity]

    def release(self, region: Region, user: object) -> None:
        """Take a user from a region."""
        region.users.discard(user)
        if not region.users:
            self._free.put(region)

    def turn(self) -> None:
        """Do what has come up: regions whose leases ended, periods that ended, memory to give back."""
        if self._ended:
            self._drain()
        now = monotonic()
        if now >= self._period_ends:
            self._period_ends = now + PERIOD_S
            self._keep = self._allowed()
            self._peaks = [self._peaks[1], self._in_use()]
        self._sweep(SWEEP_BYTES, self._keep)

    def _in_use(self) -> int:
        return self._reserved - self._free.nbytes - (self._swept.capacity if self._swept is not None else 0)

    def _allowed(self) -> int:
        """Bytes that may stay reserved without being in use: an eighth over the recent peak, for sizes that vary."""
        peak = max(self._peaks)
        return peak + (peak >> 3) + SWEEP_BYTES

    def _carve(self, capacity: int) -> Region | None:
        if self._arena is None:
            return None
        self._peaks[1] = max(self._peaks[1], self._in_use() + capacity)
        limit = self._limit(self._reserved)
        if self._reserved + capacity > limit:
            # Pressed for memory: what is free goes first, at about the price that the new region costs the worker.
            self._sweep(capacity, keep=max(0, limit - capacity))
        if self._reserved + capacity > limit or (offset := self._cold.take(capacity)) is None:
            return None
        self._numbers += 1
        self._reserved += capacity
        self._keep = self._allowed()
        region = self._regions[self._numbers] = Region(self._numbers, offset, capacity)
        return region

    def _sweep(self, nbytes: int, keep: int) -> None:
        """Give free regions back, oldest first, about `nbytes` of them, until no more than `keep` are reserved."""
        while nbytes > 0 and self._can_sweep:
            if self._swept is None and self._reserved > keep:
                self._swept = self._free.take_oldest()
            if (region := self._swept) is None:
                return
            piece = min(region.capacity, SWEEP_BYTES)
            if self._arena is None or not self._arena.punch(region.offset, piece):
                # The platform cannot punch holes: what is reserved stays, to be used again.
                self._can_sweep, self._swept = False, None
                self._free.put(region)
                return
            self._cold.give(region.offset, piece)
            region.offset += piece
            region.capacity -= piece
            self._reserved -= piece
            nbytes -= piece
            if region.capacity == 0:
                self._swept = None
                del self._regions[region.number]

    # ---------------------------------------------------------------------------------------------------- leases
    @property
    def is_loose(self) -> bool:
        """Whether regions may serve much smaller buffers: little of what is leased is lost that way."""
        return self._unused < LOSS_BYTES

    def lease(self, region: Region, nbytes: int) -> memoryview:
        """Return the memory of a region, `nbytes` of it in use; the lease lasts as long as anything refers to that."""
        assert self._arena is not None
        region.is_fresh = False
        region.unused = region.capacity - nbytes
        self._unused += region.unused
        exporter = exporter_at(self._arena.base + region.offset, region.capacity)
        region.users.add(_LEASE)
        ref = self._leases[region.number] = LeaseRef(exporter, self._on_end)
        ref.lease = region.number
        return memoryview(exporter).cast("B")[: region.capacity]

    def _make_on_end(self) -> Callable[[Any], None]:
        """A lease ends in any thread, inside gc, or in a forked child that has its own copy of the tensors."""
        owner, getpid, append = os.getpid(), os.getpid, self._ended.append

        def on_end(ref: Any) -> None:
            if getpid() == owner:
                append(ref.lease)
                if self.is_idle and self._loop is not None:
                    with suppress(RuntimeError):  # at interpreter exit the loop is closed
                        self._loop.call_soon_threadsafe(self.plan_trim)

        return on_end

    def _drain(self) -> None:
        """Take back regions whose leases have ended."""
        # Between the hooks of a fork nothing is taken back: a lease that ended after the fork may live on in the child.
        while self._ended and not self._forks:
            number = self._ended.popleft()
            del self._leases[number]
            region = self._regions[number]
            self._unused -= region.unused
            self.release(region, _LEASE)

    # ------------------------------------------------------------------------------------------------------ forks
    @contextmanager
    def starting(self, worker: object) -> Iterator[list[Region]]:
        """While active in this thread, a fork makes the process of a worker; what that shows it gets into the list.

        The worker is then a user of these regions, and whoever started it releases them when it has ended.
        """
        thread = threading.get_ident()
        watched: list[Region] = []
        self._starting[thread] = worker, watched
        try:
            yield watched
        finally:
            del self._starting[thread]

    def before_fork(self) -> None:
        """Called in the thread that forks."""
        thread = threading.get_ident()
        worker, watched = self._starting.get(thread, (None, []))
        fork = _Fork(worker, watched, {id(ref): ref for ref in list(self._leases.values()) if ref() is None})
        if worker is None and self._regions and self._loop is not None:
            with suppress(OSError):
                fork.reading, fork.writing = os.pipe()
        self._forks[thread] = fork

    def after_fork(self) -> None:
        """Called in the thread that forked. The child has a copy of every batch, so no region leased may be reused.

        1. before_fork: leases that have ended already are told apart; from now on none is taken back.
        2. fork. Until it happens, other threads go on: leases begin and end.
        3. Here: what was leased when the fork happened is still in `_leases`, and gets another user: the worker just
           started, until it ends, or a process that we know by a pipe alone, until that hangs up.
        """
        thread = threading.get_ident()
        fork = self._forks[thread]
        for region in [self._regions[n] for n, ref in self._leases.copy().items() if id(ref) not in fork.ended]:
            region.users.add(fork.worker or fork)
            fork.regions.append(region)
        del self._forks[thread]
        if fork.reading >= 0:
            self._await_end(fork)

    def _await_end(self, fork: _Fork) -> None:
        os.close(fork.writing)
        if not fork.regions:
            os.close(fork.reading)
            return
        self._forked.add(fork)
        self._watch(fork)

    def _watch(self, fork: _Fork) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # at interpreter exit the loop is closed
                self._loop.call_soon_threadsafe(self._loop.add_reader, fork.reading, self._on_fork_ended, fork)

    def _on_fork_ended(self, fork: _Fork) -> None:
        """Take back what a forked process, which is gone, might have looked at. On the loop thread."""
        if self._loop is not None:
            self._loop.remove_reader(fork.reading)
        self._forked.discard(fork)
        os.close(fork.reading)
        for region in fork.regions:
            self.release(region, fork)
        if self.is_idle:
            self.plan_trim()

    # ------------------------------------------------------------------------------------------------------- idle
    def retire(self, worker: object) -> None:
        """Forget a worker; without any, free memory is given back after a while."""
        self._workers.discard(worker)
        if not self._workers:
            self.plan_trim()

    @property
    def is_idle(self) -> bool:
        """Whether no worker uses it, and nothing will be given back unless somebody sees to it."""
        return not self._workers and not self._trim_planned

    def plan_trim(self, delay_s: float = PERIOD_S) -> None:
        """Give all free memory back after a while, unless there are workers then. On the loop thread."""
        if self._loop is not None and not self._trim_planned:
            self._trim_planned = True
            self._loop.call_later(delay_s, self._trim_if_idle)

    def _trim_if_idle(self) -> None:
        self._trim_planned = False
        if self._workers:
            return
        self._drain()
        self._sweep(SWEEP_BYTES, keep=0)
        if self._can_sweep and (self._swept is not None or self._free.nbytes):
            self.plan_trim(0.0)


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
