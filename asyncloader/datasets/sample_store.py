"""Samples by key in one file, in memory or on a disk, which any number of processes fill and read at once.

    head | table: a slot for each key | samples, one after the other
                    └── where the sample is, how long, whose it is, checksums

    read     slot ──> sample                                  no lock
    add      claim room (locked: two numbers in the head) ──> write the sample ──> write its slot

A process that is killed between two steps leaves room that nobody uses; a slot is written after its sample, within one
page, so there is all of it or nothing. Files are read and written, not mapped: a full disk is an error then and not a
signal. Nothing is ever taken out: an epoch reads every sample once, so what was used least recently is as likely to be
wanted next as anything else, and a cache that is too small for all would throw out each sample before its next use.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import secrets
import struct
import time
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from asyncloader.datasets.memory_file import HEAD, MemoryFile, write_at
from asyncloader.datasets.records import aligned, empty, pack, unpack
from asyncloader.datasets.shared_dict import canonical

log = logging.getLogger("asyncloader")

KIND = b"asl-smp1"
MISSING = object()

_HEAD = struct.Struct("<QQ32s")  # direct slots, hashed slots, fingerprint
_HEAD_AT = HEAD
_CLAIMS = struct.Struct("<QQQ16s")  # most bytes, claimed bytes, samples, who was told last that there is no room
_CLAIMS_AT = 256
_TABLE_AT = 4096
_SLOT = struct.Struct("<QQQII")  # offset, length, hash of the key, checksum of the sample, checksum of the slot
_WINDOW = 16  # slots that are looked at for a key that is no index
_LEAST_HASHED = 1 << 16
_LOCK_WAIT_S = 1.0
_LOCK_POLL_S = 50e-6


class StoreUsage(NamedTuple):
    """The contents of a store: samples, their bytes, and how many bytes it may hold."""

    samples: int
    bytes: int
    max_bytes: int


class SampleStore:
    """A store, open in this process. Any thread may call it; picklable.

    Args:
        file: The file, as `in_memory` or `at` have made it.

    Attributes:
        is_on_disk: Whether to read or write may take as long as a disk takes.
    """

    def __init__(self, file: MemoryFile) -> None:
        self._file = file
        self._direct, self._hashed, _ = _HEAD.unpack(os.pread(file.fd, _HEAD.size, _HEAD_AT))
        self._data_at = _TABLE_AT + _SLOT.size * (self._direct + self._hashed + _WINDOW)
        self.is_on_disk = file.path is not None  # after a crash of the machine, a slot may be there without its sample
        self._may_write = os.access(file.path, os.W_OK) if file.path else True
        self._told_outdated = False
        self._lock_wait_s = _LOCK_WAIT_S

    @classmethod
    def in_memory(cls, slots: int | None, max_bytes: int) -> SampleStore:
        """Make one that lives as long as a process has it.

        Args:
            slots: How many keys there are, counted from 0; None if that is not known.
            max_bytes: How many bytes of samples it may hold.
        """
        file = MemoryFile.create(KIND)
        _write_head(file.fd, slots, b"", max_bytes)
        return cls(file)

    @classmethod
    def at(cls, path: Path, slots: int | None, max_bytes: int, fingerprint: bytes) -> SampleStore:
        """Open the one at a path; make it if there is none. Several processes may do so at once.

        Raises:
            OSError: The disk is full, or permissions forbid it.
            ValueError: The file is something else.
        """
        if not path.exists():
            _create_at(path, slots, max_bytes, fingerprint)
        store = cls(MemoryFile.open(os.fspath(path), KIND, writable=os.access(path, os.W_OK)))
        if store._may_write:
            with contextlib.suppress(BlockingIOError), store._locked():
                _, *rest = store._claims()
                store._write_claims(max_bytes, *rest)
        return store

    def __reduce__(self) -> Any:
        return SampleStore, (self._file,)

    def __deepcopy__(self, memo: dict[int, Any]) -> SampleStore:
        """Return an empty one in memory: the dataset is copied with it, and the copy may be changed."""
        return self if self.is_on_disk else SampleStore.in_memory(self._direct or None, self.usage().max_bytes)

    def usage(self) -> StoreUsage:
        """Return what it holds."""
        limit, claimed, samples, _ = self._claims()
        return StoreUsage(samples, claimed, limit)

    def get(self, key: Any, *, wait: bool = True) -> Any:
        """Return a sample, or MISSING.

        A sample on a disk whose class is not there any more counts as missing: it is made anew, and kept anew.

        Args:
            key: Its key.
            wait: Wait for the disk, if it has to be asked.

        Raises:
            BlockingIOError: The disk has to be asked, and is not to be waited for.
            Exception: Unpickling the sample failed; a note names the file.
        """
        at, _, found = self._find(key, wait)
        if found is None:
            return MISSING
        offset, length, checksum = found
        buffer = empty(length)
        memory = memoryview(buffer)
        if not self._read(memory, offset, wait) or (self.is_on_disk and zlib.crc32(memory) != checksum):
            self._empty(at)
            return MISSING
        try:
            return unpack(memory)
        except Exception as error:
            if not self.is_on_disk:
                raise
            if not isinstance(error, (AttributeError, ImportError)):
                error.add_note(
                    f"It is the sample {key!r} of the cache {self._file.path}; delete that if it is outdated."
                )
                raise
            if not self._told_outdated:
                self._told_outdated = True
                log.warning(
                    "The cache %s has samples of code that has changed since (%s): they are made and kept anew.",
                    self._file.path,
                    error,
                )
            self._empty(at)
            return MISSING

    def add(self, key: Any, sample: Any) -> OSError | None:
        """Keep a sample, if there is room; return the error, and try no more, if it could not be written.

        Raises:
            Exception: Pickling the sample failed.
        """
        at, owner, found = self._find(key, wait=True)
        if not self._may_write or at < 0 or found is not None:
            return None
        pieces = pack(sample)
        length = sum(aligned(len(piece)) for piece in pieces[:-1]) + len(pieces[-1])
        offset = self._claim(aligned(length))
        if offset is None:
            return None
        try:
            checksum, begin = 0, offset
            for piece in pieces:
                write_at(self._file.fd, piece, begin)
                checksum = self._add_to(checksum, piece, is_last=piece is pieces[-1])
                begin += aligned(len(piece))
            self._fill(at, offset, length, owner, checksum)
        except BlockingIOError:  # another process holds the lock for long: the next sample is tried again
            return None
        except OSError as error:
            self._may_write = False
            return error
        return None

    def first_to_tell(self, who: bytes) -> bool:
        """Whether no process of `who` has been told yet that there is no room; from now on one has."""
        try:
            with self._locked():
                *rest, last = self._claims()
                self._write_claims(*rest, who)
                return bool(last != who)
        except OSError:  # a head that cannot be written to any more
            return True

    # ---- slots ----

    def _find(self, key: Any, wait: bool) -> tuple[int, int, tuple[int, int, int] | None]:
        """Return the slot of a key, its hash, and of its sample offset, length and checksum.

        The last is None if the slot is free; the slot is -1 if there is none for this key.
        """
        data = canonical(key)
        if data is None:
            return -1, 0, None
        wanted = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")  # the same in every process
        first, count = self._direct + wanted % self._hashed, _WINDOW
        if isinstance(key, (int, np.integer)) and 0 <= key < self._direct:
            first, count = int(key), 1
        slots = memoryview(bytearray(_SLOT.size * count))
        if not self._read(slots, _TABLE_AT + _SLOT.size * first, wait):
            return first, wanted, None
        for number in range(count):
            slot = slots[number * _SLOT.size : (number + 1) * _SLOT.size]
            offset, length, owner, checksum, _ = _SLOT.unpack(slot)
            if not _is_filled(slot):
                return first + number, wanted, None
            if owner == wanted:
                return first + number, wanted, (offset, length, checksum)
        return -1, wanted, None

    def _fill(self, at: int, *values: int) -> None:
        slot = _SLOT.pack(*values, 0)[:-4]
        self._put(at, slot + struct.pack("<I", zlib.crc32(slot)))

    def _empty(self, at: int) -> None:
        if self._may_write:
            with contextlib.suppress(OSError):
                self._put(at, bytes(_SLOT.size))

    def _put(self, at: int, slot: bytes) -> None:
        """Write a slot, and count the sample that it has in place of what was there.

        Two workers may have made the same sample at the same time: it is there once.
        """
        place = _TABLE_AT + _SLOT.size * at
        with self._locked():
            before = os.pread(self._file.fd, _SLOT.size, place)
            write_at(self._file.fd, slot, place)
            limit, claimed, samples, told = self._claims()
            self._write_claims(limit, claimed, samples + _is_filled(slot) - _is_filled(before), told)

    def _add_to(self, checksum: int, piece: Any, *, is_last: bool) -> int:
        if not self.is_on_disk:
            return 0
        checksum = zlib.crc32(piece, checksum)
        return checksum if is_last else zlib.crc32(bytes(aligned(len(piece)) - len(piece)), checksum)

    def _read(self, into: memoryview, offset: int, wait: bool) -> bool:
        """Fill memory from the file; False if the file ends before."""
        flags = 0 if wait or not self.is_on_disk else getattr(os, "RWF_NOWAIT", 0)
        while into:
            try:
                count = os.preadv(self._file.fd, [into], offset, flags)
            except OSError as error:
                if not flags or error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise
                raise BlockingIOError(errno.EAGAIN, "the file system cannot tell") from error
            if not count:
                return False
            into, offset = into[count:], offset + count
        return True

    # ---- room ----

    def _claim(self, size: int) -> int | None:
        """Reserve room for a sample; None if there is none, or if somebody else takes long to reserve some."""
        try:
            with self._locked():
                limit, claimed, samples, told = self._claims()
                if claimed + size > limit:
                    return None
                self._write_claims(limit, claimed + size, samples, told)
                return int(self._data_at + claimed)
        except BlockingIOError:
            return None

    def _claims(self) -> tuple[int, int, int, bytes]:
        return _CLAIMS.unpack(os.pread(self._file.fd, _CLAIMS.size, _CLAIMS_AT))

    def _write_claims(self, *values: Any) -> None:
        write_at(self._file.fd, _CLAIMS.pack(*values), _CLAIMS_AT)

    @contextlib.contextmanager
    def _locked(self) -> Any:
        """Hold the lock of the file, which the kernel takes from whoever dies; it is held for some microseconds.

        On a busy machine whoever holds it may be off its core for many milliseconds, and is waited for. A process that
        is stopped while it holds it stops nobody else: it is waited for once, for a second, and from then on, until the
        lock has been free again, others go on at once without keeping their sample.

        Raises:
            BlockingIOError: Another process holds it for too long.
        """
        with MemoryFile.turn:
            give_up = time.monotonic() + self._lock_wait_s
            while True:
                try:
                    fcntl.lockf(self._file.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
                    break
                except (BlockingIOError, PermissionError):  # another process holds it: EAGAIN, or EACCES
                    if time.monotonic() >= give_up:
                        self._lock_wait_s = 0.0
                        raise BlockingIOError(errno.EAGAIN, "another process holds the lock") from None
                time.sleep(_LOCK_POLL_S)
            self._lock_wait_s = _LOCK_WAIT_S
            try:
                yield
            finally:
                fcntl.lockf(self._file.fd, fcntl.LOCK_UN, 1, 0)


def _is_filled(slot: bytes | memoryview) -> bool:
    """Whether a slot has a sample; not one that was written to in part."""
    if len(slot) < _SLOT.size:
        return False
    offset, *_, checksum = _SLOT.unpack(slot)
    return bool(offset) and checksum == zlib.crc32(slot[:-4])


def _write_head(fd: int, slots: int | None, fingerprint: bytes, max_bytes: int) -> None:
    direct = slots or 0
    # Holes take no room: with other keys than 0, 1, 2, ... the second part is filled, and the first stays empty.
    hashed = 4 * max(direct, _LEAST_HASHED if slots is not None else 1 << 20)
    write_at(fd, _HEAD.pack(direct, hashed, fingerprint), _HEAD_AT)
    write_at(fd, _CLAIMS.pack(max_bytes, 0, 0, b""), _CLAIMS_AT)
    os.ftruncate(fd, _TABLE_AT + _SLOT.size * (direct + hashed + _WINDOW))


def _create_at(path: Path, slots: int | None, max_bytes: int, fingerprint: bytes) -> None:
    """Make an empty store that appears under its name when it is complete; the first of several who try wins."""
    beside = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    fd = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        write_at(fd, (KIND + secrets.token_bytes(16)).ljust(HEAD, b"\0"), 0)
        _write_head(fd, slots, fingerprint, max_bytes)
        os.fsync(fd)
        with contextlib.suppress(FileExistsError):
            os.link(beside, path)
    finally:
        os.close(fd)
        os.unlink(beside)
