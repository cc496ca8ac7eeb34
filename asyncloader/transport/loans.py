"""The worker's side of slabs: what is on loan here, and what of it is in use.

    added ──> idle ── allocate (collation) ──> taken ── sent in a payload ──> the parent's
                ^  └─ copy_in (any buffer) ─────────────────────────────────────^     (watched while referred to here)
                └── dropped without being sent ──┘

A region that is taken is free again for this worker when what was allocated in it has died. A region that was sent is
the parent's; if something here still refers to it (a cache of collated batches, say), the parent is told, and does not
lend it again before that has died as well: so nothing that a user keeps is written over.
"""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from asyncloader.transport.arena import PAGE, Arena

Ask = Callable[[list[int], list[int]], Iterable[tuple[Any, ...]]]

_REFUSED_S = 0.5  # after a refusal the parent is left alone for so long
_STALE = 16  # a loan that was not used for so many batches and buffers is returned


class Loan(NamedTuple):
    """A region on loan, as a worker is told."""

    number: int
    offset: int  # in the arena
    capacity: int
    is_fresh: bool  # to be reserved before it is written
    is_loose: bool  # may serve a buffer of a quarter of its size


def fits(nbytes: int, capacity: int, is_loose: bool = False) -> bool:
    """Whether a region that is there should serve a buffer, rather than a new one.

    The region may be a quarter too large: whoever keeps the buffer keeps all of the region. Batches whose sizes vary
    would then find nothing most of the time, so as long as little is lost (`is_loose`) it may be four times as large.
    """
    return nbytes <= capacity <= nbytes + max(3 * nbytes if is_loose else nbytes >> 2, 8 * PAGE)


