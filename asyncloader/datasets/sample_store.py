"""Samples by key in one file, in memory or on a disk, which any number of processes fill and read at once.

    head | table: slots | samples, each with its key, appended one after the other
                    └── where the sample is, how long, hash of its key, checksums

    read     slots of the key's hash ──> sample, if it has this key
    add      append key and sample: the kernel says where ──> write a slot

Nobody takes a lock, so a process that is stopped or killed holds up no other: what is appended (O_APPEND) is nobody
else's, and a slot is written after its sample, within one page, so there is all of it or nothing. Two processes that
add at the same moment may write one slot: then one of the two samples is made again later. Files are read and written,
not mapped: a full disk is an error then and not a signal. Nothing is ever taken out: an epoch reads every sample once,
so what was used least recently is as likely to be wanted next as anything else, and a cache that is too small for all
would throw out each sample before its next use.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import struct
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from asyncloader.datasets.memory_file import HEAD, MemoryFile, is_by_value, write_at
from asyncloader.datasets.records import aligned, empty, pack, unpack
from asyncloader.datasets.shared_dict import canonical
from asyncloader.errors import ConfigurationError

_KIND = b"asl-smp3"
MISSING = object()

_HEAD = struct.Struct("<Q")  # how many slots
_TOLD_AT = 128  # who was told last why no more samples are kept
_TABLE_AT = 4096
_SLOT = struct.Struct("<QQQII")  # offset, length, hash of the key, checksum of the sample, checksum of the slot
_WINDOW = 16  # slots that a key may have
_LEAST_SLOTS = 1 << 16
_UNKNOWN_SLOTS = 1 << 20
_PIECE_BYTES = 1 << 20  # of the table are looked at together


class StoreUsage(NamedTuple):
    """The contents of a store: samples, their bytes, and how many bytes it may hold."""

    samples: int
    bytes: int
    max_bytes: int


class SampleStore:
    """A store, open in this process. Any thread may call it; picklable.

    Args:
        file: The file, as `in_memory` or `at` have made it.
        max_bytes: How many bytes of samples it may hold.
        path: Where it is, if it is on a disk.

    Attributes:
        is_on_disk: Whether to read or write may take as long as a disk takes.
    """

    def __init__(self, file: MemoryFile, max_bytes: int, path: Path | None = None) -> None:
        self.is_on_disk = path is not None  # after a crash of the machine, a slot may be there without its sample
        self._file, self._max_bytes, self._path = file, max_bytes, path
        (self._num_slots,) = _HEAD.unpack(os.pread(file.fd, _HEAD.size, HEAD))
        self._data_at = _TABLE_AT + _SLOT.size * (self._num_slots + _WINDOW)
        self._may_write = os.access(path, os.W_OK) if path else True

    @classmethod
    def in_memory(cls, count: int | None, max_bytes: int) -> SampleStore:
        """Make one that lives as long as a process has it, for so many keys, if that is known."""
        if sys.platform != "linux":
            raise ConfigurationError('samples are kept in "ram" on Linux alone: give a folder')
        file = MemoryFile.create()
        _write_head(file.fd, count)
        return cls(file, max_bytes)

    @classmethod
    def at(cls, path: Path, count: int | None, max_bytes: int) -> SampleStore:
        """Open the one at a path; make it if there is none. Several processes may do so at once.

        Raises:
            OSError: The disk is full, or permissions forbid it.
            ValueError: The file is something else.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        may_write = os.access(path if path.exists() else path.parent, os.W_OK)
        file = MemoryFile(os.open(path, (os.O_RDWR | os.O_CREAT if may_write else os.O_RDONLY) | os.O_CLOEXEC, 0o666))
        if may_write:
            fcntl.flock(file.fd, fcntl.LOCK_EX)
            if not os.pread(file.fd, 1, 0).strip(b"\0"):  # new, or of a process that was killed before the end of this
                _write_head(file.fd, count)
                write_at(file.fd, _KIND, 0)
            fcntl.flock(file.fd, fcntl.LOCK_UN)
        if os.pread(file.fd, len(_KIND), 0) != _KIND:
            raise ValueError(f"{path} is not the file that was expected")
        return cls(file, max_bytes, path)

    def __reduce__(self) -> Any:
        count = self._num_slots // 2
        if self._path is not None:
            return SampleStore.at, (self._path, count, self._max_bytes)
        if is_by_value():  # a process elsewhere keeps samples of its own
            return SampleStore.in_memory, (count, self._max_bytes)
        return SampleStore, (self._file, self._max_bytes)

    def __deepcopy__(self, memo: dict[int, Any]) -> SampleStore:
        """Return an empty one in memory: the dataset is copied with it, and the copy may be changed."""
        return self if self.is_on_disk else SampleStore.in_memory(self._num_slots // 2, self._max_bytes)

    def usage(self) -> StoreUsage:
        """Return what it holds. Takes as long as reading the table."""
        count = 0
        for at in range(_TABLE_AT, self._data_at, _PIECE_BYTES):
            slots = os.pread(self._file.fd, min(_PIECE_BYTES, self._data_at - at), at)
            count += int(np.count_nonzero(np.frombuffer(slots, np.uint64)[:: _SLOT.size // 8]))
        return StoreUsage(count, os.fstat(self._file.fd).st_size - self._data_at, self._max_bytes)

    def get(self, key: Any) -> Any:
        """Return a sample, or MISSING.

        Raises:
            Exception: Unpickling the sample failed; of a store on a disk, a note names the file.
        """
        data = canonical(key)
        if data is None:
            return MISSING
        wanted = _hash(data)
        for at, slot in self._slots(data, wanted):
            if slot is None:
                break
            if slot[2] == wanted and (sample := self._sample(at, slot, data, key)) is not MISSING:
                return sample
        return MISSING

    def _sample(self, at: int, slot: tuple[int, ...], data: bytes, key: Any) -> Any:
        """Return the sample of a slot, if it is that of this key."""
        offset, length, _, checksum, _ = slot
        memory = memoryview(empty(length))
        if os.preadv(self._file.fd, [memory], offset) < length or (self.is_on_disk and zlib.crc32(memory) != checksum):
            self._put(at, bytes(_SLOT.size))
            return MISSING
        try:
            owner, sample = unpack(memory)
        except Exception as error:
            if self.is_on_disk:
                error.add_note(
                    f"It is the sample {key!r} of the cache {self._path}. If its code has changed since, give the "
                    "cache another fingerprint."
                )
            raise
        return sample if owner == data else MISSING

    def add(self, key: Any, sample: Any) -> str:
        """Keep a sample, if there is room; return why no more can be kept, if the file or the table forbids it.

        Raises:
            Exception: Pickling the sample failed.
        """
        data = canonical(key)
        if data is None or not self._may_write:
            return ""
        wanted = _hash(data)
        found = (place for place in self._slots(data, wanted) if place[1] is None or place[1][2] == wanted)
        at, slot = next(found, (-1, None))
        if at < 0:
            return f"its table of {self._num_slots:,} keys is full: that of a dataset with a length is large enough"
        if slot is not None:  # another process has just made it
            return ""
        record = _joined(pack((data, sample)))
        if os.fstat(self._file.fd).st_size - self._data_at + len(record) > self._max_bytes:
            return ""
        try:
            offset = self._append(record)
        except OSError as error:
            self._may_write = False
            return str(error)
        checksum = zlib.crc32(record) if self.is_on_disk else 0
        filled = _SLOT.pack(offset, len(record), wanted, checksum, 0)[:-4]
        self._put(at, filled + struct.pack("<I", zlib.crc32(filled)))
        return ""

    def first_to_tell(self, who: bytes) -> bool:
        """Whether no process of `who`, 16 bytes, has been told yet that no more is kept; from now on one has.

        Two that ask at the same moment may both be the first.
        """
        told = os.pread(self._file.fd, 16, _TOLD_AT)
        self._put(_TOLD_AT, who)
        return told != who

    def _slots(self, data: bytes, wanted: int) -> Iterator[tuple[int, tuple[int, ...] | None]]:
        """Yield where a key's slots are, and what is in them: None if one is free, or was written to in part."""
        first = (int(data[1:]) if data[:1] == b"i" else wanted) % self._num_slots  # 0, 1, 2, ... have one each
        begin = _TABLE_AT + _SLOT.size * first
        memory = os.pread(self._file.fd, _SLOT.size * _WINDOW, begin)
        for at in range(0, len(memory), _SLOT.size):
            slot = _SLOT.unpack_from(memory, at)
            is_whole = slot[-1] == zlib.crc32(memory[at : at + _SLOT.size - 4])
            yield begin + at, slot if is_whole else None

    def _put(self, offset: int, data: bytes) -> None:
        """Write a slot, or who was told. Where that is not possible, the sample is made again, or another one told."""
        with contextlib.suppress(OSError):
            write_at(self._file.fd, data, offset)

    def _append(self, record: bytes) -> int:
        """Write at the end of the file, and return where that was.

        The descriptor is opened for this call alone: a fork, or another thread, would share its position.
        """
        name = self._path or f"/proc/self/fd/{self._file.fd}"
        fd = os.open(name, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            count = os.write(fd, record)
            end = os.lseek(fd, 0, os.SEEK_CUR)
        finally:
            os.close(fd)
        if count < len(record):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return end - count


def _hash(data: bytes) -> int:
    """Return a number of 64 bits that is the same in every process."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _joined(pieces: list[Any]) -> bytes:
    return b"".join(part for piece in pieces for part in (piece, bytes(aligned(len(piece)) - len(piece))))


def _write_head(fd: int, count: int | None) -> None:
    slots = _UNKNOWN_SLOTS if count is None else max(2 * count, _LEAST_SLOTS)  # holes in a file take no room
    write_at(fd, _HEAD.pack(slots), HEAD)
    os.ftruncate(fd, _TABLE_AT + _SLOT.size * (slots + _WINDOW))
