"""Spill: what was put is written to a folder first, and survives the death of the process.

    00000000.spill   [length, checksum, record] [length, checksum, record] ...      records that were put before state 0
    00000001.spill   ...                                                            since that

A record is of an item of the source, or of a sample that was put without a lease; either is known by its number. A
state contains all that was put before it and is not trained, so what was written before a state that is saved is not
needed any more. A record that was not written whole, because the process died or the disk was full, ends what is read
of its file, whatever follows.

Records are written without fsync: they survive the process, not the machine.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import struct
import weakref
import zlib
from io import FileIO
from pathlib import Path
from typing import Any, Literal, NamedTuple

from asyncloader.errors import ConfigurationError
from asyncloader.online.forks import keep_from_forks

_HEAD = struct.Struct("<QI")
_NUMBER = 8
Kind = Literal["item", "put"]


class _Place(NamedTuple):
    """Where a record is: its file, and the bytes in there."""

    segment: int
    offset: int
    length: int


class Spill:
    """A folder that records are appended to, and read again after a crash. Whoever calls holds the feed's lock.

    Args:
        folder: Is made if it is not there.

    Raises:
        ConfigurationError: if another feed has it, in this process or another one.

    Attributes:
        segment: Number of the file that is written now.
        pushed: Number of the next sample that is put without a lease is at least this.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        # What is written now, and the lock. Closed when nobody has the feed any more.
        self._open: dict[str, FileIO] = {"lock": _opened(self._folder / "lock", os.O_CREAT)}
        weakref.finalize(self, _close, self._open)
        try:
            fcntl.flock(self._open["lock"], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            _close(self._open)
            raise ConfigurationError(f"another feed spills to {self._folder}: each feed has a folder") from error
        self._places: dict[tuple[Kind, int], _Place] = {}
        self._offset = 0
        segments = sorted(self._folder.glob("*.spill"))
        for path in segments:
            self._read_index(path)
        # States name the files that they need, and samples that they have: a number comes once, also after files were
        # deleted.
        file = self._open["lock"].fileno()
        next_number = int(os.pread(file, _NUMBER, 0) or 0)
        self.pushed = int(os.pread(file, 2 * _NUMBER, _NUMBER) or 0)
        self.segment = max(next_number, int(segments[-1].stem) + 1 if segments else 0)

    @property
    def is_closed(self) -> bool:
        """Whether the folder was let go of; another feed may have it."""
        return not self._open

    def write(self, kind: Kind, number: int, content: Any) -> None:
        """Write a record. It survives the process when this returns.

        Args:
            kind: Whether it is of an item of the source.
            number: The number of the item, or among those that were put without one.
            content: Samples, version, cost and priority; None for an item that was dropped.
        """
        record = pickle.dumps((kind, number, content), pickle.HIGHEST_PROTOCOL)
        if "file" not in self._open:
            self._open["file"], self._offset = _opened(self._path(self.segment), os.O_CREAT | os.O_EXCL), 0
        file, offset = self._open["file"].fileno(), self._offset
        for part in (_HEAD.pack(len(record), zlib.crc32(record)), record):
            rest = memoryview(part)
            while rest:  # after an error, the disk is full for example, the next record is written over this one
                written = os.pwrite(file, rest, offset)
                rest, offset = rest[written:], offset + written
        self._places[kind, number] = _Place(self.segment, self._offset + _HEAD.size, len(record))
        self._offset = offset

    def numbers(self, kind: Kind) -> list[int]:
        """Return the numbers of the records."""
        return sorted(number for each, number in self._places if each == kind)

    def read(self, kind: Kind, number: int) -> Any:
        """Return the content of the last record of a number; `...` if there is none."""
        if (place := self._places.get((kind, number))) is None:
            return ...
        with self._path(place.segment).open("rb") as file:
            file.seek(place.offset)
            return pickle.loads(file.read(place.length))[2]

    def begin_segment(self) -> int:
        """Note that a state was taken: what follows is in another file, whose number is returned."""
        if (file := self._open.pop("file", None)) is not None:
            file.close()
            self.segment += 1
        return self.segment

    def trim(self, segment: int, drawn: int, pushed: int) -> None:
        """Delete the files before one, but for those with records of items that a state has not drawn yet.

        Args:
            segment: The first file that was written after the state.
            drawn: The number of the next item of the source in the state.
            pushed: The number of the next sample that is put without a lease.
        """
        if self.is_closed:
            return
        self.pushed = pushed
        numbers = f"{self.segment:0{_NUMBER}}{pushed:0{2 * _NUMBER}}"
        os.pwrite(self._open["lock"].fileno(), numbers.encode(), 0)
        needed = {place.segment for (kind, number), place in self._places.items() if kind == "item" and number >= drawn}
        for path in self._folder.glob("*.spill"):
            if int(path.stem) < segment and int(path.stem) not in needed:
                path.unlink()
        self._places = {
            key: place for key, place in self._places.items() if place.segment >= segment or place.segment in needed
        }

    def close(self) -> None:
        """Let go of the folder."""
        self.begin_segment()
        _close(self._open)

    def _path(self, segment: int) -> Path:
        return self._folder / f"{segment:0{_NUMBER}}.spill"

    def _read_index(self, path: Path) -> None:
        with path.open("rb") as file:
            offset, size = 0, os.fstat(file.fileno()).st_size
            while len(head := file.read(_HEAD.size)) == _HEAD.size:
                length, checksum = _HEAD.unpack(head)
                if not 0 < length <= size - offset - _HEAD.size:
                    return
                record = file.read(length)
                if len(record) < length or zlib.crc32(record) != checksum:
                    return
                offset += _HEAD.size
                kind, number, _ = pickle.loads(record)
                self._places[kind, number] = _Place(int(path.stem), offset, length)
                offset += length


def _opened(path: Path, flags: int) -> FileIO:
    """Open a file to write to, which forks do not have: a lock would go on there."""
    return keep_from_forks(FileIO(os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600), "r+"))


def _close(files: dict[str, FileIO]) -> None:
    while files:
        files.popitem()[1].close()
