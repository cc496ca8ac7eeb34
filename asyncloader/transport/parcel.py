"""Samples on their way from one worker to another: what the parent keeps of them meanwhile.

    worker A ── payload, slabs ──> hold ──> Parcel: the payload as it is, and a lease on each slab
                                              └── pickled: Sent ──> worker B ── open_parcel ──> the samples

Nothing is unpickled in the parent. The slabs are free again when nobody holds the parcel any more; worker B counts as a
user of them (`WorkerLoans.show`) until it has answered.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np

from asyncloader.transport import codec
from asyncloader.transport.free_list import Region
from asyncloader.transport.loans import WorkerSlabs


class Opener(codec.Opener, Protocol):
    """The parent's record of the worker that a payload comes from."""

    def region(self, number: int) -> Region:
        """Return a region that is on loan to it."""


class Sent(NamedTuple):
    """A parcel as a worker gets it: the payload, and where in the arena the regions are that it names."""

    payload: bytes
    places: dict[int, tuple[int, int]]


class Parcel:
    """A payload as it came, in the parent.

    Args:
        payload: As the codec made it.
        regions: That it names.
        leases: On these.
    """

    __slots__ = ("_leases", "payload", "regions")

    def __init__(self, payload: bytes, regions: list[Region], leases: list[memoryview]) -> None:
        self.payload = payload
        self.regions = regions
        self._leases = leases

    def __reduce__(self) -> Any:
        return Sent, (self.payload, {each.number: (each.offset, each.capacity) for each in self.regions})


def hold(payload: Any, opener: Opener) -> tuple[Parcel, int]:
    """Return a payload as it is, and the bytes of what it carries. Slabs that it names are on lease from here on.

    Raises:
        LookupError: it names a slab that the worker does not have.
        ValueError: it is shorter than it says.
    """
    parts = codec.parse(payload)
    for number in parts.given_up:
        opener.given_up(number)
    regions: dict[int, Region] = {}
    leases: list[memoryview] = []
    used: dict[int, int] = {}
    for entry in parts.entries:
        number, end = entry.region, entry.offset + entry.nbytes
        if number == codec.RAW:
            continue
        if number not in regions:
            regions[number] = opener.region(number)
            leases.append(opener.open(number, end, is_kept=bool(entry.is_kept)))
        codec.check_inside(entry.offset, entry.nbytes, regions[number].capacity)
        used[number] = max(used.get(number, 0), end)
    opener.learn(tuple(used.values()))
    nbytes = len(payload) + sum(entry.nbytes for entry in parts.entries if entry.region != codec.RAW)
    return Parcel(bytes(payload), list(regions.values()), leases), nbytes


class _Shown:
    """Finds regions in the arena that a parcel names.

    Args:
        slabs: Of this worker.
        places: By region, its offset and capacity.
        is_private: What is opened is the worker's own: a copy.
    """

    def __init__(self, slabs: WorkerSlabs | None, places: dict[int, tuple[int, int]], is_private: bool) -> None:
        self._slabs = slabs
        self._places = places
        self._is_private = is_private

    def open(self, number: int, nbytes: int, *, is_kept: bool) -> memoryview:
        if self._slabs is None:
            raise LookupError(f"the parcel names slab {number}, and there are none here")
        memory = self._slabs.view(*self._places[number])
        if not self._is_private:
            return memory
        copy = np.empty(len(memory), np.uint8)
        copy[:] = np.frombuffer(memory, np.uint8)
        return copy.data

    def given_up(self, number: int) -> None:
        """Do nothing: the parent has heard it."""

    def learn(self, sizes: tuple[int, ...]) -> None:
        """Do nothing: the parent has learnt it."""


def open_parcel(sent: Sent, slabs: WorkerSlabs | None, *, is_private: bool) -> Any:
    """Return what a parcel carries, in a worker.

    Args:
        sent: The parcel.
        slabs: Of the worker.
        is_private: Whoever gets the samples may keep or change them. Otherwise they lie in the slabs themselves, which
            are somebody else's as soon as the worker has answered.

    Raises:
        Exception: whatever unpickling the samples raises.
    """
    return codec.decode(sent.payload, _Shown(slabs, sent.places, is_private))[0]
