"""From a batch to a payload and back: pickle protocol 5, large buffers outside the pickle.

    payload, plain:   pickle                                                    (a pickle begins with 0x80)
    payload, framed:  head | entries | pickle | raw buffers                     (a head begins with 1)

An entry names a large buffer, in the order in which the pickle wants them: either one in a region of the arena, then
its bytes are not in the payload, or the next of the raw buffers. A long pickle (images of PIL, strings) is in a region
as well, as the last entry.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import threading
from collections import ChainMap
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

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
_ENTRY = struct.Struct("<qqqq")  # offset of the region in the arena, or RAW; its capacity; offset in it, bytes

Open: TypeAlias = "Callable[[int, int], memoryview]"
"""Begins the lease of a region, which is known by its offset in the arena and its capacity."""


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
        self._entries: list[tuple[int, int, int, int]] = []
        self._raw: list[Array] = []
        self._copies: list[memoryview] = []  # in slabs, which nothing else refers to before they are sent

    def __enter__(self) -> None:
        self._thread = threading.get_ident()

    def __exit__(self, *exc_info: object) -> None:
        self._thread = 0

    def encode(self, batch: Any) -> list[Any]:
        """Return the payload of `batch`, as bytes-like parts to be sent one after the other before the next call.

        Raises:
            RuntimeError: a tensor that is not on the CPU, or that requires grad and is not a leaf.
            pickle.PicklingError, TypeError, AttributeError: what neither pickle nor cloudpickle can take.
        """
        try:
            try:
                stream = self._dump(batch, by_reference)
            except (pickle.PicklingError, TypeError, AttributeError) as error:
                self._forget()
                stream = self._dump_by_value(batch, error)
            return self._framed(stream)
        finally:
            self._forget()

    def allocate(self, nbytes: int) -> memoryview | None:
        """Return memory in a slab for a tensor of the batch; None if it has to be allocated as ever."""
        # Threads that fetch samples of a later batch at the same time may well collate parts of them.
        if self._heap is None or self._thread != threading.get_ident():
            return None
        return self._heap.allocate(nbytes) if nbytes > INLINE_MAX else None

    def watch_forks(self) -> None:
        """Have children that this process forks, as collate_fn may, take no slabs and keep what they look at."""
        if (heap := self._heap) is not None:
            os.register_at_fork(before=heap.before_fork, after_in_child=self._leave_heap)

    def _leave_heap(self) -> None:
        self._heap = None

    # --------------------------------------------------------------------------------------------------- pickling
    def _dump(self, batch: Any, make_pickler: Callable[..., pickle.Pickler]) -> bytes:
        stream = io.BytesIO()
        make_pickler(stream, self._reducers, self._is_in_band).dump(batch)
        if self._reducers.find_shared():
            self._forget_places()
            stream = io.BytesIO()
            make_pickler(stream, self._reducers, self._is_in_band).dump(batch)
        return stream.getvalue()

    def _dump_by_value(self, batch: Any, error: Exception) -> bytes:
        try:
            return self._dump(batch, by_value)
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
        if not ((address and self._enter(address, array.nbytes)) or self._copy(array, has_gaps=not address)):
            contents = bytes_of(array)
            self._entries.append((RAW, 0, 0, contents.nbytes))
            self._raw.append(contents)
        return _PLACED

    def _enter(self, address: int, nbytes: int) -> bool:
        """Note the place of memory, if that is in a slab of this process; return whether it is."""
        if self._heap is None or (found := self._heap.locate(address, nbytes)) is None:
            return False
        region, offset = found
        self._entries.append((region.offset, region.capacity, offset, nbytes))
        return True

    def _copy(self, array: Array, *, has_gaps: bool = False) -> bool:
        """Copy an array into a slab; False if there is none."""
        if self._heap is None or (memory := self._heap.allocate(array.nbytes)) is None:
            return False
        copy = np.frombuffer(memory, np.uint8)
        if has_gaps:
            np.copyto(np.ndarray(array.shape, array.dtype, memory), array)
        else:
            np.copyto(copy, bytes_of(array))
        self._copies.append(memory)
        return self._enter(copy.ctypes.data, copy.nbytes)

    def _forget(self) -> None:
        self._reducers.forget()
        self._forget_places()

    def _forget_places(self) -> None:
        """Copies that were not sent are free again with this: nothing refers to them."""
        self._entries.clear()
        self._raw.clear()
        self._copies.clear()

    # ---------------------------------------------------------------------------------------------------- framing
    def _framed(self, stream: bytes) -> list[Any]:
        is_placed = len(stream) > STREAM_MAX and self._copy(np.frombuffer(stream, np.uint8))
        if not self._entries:
            return [stream]
        head = bytearray(_HEAD.pack(_FRAMED, is_placed, len(self._entries), 0 if is_placed else len(stream)))
        for entry in self._entries:
            head += _ENTRY.pack(*entry)
            if entry[0] != RAW:
                assert self._heap is not None
                self._heap.send(entry[0])
        return [head, b"" if is_placed else stream, *(contents.data for contents in self._raw)]


def by_reference(stream: io.BytesIO, table: Any, collect: Callable[[pickle.PickleBuffer], Any]) -> pickle.Pickler:
    """Return pickle's own pickler with a dispatch table; `collect` is told of buffers, and keeps out what it will."""
    pickler = pickle.Pickler(stream, 5, buffer_callback=collect)
    pickler.dispatch_table = table
    return pickler