def capacity_for(nbytes: int) -> int:
    """Round up to one of 128 capacities between powers of two: whole pages, at most 0.8 % too large from 512 KiB on."""
    step = max(PAGE, 1 << max(0, (nbytes - 1).bit_length() - 8))
    return -(-nbytes // step) * step


_exporter_types: dict[int, Any] = {}


class LeaseRef(weakref.ref[Any]):
    """Stands guard over the object that all tensors, arrays and views of one buffer refer to.

    Attributes:
        lease: The lease that ends with that object.
    """

    __slots__ = ("lease",)
    lease: Any


def exporter_at(address: int, nbytes: int) -> Any:
    """Return an object that exports the memory there, as the buffer protocol has it, and can be weakly referred to.

    Its type is the ctypes array of the next power of two, since ctypes never frees array types; so it exports more than
    `nbytes`.
    """
    bits = nbytes.bit_length()
    kind = _exporter_types.get(bits)
    if kind is None:
        kind = _exporter_types[bits] = ctypes.c_ubyte * (1 << bits)
    return kind.from_address(address)


class WorkerSlabs:
    """Slabs on loan to this worker process. For the thread that serves it only.

    Attributes:
        ask: a round trip to the parent: takes sizes wanted and numbers of regions returned, gives loans. Set by who
            owns the channel.
    """

    def __init__(self, arena: Arena) -> None:
        self.ask: Ask | None = None
        self._arena = arena
        self._idle: dict[int, tuple[Loan, int]] = {}  # since which request
        self._taken: dict[int, tuple[Loan, weakref.ref[Any]]] = {}
        self._sent: dict[int, weakref.ref[Any]] = {}  # sent, and still referred to when last looked at
        self._unusable: list[int] = []  # no memory for them
        self._requests = 0
        self._quiet_until = 0.0

    def __repr__(self) -> str:
        return f"<WorkerSlabs idle={list(self._idle)} taken={list(self._taken)} sent={list(self._sent)}>"

    def add(self, loans: Iterable[tuple[Any, ...]]) -> None:
        """Take loans that the parent sent."""
        for loan in loans:
            self.put_back(Loan(*loan))

    # -------------------------------------------------------------------------------------------------- getting slabs
    def allocate(self, nbytes: int) -> memoryview | None:
        """Return memory for a part of a batch, free again when nothing refers to it; None: there is none to be had."""
        loan = self.borrow(nbytes)
        if loan is None:
            return None
        exporter = self._exporter(loan)
        self._taken[loan.number] = loan, weakref.ref(exporter)
        return memoryview(exporter).cast("B")[:nbytes]

    def memory_of(self, loan: Loan) -> memoryview:
        """Return the memory of a region."""
        return memoryview(self._exporter(loan)).cast("B")[: loan.capacity]

    def _exporter(self, loan: Loan) -> Any:
        return exporter_at(self._arena.base + loan.offset, loan.capacity)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return memory that the parent has written into: not on loan here, and to be read before the next answer."""
        return memoryview(exporter_at(self._arena.base + offset, nbytes)).cast("B")[:nbytes]

    def put_back(self, loan: Loan) -> None:
        """Make a region idle again that was borrowed and not sent."""
        self._idle[loan.number] = loan, self._requests

    def borrow(self, nbytes: int) -> Loan | None:
        """Return a region to copy a buffer into, which is then sent or put back."""
        self._requests += 1
        loan = self._best_fit(nbytes)
        if loan is None and self._taken:
            self._recover()
            loan = self._best_fit(nbytes)
        if loan is None:
            self._ask_for(nbytes)
            loan = self._best_fit(nbytes)
        if loan is None or not loan.is_fresh:
            return loan
        return self._reserved(loan)

    def _best_fit(self, nbytes: int) -> Loan | None:
        best: Loan | None = None
        least = capacity_for(nbytes)
        for loan, _ in self._idle.values():
            if loan.capacity == least:  # none fits better
                best = loan
                break
            if fits(nbytes, loan.capacity, loan.is_loose) and (best is None or loan.capacity < best.capacity):
                best = loan
        if best is not None:
            del self._idle[best.number]
        return best

    def _recover(self) -> None:
        """Find regions that were taken for what never became part of a batch."""
        for loan, ref in list(self._taken.values()):
            if ref() is None:
                del self._taken[loan.number]
                self.put_back(loan)

    def _ask_for(self, nbytes: int) -> None:
        if self.ask is None or time.monotonic() < self._quiet_until:
            return
        loans = list(self.ask([nbytes], self._returned()))
        if not loans:
            self._quiet_until = time.monotonic() + _REFUSED_S
        self.add(loans)

    def _returned(self) -> list[int]:
        """Part with loans that are of no use."""
        oldest = self._requests - _STALE - 2 * len(self._idle)  # those of one size are used in turn
        stale = [number for number, (_, since) in self._idle.items() if since < oldest]
        for number in stale:
            del self._idle[number]
        unusable, self._unusable = self._unusable, []
        return unusable + stale

    def _reserved(self, loan: Loan) -> Loan | None:
        """Get memory for a fresh region, here: it takes a while, and the parent has no time for it."""
        if self._arena.reserve(loan.offset, loan.capacity):
            return loan._replace(is_fresh=False)
        self._unusable.append(loan.number)
        self._quiet_until = time.monotonic() + _REFUSED_S
        return None

    # ------------------------------------------------------------------------------------------------- sending slabs
    def locate(self, address: int, nbytes: int) -> tuple[int, int] | None:
        """Return the number of the region taken here that holds these bytes, and their offset in it."""
        at = address - self._arena.base
        if not 0 <= at < self._arena.size:
            return None
        for loan, _ in self._taken.values():
            offset = at - loan.offset
            if 0 <= offset <= loan.capacity - nbytes:
                return loan.number, offset
        return None

    def pass_on(self, number: int) -> None:
        """Note that a region is the parent's now."""
        if number in self._taken:
            _, self._sent[number] = self._taken.pop(number)

    def is_referred_to(self, number: int) -> bool:
        """Whether something here still refers to a region that was sent. When it does not, this is asked once."""
        ref = self._sent.get(number)
        if ref is None:
            return False
        if ref() is not None:
            return True
        del self._sent[number]
        return False

    def given_up(self) -> list[int]:
        """Return the regions that the parent can have back: sent earlier and not referred to any more, or of no use."""
        self._requests += 1
        if not (self._sent or self._idle or self._unusable):
            return []
        dropped = [number for number, ref in self._sent.items() if ref() is None]
        for number in dropped:
            del self._sent[number]
        return dropped + self._returned()
