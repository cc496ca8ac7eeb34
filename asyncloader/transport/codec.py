"""From a batch to a payload and back: pickle protocol 5, large buffers outside the pickle.

    payload, plain:   pickle                                                    (a pickle begins with 0x80)
    payload, framed:  head | entries | pickle | raw buffers                     (a head begins with 1)

An entry names a large buffer, in the order in which the pickle wants them: either one in a region of the arena, then
its bytes are not in the payload, or the next of the raw buffers. A long pickle (images of PIL, strings) is in a region
as well, as the last entry.
"""

from __future__ import annotations

import io
import pickle
import struct
import threading
from collections import ChainMap
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import cloudpickle
import numpy as np

from asyncloader.transport.free_list import Region
from asyncloader.transport.heap import Heap
from asyncloader.transport.tensors import INLINE_MAX, Array, Reducers

# A longer pickle goes through a slab. Measured there and back, inline and by slab: 128 KiB 67 and 95 us, 256 KiB 147
# and 116, 1 MiB 1319 and 194.
STREAM_MAX = 192 * 1024
_PLACED = pickle.PickleBuffer(bytearray(1))  # stands for the buffer that was placed last
RAW = -1
"""In an entry, in place of a region: the next of the raw buffers."""
_FRAMED = 1
_HEAD = struct.Struct("<BBxxIQ")  # _FRAMED, whether the pickle is in a region, entries, bytes of the pickle
_ENTRY = struct.Struct("<qqqq")

Open: TypeAlias = "Callable[[int, int], memoryview]"
"""Begins the lease of a region, which is known by its offset in the arena and its capacity."""


class _Entry(NamedTuple):
    region: int  # its offset in the arena, or RAW
    capacity: int  # of the region
    offset: int  # in the region
    nbytes: int


