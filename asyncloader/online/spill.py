"""Spill: what was put is written to a folder first, and survives the death of the process.

    feed.json        whose folder it is, and the marker that each of its records begins with
    00000000.spill   [marker, number, version, cost, lengths, checksums] [samples, pickled] ...
    00000001.spill   ...                                     a file begins when what a saved state has was deleted

A record is of an item of the source, or of a sample that was put without a lease; either is known by its number. A
state contains all that was put before it and is not trained, so what was written before a state that is saved is not
needed any more. Heads and samples have checksums of their own: of what is damaged, one record is lost, and the next one
is found by its marker. A record that was not written whole, because the process died or the disk was full, was not
acknowledged.

Records are written without fsync: they survive the process, not the machine.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import pickle
import secrets
import struct
import weakref
import zlib
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from asyncloader import identity
from asyncloader.errors import ConfigurationError, StateMismatchError
from asyncloader.online.forks import keep_from_forks

log = logging.getLogger("asyncloader")

_MARKER = 16
_HEAD = struct.Struct(f"<{_MARKER}sBQIQddQI")
_CHECKSUM = struct.Struct("<I")  # of the head, behind it
_WHOLE_HEAD = _HEAD.size + _CHECKSUM.size
_OWNER = "feed.json"
_PIECE = 1 << 20  # bytes that are searched for a marker at once
Kind = Literal["item", "put"]
_KINDS: tuple[Kind, ...] = ("item", "put")


class Record(NamedTuple):
    """What is known of a record without its samples.

    Attributes:
        kind: Whether it is of an item of the source.
        number: The number of the item, or among those that were put without one.
        item: A checksum of the item; 0 if nobody knows it.
        version: The version of the weights that made the samples.
        cost: What all of them cost.
        priority: Their priority.
        length: Bytes of the samples; 0 for an item that was dropped.
        checksum: Of these.
    """

    kind: Kind
    number: int
    item: int
    version: int
    cost: float
    priority: float
    length: int
    checksum: int


class _Place(NamedTuple):
    """A record, its file, and where its samples begin there."""

    record: Record
    segment: int
    offset: int


class Spill:
    """A folder that records are appended to, and read again after a crash. Whoever calls holds the feed's lock.

    Args:
        folder: Is made if it is not there.
        owner: Which feeds it is for; what the folder of another one says differs.

    Raises:
        ConfigurationError: if another feed has it, in this process or another one, or it is another kind of feed's.

    Attributes:
        segment: Number of the file that is written now.
        pushed: Number of the next sample that is put without a lease is at least this.
    """

    def __init__(self, folder: str | os.PathLike[str], owner: dict[str, Any]) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        # What is written now, and the owner's file, which is locked. Closed when nobody has the feed any more.
        self._open: dict[str, FileIO] = {"owner": _opened(self._folder / _OWNER)}
        weakref.finalize(self, _close, self._open)
        try:
            self._marker, self.segment, self.pushed = self._lock(owner)
        except BaseException:
            _close(self._open)
            raise
        self._places: dict[tuple[Kind, int], _Place] = {}
        self._offset = 0
        segments = sorted(self._folder.glob("*.spill"))
        for path in segments:
            for place in self._index(path):
                self._places[place.record.kind, place.record.number] = place
        # States name the files that they need, and samples that they have: a number comes once, also after files were
        # deleted.
        self.segment = max(self.segment, int(segments[-1].stem) + 1 if segments else 0)

    def _lock(self, owner: dict[str, Any]) -> tuple[bytes, int, int]:
        """Take the folder; return its marker, and the numbers of the next file and the next sample that is put."""
        file = self._open["owner"]
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigurationError(f"another feed spills to {self._folder}: each feed has a folder") from error
        text = file.readall()
        found = json.loads(text) if text else {"marker": secrets.token_hex(_MARKER), "segment": 0, "pushed": 0, **owner}
        try:
            identity.check(found, owner)
        except StateMismatchError as error:
            raise ConfigurationError(f"{self._folder} has samples of another feed: each run has a folder") from error
        self._owner = found
        self._write_owner()
        return bytes.fromhex(found["marker"]), found["segment"], found["pushed"]

    def _write_owner(self) -> None:
        # Its length never shrinks by more than spaces make good, and so few bytes are written whole, or not at all.
        os.pwrite(self._open["owner"].fileno(), json.dumps(self._owner).ljust(512).encode(), 0)

    @property
    def is_closed(self) -> bool:
        """Whether the folder was let go of; another feed may have it."""
        return not self._open

    def write(
        self, kind: Kind, number: int, item: int, samples: bytes, version: int, cost: float, priority: float
    ) -> None:
        """Write a record. It survives the process when this returns.

        Args:
            kind: Whether it is of an item of the source.
            number: The number of the item, or among those that were put without one.
            item: A checksum of the item.
            samples: They, pickled; empty for an item that was dropped.
            version: Their version.
            cost: Their cost.
            priority: Their priority.
        """
        record = Record(kind, number, item, version, cost, priority, len(samples), zlib.crc32(samples))
        if "file" not in self._open:
            path = self._path(self.segment)
            self._open["file"], self._offset = _opened(path, os.O_EXCL), 0
        file, offset = self._open["file"].fileno(), self._offset
        head = _HEAD.pack(self._marker, _KINDS.index(kind), *record[1:])
        for part in (head, _CHECKSUM.pack(zlib.crc32(head)), samples):
            rest = memoryview(part)
            while rest:  # after an error, the disk is full for example, the next record is written over this one
                written = os.pwrite(file, rest, offset)
                rest, offset = rest[written:], offset + written
        self._places[kind, number] = _Place(record, self.segment, self._offset + _WHOLE_HEAD)
        self._offset = offset

    def numbers(self, kind: Kind) -> list[int]:
        """Return the numbers of the records."""
        return sorted(number for each, number in self._places if each == kind)

    def read(self, kind: Kind, number: int) -> tuple[Record, Any] | None:
        """Return the last record of a number, and its samples; None if there is none, or they are damaged."""
        if (place := self._places.get((kind, number))) is None:
            return None
        record = place.record
        with self._path(place.segment).open("rb") as file:
            file.seek(place.offset)
            samples = file.read(record.length)
        if len(samples) < record.length or zlib.crc32(samples) != record.checksum:
            log.warning("The samples of %s %d in %s are damaged, and lost.", kind, number, self._folder)
            del self._places[kind, number]
            return None
        return record, pickle.loads(samples) if samples else None

    def trim(self, segment: int, drawn: int, pushed: int) -> None:
        """Delete the files before one, but for those with records of items that a state has not drawn yet.

        What follows is in another file, so that a state that is taken from now on makes all of these superfluous.

        Args:
            segment: The file that was written when the state was taken.
            drawn: The number of the next item of the source in the state.
            pushed: The number of the next sample that is put without a lease.
        """
        if self.is_closed:
            return
        self._end_segment()
        self.pushed = pushed
        self._owner.update(segment=self.segment, pushed=pushed)
        self._write_owner()
        needed = {place.segment for (kind, number), place in self._places.items() if kind == "item" and number >= drawn}
        for path in self._folder.glob("*.spill"):
            if int(path.stem) < segment and int(path.stem) not in needed:
                path.unlink()
        self._places = {
            key: place for key, place in self._places.items() if place.segment >= segment or place.segment in needed
        }

    def close(self) -> None:
        """Let go of the folder."""
        self._end_segment()
        _close(self._open)

    def _end_segment(self) -> None:
        if (file := self._open.pop("file", None)) is not None:
            file.close()
            self.segment += 1

    def _path(self, segment: int) -> Path:
        return self._folder / f"{segment:08}.spill"

    def _index(self, path: Path) -> Iterator[_Place]:
        """Yield the records of a file. Their samples are not looked at."""
        with path.open("rb") as file:
            size, offset = os.fstat(file.fileno()).st_size, 0
            while offset + _WHOLE_HEAD <= size:
                file.seek(offset)
                if (record := self._record(file.read(_WHOLE_HEAD))) is None:
                    following = self._find_marker(file, offset + 1)
                    log.warning("%s is damaged from byte %d to %d.", path, offset, following)
                    offset = following
                    continue
                offset += _WHOLE_HEAD
                if offset + record.length <= size:
                    yield _Place(record, int(path.stem), offset)
                offset += record.length

    def _record(self, head: bytes) -> Record | None:
        marker, kind, *rest = _HEAD.unpack_from(head)
        if marker != self._marker or _CHECKSUM.unpack_from(head, _HEAD.size)[0] != zlib.crc32(head[: _HEAD.size]):
            return None
        return Record(_KINDS[kind], *rest)

    def _find_marker(self, file: BinaryIO, offset: int) -> int:
        """Return where the next record may begin, or the end of the file."""
        file.seek(offset)
        while len(piece := file.read(_PIECE)) >= _MARKER:
            if (found := piece.find(self._marker)) >= 0:
                return offset + found
            offset += len(piece) - _MARKER + 1
            file.seek(offset)
        return offset + len(piece)


def _opened(path: Path, flags: int = 0) -> FileIO:
    """Open a file to write to, which forks do not have: a lock would go on there."""
    return keep_from_forks(FileIO(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | flags, 0o600), "r+"))


def _close(files: dict[str, FileIO]) -> None:
    while files:
        files.popitem()[1].close()