def by_value(stream: io.BytesIO, table: Any, collect: Callable[[pickle.PickleBuffer], Any]) -> pickle.Pickler:
    """Return a pickler that takes what plain pickle refuses: lambdas, classes of a notebook.

    These come out as the parent's own classes.
    """
    import cloudpickle  # here: hardly any worker needs it

    pickler: pickle.Pickler = cloudpickle.Pickler(stream, 5, buffer_callback=collect)
    # The C code's own attribute, which is hidden behind that of cloudpickle's class.
    pickle.Pickler.dispatch_table.__set__(pickler, ChainMap(table, cloudpickle.Pickler.dispatch_table))  # type: ignore[attr-defined]
    return pickler


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
    buffers, nbytes = _buffers(view[_HEAD.size : at], view[at + stream_bytes :], open_region)
    stream = buffers.pop() if is_placed else view[at : at + stream_bytes]
    return pickle.loads(stream, buffers=buffers), len(view) + nbytes


def _buffers(entries: memoryview, raw: memoryview, open_region: Open | None) -> tuple[list[memoryview], int]:
    """The memory of each entry: in the arena, or a copy, since a label kept must not hold the whole payload.

    And how many bytes are in the arena.
    """
    buffers, in_arena = [], 0
    regions: dict[int, memoryview] = {}
    for region, capacity, offset, nbytes in _ENTRY.iter_unpack(entries):
        if region == RAW:
            check_inside(0, nbytes, len(raw))
            copy = np.empty(nbytes, np.uint8)
            copy[:] = np.frombuffer(raw, np.uint8, nbytes)
            raw = raw[nbytes:]
            buffers.append(copy.data)
            continue
        if region not in regions:
            if open_region is None:
                raise LookupError(f"the payload names the slab at {region}, and nobody knows slabs here")
            regions[region] = open_region(region, capacity)
        check_inside(offset, nbytes, len(regions[region]))
        buffers.append(regions[region][offset : offset + nbytes])
        in_arena += nbytes
    return buffers, in_arena


def check_inside(offset: int, nbytes: int, there: int) -> None:
    """Refuse a part of a payload that is not wholly there, before memory is made for it."""
    if offset < 0 or nbytes < 0 or offset + nbytes > there:
        raise ValueError(f"the payload names {nbytes} bytes at {offset}, where {there} are")


def bytes_of(array: Array) -> Array:
    """The memory of an array without gaps; of one with gaps a copy, in C order."""
    if array.flags.fnc:
        array = array.T
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
