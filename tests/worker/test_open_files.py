"""Files that a dataset has opened in `__init__`: each forked worker reads them at an offset of its own."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gzip
import io
import logging
import mmap
import multiprocessing
import os
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset

from asyncloader import DataLoader
from asyncloader.worker.inherited import OpenFile, files_to_reopen, reopen
from tests.support import effort

ROW = 1 << 14  # more than a buffer has
ROWS = 32
PATIENCE_S = 30.0

pytestmark = pytest.mark.skipif(
    not os.path.isdir("/proc/self/fd"), reason="files are opened again by their links there"
)


def row(number: int) -> bytes:
    return number.to_bytes(8, "little") * (ROW // 8)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of rows, each of which has its number in it."""
    path = tmp_path / "rows"
    path.write_bytes(b"".join(map(row, range(ROWS))))
    return path


# ----------------------------------------------------------------------------------------------- ways to open a file

Seek = Callable[[int], Any]
Read = Callable[[], bytes]


def buffered(path: Path) -> tuple[Any, Seek, Read]:
    file = path.open("rb")
    return file, file.seek, lambda: file.read(ROW)


def unbuffered(path: Path) -> tuple[Any, Seek, Read]:
    file = path.open("rb", 0)
    return file, file.seek, lambda: file.read(ROW)


def text(path: Path) -> tuple[Any, Seek, Read]:
    file = path.open(encoding="latin-1", newline="")
    return file, file.seek, lambda: file.read(ROW).encode("latin-1")


def descriptor(path: Path, flags: int = 0) -> tuple[Any, Seek, Read]:
    file = contextlib.ExitStack()
    fd = os.open(path, os.O_RDONLY | flags)
    file.callback(os.close, fd)
    return file, lambda at: os.lseek(fd, at, os.SEEK_SET), lambda: os.read(fd, ROW)


