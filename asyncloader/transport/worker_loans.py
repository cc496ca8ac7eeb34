"""The slabs that one worker process has of the parent, and those that its next batches will need."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pickle import PickleBuffer
from typing import Any

from asyncloader.transport import codec
from asyncloader.transport.free_list import Region
from asyncloader.transport.loans import Loan, capacity_for
from asyncloader.transport.slab import SlabPool

_AHEAD = 3  # batches for which a worker has slabs at most, if they are large: it fills them one after the other
_MOST_AHEAD = 16  # if they are small: to ask for a slab takes longer than to fill one
_AHEAD_BYTES = 4 << 20  # which is what small ones may take together
_RECENT = 8  # batches that are looked back upon
_LARGE_BATCH = 8 << 20  # bytes; to fill it takes longer than to ask for another slab, and another slab costs memory

# Pickled keys of more bytes go through a slab. Measured, CPU of all processes, us a ticket in the message and by slab:
# 8 KiB 96 and 97, 16 KiB 116 and 104, 64 KiB 248 and 146, 192 KiB 608 and 218.
_KEYS_INLINE = 16 << 10


class WorkerLoans:
    """The parent's record of one worker process: what it holds, and what its batches are like. Loop thread only.

    Args:
        pool: Where its slabs come from, and which counts it until `reclaim`.

    Attributes:
        has_reader: The worker has told that it can read slabs that are not on loan to it.
    """

    has_reader = False

    def __init__(self, pool: SlabPool) -> None:
        self._pool = pool
        self._watched: list[Region] = []  # leased while it was forked
        self._loans: dict[int, Region] = {}
        self._kept: dict[int, Region] = {}  # sent, but still referred to
        # By ticket (number of the run, of the batch), in the order of runs: the slab that its keys are in.
        self._written: dict[tuple[int, int], Region] = {}
        self._num_held: Counter[int] = Counter()  # of _loans, by capacity
        self._recent: deque[tuple[int, ...]] = deque(maxlen=_RECENT)  # sizes of large buffers of the last batches
        self._num_alike = 0  # of the last batches, but for the first of them
        self._likely: dict[int, tuple[int, int]] = {}  # by capacity: size and number in the next batch; {}: to be found
        self._asked: deque[bool] = deque(maxlen=_RECENT)  # whether the worker asked while it made them
        self._num_asks = 0  # since the last batch
        pool.enlist(self)

    def __repr__(self) -> str:
        return f"<WorkerLoans {list(self._loans)} kept={list(self._kept)}>"

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Start the process inside, in this thread: then what a fork shows it is free again when it has ended."""
        with self._pool.starting(self) as self._watched:
            yield

    def lend(self, outstanding: int) -> list[Loan]:
        """Return what the worker lacks for `outstanding` batches like its last ones."""
        self._pool.turn()
        if not self._recent or not (last := self._recent[-1]):
            return []
        nbytes = sum(last)
        num_batches = min(outstanding, max(_AHEAD, min(_MOST_AHEAD, _AHEAD_BYTES // nbytes)))
        missing = num_batches * len(last) - len(self._loans)
        if missing <= 0:
            return []
        may_carve = nbytes < _LARGE_BATCH or self._asks_often()
        # Otherwise allocate only for the next batch: a slab will be free by the one after, or the worker asks.
        num_new = missing if may_carve else max(0, len(last) - len(self._loans))
        return self._grant(self._lacking(num_batches)[:missing], num_new)

    def grant(self, sizes: list[int], returned: list[int]) -> list[Loan]:
        """Answer a worker that asks for slabs of these sizes and returns others. Slabs over the budget are missing."""
        self._pool.turn()
        self._num_asks += 1
        for number in returned:
            self.given_up(number)
        return self._grant(sizes, len(sizes))

    def decode(self, payload: Any) -> tuple[Any, int]:
        """Return the batch of a payload, and its bytes. Slabs that it names are on lease from here on.

        Raises:
            LookupError: the payload names a slab that this worker does not have.
            Exception: whatever unpickling the batch raises.
        """
        return codec.decode(payload, self)

    def place(self, run: int, ticket: int, parts: Sequence[Any]) -> bytes | tuple[int, int]:
        """Find a place for the pickled keys of a ticket: a slab, as offset and length, or one piece for the message.

        The slab is the worker's to read, until it has answered the ticket: it reads all tickets of a message at once.
        """
        if len(parts) == 1 and len(parts[0]) <= _KEYS_INLINE:  # most tickets
            return bytes(parts[0])
        assert (run, ticket) not in self._written, f"the worker has ticket {ticket} of run {run} already"
        pieces = [PickleBuffer(part).raw() for part in parts]
        nbytes = sum(map(len, pieces))
        if nbytes <= _KEYS_INLINE or not self.has_reader or (region := self._pool.obtain_reserved(nbytes)) is None:
            return b"".join(pieces)
        region.users.add(self)
        self._written[run, ticket] = region
        memory, at = self._pool.memory_of(region), 0
        for piece in pieces:
            memory[at : at + len(piece)] = piece
            at += len(piece)
        return region.offset, nbytes

    def answered(self, ticket: tuple[int, int]) -> None:
        """The worker has answered this ticket, and is not at any of an earlier run."""
        written = self._written
        if (region := written.pop(ticket, None)) is not None:
            self._pool.release(region, self)
        while written and (first := next(iter(written)))[0] < ticket[0]:
            self._pool.release(written.pop(first), self)

    def reclaim(self) -> None:
        """Take back all that the worker had: it has ended."""
        for region in [*self._loans.values(), *self._kept.values(), *self._watched, *self._written.values()]:
            if self in region.users:
                self._pool.release(region, self)
        self._written.clear()
        self._loans.clear()
        self._num_held.clear()
        self._kept.clear()
        self._watched.clear()
        self._pool.retire(self)

    # -- called by codec.decode
    def open(self, number: int, nbytes: int, *, is_kept: bool) -> memoryview:
        """Begin the lease of a region that a payload names, `nbytes` of it."""
        if number not in self._loans or not 0 <= nbytes <= self._loans[number].capacity:
            raise LookupError(f"slab {number} is not on loan to this worker")
        region = self._taken_off(number)
        memory = self._pool.lease(region, nbytes)
        if is_kept:
            self._kept[number] = region
        else:
            region.users.discard(self)
        return memory

    def given_up(self, number: int) -> None:
        """Take back a region that the worker has no use for, or sent and does not refer to any more."""
        region = self._taken_off(number) if number in self._loans else self._kept.pop(number)
        self._pool.release(region, self)

    def learn(self, sizes: tuple[int, ...]) -> None:
        """Note the sizes of the large buffers of a batch, and whether the worker had to ask for them."""
        is_alike = bool(self._recent) and self._recent[-1] == sizes
        self._num_alike = self._num_alike + 1 if is_alike else 0
        if self._num_alike < _RECENT:  # as long as they were all alike, nothing else is likely
            self._likely = {}
        self._recent.append(sizes)
        self._asked.append(self._num_asks > 0)
        self._num_asks = 0

    def _asks_often(self) -> bool:
        return sum(self._asked) >= 3

    def _taken_off(self, number: int) -> Region:
        """Remove a region from those on loan."""
        region = self._loans.pop(number)
        self._num_held[region.capacity] -= 1
        return region

    def _lacking(self, num_batches: int) -> list[int]:
        """Sizes that the next batches will need, less what is there, batch by batch."""
        if not self._likely:
            for nbytes in sorted(self._likely_sizes()):
                capacity = capacity_for(nbytes)
                self._likely[capacity] = nbytes, self._likely.get(capacity, (0, 0))[1] + 1
        held = self._num_held
        lacking = [[n] * (count * num_batches - held[capacity]) for capacity, (n, count) in self._likely.items()]
        return [nbytes for of_batch in zip_longest(*lacking) for nbytes in of_batch if nbytes is not None]

    def _likely_sizes(self) -> list[int]:
        """Sizes for the next batch: those of the last one, or the largest of the last few where sizes vary."""
        last = self._recent[-1]
        if not self._pool.is_loose:
            return list(last)
        return [max(sizes) for sizes in zip(*(s for s in self._recent if len(s) == len(last)), strict=True)]

    def _grant(self, sizes: list[int], num_new: int) -> list[Loan]:
        loans = []
        for i, nbytes in enumerate(sizes):
            region = self._pool.obtain(nbytes, may_carve=i < num_new)
            if region is not None:
                region.users.add(self)
                self._loans[region.number] = region
                self._num_held[region.capacity] += 1
                loans.append(Loan(region.number, region.offset, region.capacity, region.is_fresh, self._pool.is_loose))
        return loans