class _CloudPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Takes what plain pickle refuses: lambdas, classes of a notebook (which come out as the parent's own classes)."""

    def __init__(self, stream: io.BytesIO, table: Reducers, collect: Callable[[pickle.PickleBuffer], Any]) -> None:
        self._table = ChainMap(table, cloudpickle.Pickler.dispatch_table)
        super().__init__(stream, 5, buffer_callback=collect)

    @property
    def dispatch_table(self) -> Any:
        """The table, for the C code, which asks as it begins. An attribute would be hidden behind cloudpickle's own."""
        return self._table


class Encoder:
    """Turns batches into payloads, in one worker process. Not for several threads at once.

    Enter it around the call of collate_fn: then `allocate` gives memory in slabs, in this thread.

    Args:
        heap: shared memory of this process, or None to send everything through the channel.
    """

    def __init__(self, heap: Heap | None = None) -> None:
        self._heap = heap
        self._thread = 0  # that has entered it
        self._reducers = Reducers(self._place)
        self._entries: list[_Entry] = []
        self._raw: list[Array] = []
        self._regions: list[Region] = []  # that the entries are in
        self._borrowed: list[Region] = []  # those of them that nothing refers to

    def __enter__(self) -> None:
        self._thread = threading.get_ident()

    def __exit__(self, *exc_info: object) -> None:
        self._thread = 0

    def encode(self, batch: Any) -> list[Any]:
        """Return the payload of `batch`, as bytes-like parts to be sent one after the other before the next call.

        Raises:
            CannotShareError: a tensor that is not on the CPU, or that requires grad and is not a leaf.
            pickle.PicklingError, TypeError, AttributeError: what neither pickle nor cloudpickle can take.
        """
        try:
            try:
                stream = self._dump(batch, self._pickler)
            except (pickle.PicklingError, TypeError, AttributeError) as error:
                self._put_back()
                stream = self._dump_by_value(batch, error)
        except BaseException:
            self._put_back()
            raise
        finally:
            self._reducers.forget()
        return self._framed(stream)

    def allocate(self, nbytes: int) -> memoryview | None:
        """Return memory in a slab for a tensor of the batch; None if it has to be allocated as ever."""
        # Threads that fetch samples of a later batch at the same time may well collate parts of them.
        if self._heap is None or self._thread != threading.get_ident():
            return None
        return self._heap.allocate(nbytes) if nbytes > INLINE_MAX else None

    def leave_heap(self) -> None:
        """Take no slabs any more: this process is a fork, and the heap is that of the worker that forked it."""
        self._heap = None

    # --------------------------------------------------------------------------------------------------- pickling
    def _dump(self, batch: Any, make_pickler: Callable[[io.BytesIO], pickle.Pickler]) -> bytes:
        stream = io.BytesIO()
        make_pickler(stream).dump(batch)
        if self._reducers.find_shared():
            self._put_back()
            stream = io.BytesIO()
            make_pickler(stream).dump(batch)
        return stream.getvalue()

    def _pickler(self, stream: io.BytesIO) -> pickle.Pickler:
        pickler = pickle.Pickler(stream, 5, buffer_callback=self._is_in_band)
        pickler.dispatch_table = self._reducers
        return pickler

    def _dump_by_value(self, batch: Any, error: Exception) -> bytes:
        self._reducers.forget()
        try:
            return self._dump(batch, lambda stream: _CloudPickler(stream, self._reducers, self._is_in_band))
        except (pickle.PicklingError, TypeError, AttributeError):
            raise error from None

    def _is_in_band(self, buffer: pickle.PickleBuffer) -> bool:
        """Say whether a buffer that pickle met goes into the pickle."""
        if buffer is _PLACED:
            return False
        contents = buffer.raw()
        if contents.nbytes <= INLINE_MAX:
            return True
        array = np.frombuffer(contents, np.uint8)
        self._place(array.ctypes.data, array)
        return False

    def _place(self, address: int, array: Array) -> pickle.PickleBuffer:
        """Find a place for a large buffer outside the pickle.

        Args:
            address: of the memory that `array` fills without gaps; 0 if there are gaps.
            array: what to send; in C order if there are gaps.
        """
        if self._heap is None or not self._place_in_slab(self._heap, address, array):
            contents = bytes_of(array)
            self._entries.append(_Entry(RAW, 0, 0, contents.nbytes))
            self._raw.append(contents)
        return _PLACED

    def _place_in_slab(self, heap: Heap, address: int, array: Array) -> bool:
        found = heap.locate(address, array.nbytes) if address else None
        if found is not None:
            self._enter(*found, array.nbytes)
            return True
        if (region := self._borrow(heap, array.nbytes)) is None:
            return False
        memory = heap.memory_of(region)
        if address:
            np.copyto(np.frombuffer(memory, np.uint8, array.nbytes), bytes_of(array))
        else:
            np.copyto(np.ndarray(array.shape, array.dtype, memory), array)
        return True

    def _borrow(self, heap: Heap, nbytes: int) -> Region | None:
        """Take a region to copy into."""
        if (region := heap.take(nbytes)) is not None:
            self._borrowed.append(region)
            self._enter(region, 0, nbytes)
        return region

    def _enter(self, region: Region, offset: int, nbytes: int) -> None:
        self._regions.append(region)
        self._entries.append(_Entry(region.offset, region.capacity, offset, nbytes))

    def _put_back(self) -> None:
        """Undo what was placed."""
        for region in self._borrowed:
            assert self._heap is not None
            self._heap.put_back(region)
        self._forget()

    def _forget(self) -> None:
        for placed in (self._entries, self._raw, self._regions, self._borrowed):
            placed.clear()

    # ---------------------------------------------------------------------------------------------------- framing
    def _framed(self, stream: bytes) -> list[Any]:
        heap, is_placed = self._heap, False
        if heap is not None and len(stream) > STREAM_MAX and (region := self._borrow(heap, len(stream))) is not None:
            heap.memory_of(region)[: len(stream)] = stream
            is_placed = True
        if not self._entries:
            return [stream]
        head = bytearray(_HEAD.pack(_FRAMED, is_placed, len(self._entries), 0 if is_placed else len(stream)))
        for entry in self._entries:
            head += _ENTRY.pack(*entry)
        for region in self._regions:
            assert heap is not None
            heap.send(region)
        parts = [head, b"" if is_placed else stream, *(contents.data for contents in self._raw)]
        self._forget()
        return parts


def decode(payload: Any, open_region: Open | None = None) -> tuple[Any, int]:
    """Return the batch of a payload, and its bytes. Nothing in the batch refers to `payload`.

    Raises:
        LookupError: the payload names a region, and `open_region` is None or does not know the region.
        ValueError: the payload is shorter than it says.
        Exception: whatever unpickling the batch raises.
    """
    if payload[0] != _FRAMED:  # most small batches
        return pickle.loads(payload), len(payload)
    view = memoryview(payload)
    _, is_placed, num_entries, stream_bytes = _HEAD.unpack_from(view)
    at = _HEAD.size + num_entries * _ENTRY.size
    check_inside(at, stream_bytes, len(view))
    entries = [_Entry(*fields) for fields in _ENTRY.iter_unpack(view[_HEAD.size : at])]
    buffers = _buffers(entries, view[at + stream_bytes :], open_region)
    stream = buffers.pop() if is_placed else view[at : at + stream_bytes]
    nbytes = len(view) + sum(e.nbytes for e in entries if e.region != RAW)
    return pickle.loads(stream, buffers=buffers), nbytes


def _buffers(entries: list[_Entry], raw: memoryview, open_region: Open | None) -> list[memoryview]:
    """The memory of each entry: in the arena, or a copy, since a label kept must not hold the whole payload."""
    buffers = []
    regions: dict[int, memoryview] = {}
    for entry in entries:
        number = entry.region
        if number == RAW:
            check_inside(0, entry.nbytes, len(raw))
            copy = np.empty(entry.nbytes, np.uint8)
            copy[:] = np.frombuffer(raw, np.uint8, entry.nbytes)
            raw = raw[entry.nbytes :]
            buffers.append(copy.data)
            continue
        if number not in regions:
            if open_region is None:
                raise LookupError(f"the payload names the slab at {number}, and nobody knows slabs here")
            regions[number] = open_region(number, entry.capacity)
        check_inside(entry.offset, entry.nbytes, len(regions[number]))
        buffers.append(regions[number][entry.offset : entry.offset + entry.nbytes])
    return buffers


def check_inside(offset: int, nbytes: int, there: int) -> None:
    """Refuse a part of a payload that is not wholly there, before memory is made for it."""
    if offset < 0 or nbytes < 0 or offset + nbytes > there:
        raise ValueError(f"the payload names {nbytes} bytes at {offset}, where {there} are")


def bytes_of(array: Array) -> Array:
    """The memory of an array without gaps; of one with gaps a copy, in C order."""
    if array.flags.fnc:
        array = array.T
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