def direct(path: Path) -> tuple[Any, Seek, Read]:
    file, seek, _ = descriptor(path, os.O_DIRECT)
    aligned = mmap.mmap(-1, ROW, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    (fd,) = (int(name) for name in os.listdir("/proc/self/fd") if _leads_to(name, path))

    def read() -> bytes:
        assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
        assert os.readv(fd, [aligned]) == ROW
        return aligned[:]

    return file, seek, read


def _leads_to(name: str, path: Path) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{name}") == str(path)
    except FileNotFoundError:
        return False


def of_a_c_library(path: Path) -> tuple[Any, Seek, Read]:
    libc = ctypes.CDLL(None)
    libc.fopen.restype = ctypes.c_void_p
    stream = ctypes.c_void_p(libc.fopen(bytes(path), b"rb"))
    content = ctypes.create_string_buffer(ROW)
    file = contextlib.ExitStack()
    file.callback(libc.fclose, stream)

    def read() -> bytes:
        assert libc.fread(content, 1, ROW, stream) == ROW
        return content.raw

    return file, lambda at: libc.fseek(stream, ctypes.c_long(at), os.SEEK_SET), read


def deleted(path: Path) -> tuple[Any, Seek, Read]:
    opened = unbuffered(path)
    path.unlink()
    return opened


def replaced(path: Path) -> tuple[Any, Seek, Read]:
    opened = unbuffered(path)
    other = path.with_suffix(".new")
    other.write_bytes(bytes(ROW * ROWS))
    other.rename(path)
    return opened


def sealed_memory(path: Path) -> tuple[Any, Seek, Read]:
    memory = os.memfd_create("rows", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(memory, path.read_bytes())
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    opened = unbuffered(Path(f"/proc/self/fd/{memory}"))
    os.close(memory)
    return opened


WAYS = [buffered, unbuffered, text, descriptor, direct, of_a_c_library, deleted, replaced, sealed_memory]


class Rows(Dataset[int]):
    """Seeks, waits until the other worker has, and reads."""

    def __init__(self, way: Callable[[Path], tuple[Any, Seek, Read]], path: Path) -> None:
        self.file, self.seek, self.read = way(path)
        self.both = multiprocessing.get_context("fork").Barrier(2)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> int:
        self.seek(index * ROW)
        self.both.wait(PATIENCE_S)
        content = self.read()
        self.both.wait(PATIENCE_S)
        return int.from_bytes(content[:8], "little") if content == row(content[0]) else -1


@pytest.mark.parametrize("way", WAYS)
def test_workers_that_seek_at_the_same_time_read_what_is_theirs(way: Any, path: Path) -> None:
    """However the file was opened, and whatever has become of it since."""
    try:
        dataset = Rows(way, path)
    except OSError as error:
        pytest.skip(f"this file system has no such files: {error}")
    with dataset.file:
        dataset.seek(3 * ROW)
        loader = DataLoader(dataset, 1, num_workers=2, multiprocessing_context="fork")
        assert [int(batch) for batch in loader] == list(range(ROWS))
        assert dataset.read() == row(3)  # no worker has moved the trainer's offset


# ------------------------------------------------------------------------------------------------ archives and others

MANY = 240


def of_zip(folder: Path) -> tuple[Any, Callable[[int], bytes]]:
    with zipfile.ZipFile(folder / "archive.zip", "w") as archive:
        for number in range(MANY):
            archive.writestr(str(number), row(number))
    opened = zipfile.ZipFile(folder / "archive.zip")
    return opened, lambda index: opened.read(str(index))


def of_tar(folder: Path) -> tuple[Any, Callable[[int], bytes]]:
    with tarfile.open(folder / "archive.tar", "w") as archive:
        for number in range(MANY):
            member = tarfile.TarInfo(str(number))
            member.size = ROW
            archive.addfile(member, io.BytesIO(row(number)))
    opened = tarfile.open(folder / "archive.tar")  # noqa: SIM115
    members = opened.getmembers()
    return opened, lambda index: opened.extractfile(members[index]).read()  # type: ignore[union-attr]


def of_gzip(folder: Path) -> tuple[Any, Callable[[int], bytes]]:
    with gzip.open(folder / "rows.gz", "wb", 0) as packed:
        packed.write(b"".join(map(row, range(MANY))))
    opened = gzip.open(folder / "rows.gz")  # noqa: SIM115

    def get(index: int) -> bytes:
        opened.seek(index * ROW)
        return opened.read(ROW)

    return opened, get


def of_hdf5(folder: Path) -> tuple[Any, Callable[[int], bytes]]:
    h5py = pytest.importorskip("h5py")
    with h5py.File(folder / "rows.h5", "w") as file:
        content = np.frombuffer(b"".join(map(row, range(MANY))), np.uint8).reshape(MANY, ROW)
        file.create_dataset("rows", data=content, chunks=(3, ROW), compression="gzip")
    opened = h5py.File(folder / "rows.h5", rdcc_nbytes=0)
    return opened, lambda index: opened["rows"][index].tobytes()


class Members(Dataset[bool]):
    """Whether what was read is what is there."""

    def __init__(self, get: Callable[[int], bytes]) -> None:
        self.get = get

    def __len__(self) -> int:
        return MANY

    def __getitem__(self, index: int) -> bool:
        return self.get(index) == row(index)


@pytest.mark.parametrize("kind", [of_zip, of_tar, of_gzip, of_hdf5])
def test_archives_that_the_dataset_has_opened(kind: Any, tmp_path: Path) -> None:
    """Two workers read from one, which is open in the trainer as well."""
    opened, get = kind(tmp_path)
    with opened:
        loader = DataLoader(Members(get), 4, num_workers=2, multiprocessing_context="fork", shuffle=True)
        assert sum(int(batch.sum()) for batch in loader) == MANY
        assert get(7) == row(7)


class Lines(IterableDataset[int]):
    """Goes through an open file from where that is."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def __iter__(self) -> Iterator[int]:
        return (int.from_bytes(content[:8], "little") for content in iter(lambda: self.file.read(ROW), b""))


def test_each_worker_of_a_stream_reads_on_from_where_the_file_was(path: Path) -> None:
    """The file was read up to row 20 when workers were forked: as in a process of its own, each reads all the rest."""
    with open(path, "rb", 0) as file:
        file.seek(20 * ROW)
        loader = DataLoader(Lines(file), None, num_workers=2, multiprocessing_context="fork")
        assert sorted(loader) == sorted([*range(20, ROWS), *range(20, ROWS)])
        assert file.tell() == 20 * ROW


class ByTurns(Dataset[Any]):
    """Reads the header of a record through a descriptor, and its body through a copy, as a library may do.

    Args:
        path: Of the rows.
        others: So many other descriptors of the file are open, at the same offset.
    """

    def __init__(self, path: Path, others: int) -> None:
        self.fds = [os.open(path, os.O_RDONLY) for _ in range(1 + others)]
        self.copies = list(map(os.dup, self.fds))

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        for fd in self.fds:
            os.lseek(fd, index * ROW, os.SEEK_SET)
        heads = [os.read(fd, 8) for fd in self.fds]
        bodies = [os.read(fd, ROW - 8) for fd in self.copies]
        return [head + body == row(index) for head, body in zip(heads, bodies, strict=True)]

    def close(self) -> None:
        """Close all."""
        for fd in (*self.fds, *self.copies):
            os.close(fd)


@pytest.mark.parametrize("others", [0, 3])
def test_a_file_that_is_read_by_turns_through_copies_of_a_descriptor(others: int, path: Path) -> None:
    """They have one offset in a worker, as in the trainer; other descriptors of the file have others."""
    with contextlib.closing(ByTurns(path, others)) as dataset:
        loader = DataLoader(dataset, None, num_workers=2, multiprocessing_context="fork")
        assert all(map(all, loader))


def test_workers_that_tell_copies_at_the_same_time_do_not_mislead_each_other(path: Path) -> None:
    """Eight processes ask the kernel again and again, of the same two files."""
    with contextlib.closing(ByTurns(path, 1)) as dataset:
        expected = [*dataset.fds, *dataset.fds]
        children = []
        for _ in range(8):
            if (pid := os.fork()) == 0:
                right = all(firsts(dataset) == expected for _ in range(300))
                os._exit(0 if right else 1)
            children.append(pid)
        assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 8


def firsts(dataset: ByTurns) -> list[int]:
    """Return of each descriptor the first one that it is a copy of."""
    found = {file.fd: file.first for file in files_to_reopen()}
    return [found[fd] for fd in (*dataset.fds, *dataset.copies)]


class Logs(Dataset[int]):
    """Writes a line for each sample."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> int:
        self.file.write(b"%03d\n" % index)
        return index


def test_a_file_that_is_open_for_writing_stays_one(tmp_path: Path) -> None:
    """Lines of several workers come one after the other, and overwrite none."""
    with open(tmp_path / "log", "w+b", 0) as file:
        file.write(b"begin\n")
        list(DataLoader(Logs(file), 5, num_workers=2, multiprocessing_context="fork"))
        file.write(b"end\n")
    first, *lines, last = (tmp_path / "log").read_bytes().split()
    assert (first, last) == (b"begin", b"end")
    assert sorted(lines) == [b"%03d" % index for index in range(200)]


def test_mapped_files_are_as_they_were(path: Path) -> None:
    """A mapping has no offset."""
    rows = np.memmap(path, np.uint8, "r").reshape(ROWS, ROW)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        seen = DataLoader(
            [(bytes(rows[number]), mapped[number * ROW]) for number in range(ROWS)],
            None,
            num_workers=2,  # type: ignore[arg-type]
        )
        assert [(content[0], first) for content, first in seen] == [(number, number) for number in range(ROWS)]


# --------------------------------------------------------------------------------------------- descriptors at random

Opened = tuple[str, int, bool]


class Moves(Dataset[Any]):
    """Tells where descriptors are in a worker, moves one after the other, and tells where each is then."""

    def __init__(self, fds: list[int]) -> None:
        self.fds = fds

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        before = [os.lseek(fd, 0, os.SEEK_CUR) for fd in self.fds]
        modes = [(os.get_inheritable(fd), fcntl.fcntl(fd, fcntl.F_GETFL)) for fd in self.fds]
        for number, fd in enumerate(self.fds):
            os.lseek(fd, 1000 + number, os.SEEK_SET)
        return before, modes, [os.lseek(fd, 0, os.SEEK_CUR) - 1000 for fd in self.fds]


opened = st.tuples(
    st.sampled_from(["read", "noatime", "read and write", "copy"]), st.sampled_from([0, 0, 7]), st.booleans()
)


@given(st.lists(opened, min_size=1, max_size=12), st.data())
@settings(max_examples=effort.examples(30), deadline=None)
def test_descriptors_of_all_kinds(tmp_path_factory: pytest.TempPathFactory, kinds: list[Opened], data: Any) -> None:
    """Offset, flags, close-on-exec stay, and what is a copy of what; no file that is only read is the trainer's."""
    path = tmp_path_factory.mktemp("descriptors") / "file"
    path.write_bytes(bytes(2000))
    fds: list[int] = []
    description: list[int] = []
    flags = {"read": os.O_RDONLY | os.O_NONBLOCK, "noatime": os.O_NOATIME | os.O_NOFOLLOW, "read and write": os.O_RDWR}
    with contextlib.ExitStack() as closing:
        for kind, offset, inheritable in kinds:
            if kind == "copy" and fds:
                of = data.draw(st.integers(0, len(fds) - 1))
                fds.append(os.dup(fds[of]))
                description.append(description[of])
            else:
                fds.append(os.open(path, flags.get(kind, os.O_RDONLY)))
                description.append(len(fds) - 1)
                os.lseek(fds[-1], offset, os.SEEK_SET)
            closing.callback(os.close, fds[-1])
            os.set_inheritable(fds[-1], inheritable)
        offsets = [os.lseek(fd, 0, os.SEEK_CUR) for fd in fds]
        modes = [(os.get_inheritable(fd), fcntl.fcntl(fd, fcntl.F_GETFL)) for fd in fds]
        loader = DataLoader(Moves(fds), None, num_workers=1, multiprocessing_context="fork")
        ((before, kept, after),) = loader
        assert before == offsets
        assert [(inheritable, flags & ~os.O_NOFOLLOW) for inheritable, flags in kept] == [
            (inheritable, flags & ~os.O_NOFOLLOW) for inheritable, flags in modes
        ]
        last_of = {each: number for number, each in enumerate(description)}
        assert after == [last_of[each] for each in description]
        for fd, offset, (_, mode), moved in zip(fds, offsets, modes, after, strict=True):
            is_shared = mode & os.O_ACCMODE != os.O_RDONLY
            assert os.lseek(fd, 0, os.SEEK_CUR) == (1000 + moved if is_shared else offset)


# --------------------------------------------------------------------------------------------------- what cannot be


def test_a_file_that_cannot_be_opened_again_stays_as_it_is(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The trainer may have opened it as another user."""
    user = os.geteuid()
    with path.open("rb", 0) as file:
        path.chmod(0)
        file.seek(5)
        (found,) = [each for each in files_to_reopen() if file.fileno() == each.fd]
        if user == 0:
            os.seteuid(65534)
        try:
            with caplog.at_level(logging.DEBUG, "asyncloader"):
                reopen([found])
        finally:
            os.seteuid(user)
        assert file.tell() == 5
        assert "Permission denied" in caplog.text
        assert f"descriptor {file.fileno()}" in caplog.text


def test_what_has_no_offset_is_left_alone(tmp_path: Path) -> None:
    """Pipes, sockets, folders, devices, names without a file."""
    with contextlib.ExitStack() as closing:
        path = tmp_path / "file"
        path.touch()
        fds = [*os.pipe(), os.open(tmp_path, os.O_RDONLY), os.open("/dev/null", os.O_RDONLY), os.open(path, os.O_PATH)]
        for fd in fds:
            closing.callback(os.close, fd)
        assert not {file.fd for file in files_to_reopen()} & set(fds)


def test_a_descriptor_that_is_gone_again_is_nobodys(path: Path) -> None:
    """Whoever closed it has no use for another."""
    fd = os.open(path, os.O_RDONLY)
    os.close(fd)
    reopen([OpenFile(fd, os.O_RDONLY, 0, fd), OpenFile(fd, os.O_RDONLY, 0, fd + 1)])
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
