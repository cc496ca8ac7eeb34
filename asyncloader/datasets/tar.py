"""Tar files in WebDataset's layout: which samples a shard has, where each is, and the files of one.

    shard ── tarfile reads the headers ──> members ── those with one name up to the first dot ──> samples: bytes a to b
    bytes a to b ── tarfile ──> {"__key__": ..., "jpg": b"...", "cls": b"..."}

Shards come from elsewhere: whatever is in one, to look through it ends, holds no content of it, and writes nothing.
"""

from __future__ import annotations

import io
import re
import tarfile
from array import array
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from asyncloader.datasets.errors import FetchError
from asyncloader.datasets.source import RangeFile, Source, Version

RawSample: TypeAlias = dict[str, Any]
"""The content of each file by its extension; the common name as "__key__" and the shard as "__url__"."""

_BLOCK = 512
_MOST_HEADER_BYTES = 1 << 21  # of what is said about one file
_AHEAD_BYTES = {True: 1 << 16, False: 1 << 20}  # by whether the shard is local
_METADATA = re.compile(r"__[^/]*__(/|$)")  # as webdataset's `tar_file_iterator` skips it
_NAMES_OF_OURS = ("__key__", "__url__")


def find_samples(source: Source, url: str, version: Version) -> NDArray[np.int64]:
    """Return where the samples of a shard begin and end: pairs of bytes, headers included.

    Raises:
        FetchError: The shard is damaged, compressed or cut off; a sample has two files with one extension, or a file
            that is a link: its content lies elsewhere in the shard, or nowhere.
    """
    bounds, last, extensions = array("q"), "", set[str]()
    file = _Headers(RangeFile(source, url, version), _AHEAD_BYTES[source.is_local(url)])
    for member, begin, end in _members(file, url):
        key, extension = key_and_extension(member.name)
        if not key or member.isdir():
            continue
        if not member.isreg() or member.issparse():
            kind = "a sparse file" if member.issparse() else "no file"
            kind = f"a link to {member.linkname}" if member.islnk() or member.issym() else kind
            raise FetchError(
                f"{url}: {member.name} is {kind}, which is not read here: pack the file itself (tar "
                "--dereference --hard-dereference)"
            )
        if key != last:
            last, extensions = key, set()
            bounds.extend((begin, end))
        if extension in extensions or extension in _NAMES_OF_OURS:
            raise FetchError(f"{url}: a second .{extension} of the sample {key}: {member.name}")
        extensions.add(extension)
        bounds[-1] = end
    return np.array(bounds, np.int64).reshape(-1, 2)


def read_sample(data: memoryview, url: str) -> RawSample:
    """Return the files of a sample.

    Args:
        data: The bytes of the sample in its shard.
        url: The shard.

    Raises:
        FetchError: It is not what the index said.
    """
    sample: RawSample = {"__url__": url}
    file = io.BytesIO(data)
    for member, _, _ in _members(file, url):
        key, extension = key_and_extension(member.name)
        if key and member.isreg():
            begin = member.offset_data
            sample[extension] = bytes(data[begin : begin + member.size])
            sample.setdefault("__key__", key)
            if key != sample["__key__"]:
                raise FetchError(f"{url}: the samples {key} and {sample['__key__']} where its index has one")
    if "__key__" not in sample:
        raise FetchError(f"{url}: no sample where its index has one")
    return sample


def key_and_extension(path: str) -> tuple[str, str]:
    """Return the name of the sample that a file belongs to, and what the file is of it; "" and "" if to none.

    Of no sample are hidden files, files without an extension, and those in folders of WebDataset's own (``__index__``).
    """
    folder, slash, name = path.rpartition("/")
    stem, dot, extension = name.partition(".")
    if not stem or not dot or _METADATA.match(path):
        return "", ""
    return folder + slash + stem, extension.lower()


def _members(file: Any, url: str) -> Iterator[tuple[tarfile.TarInfo, int, int]]:
    """Yield each member of an archive, where its first header begins, and where its content ends."""
    try:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            while (member := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]  # tarfile keeps all of them
                yield member, member.offset, archive.offset
            # tarfile takes a damaged header for the end. An archive without the mark of its end, of a writer that was
            # killed between two files, is whole.
            file.seek(archive.offset)
            if file.read(_BLOCK).strip(b"\0"):
                raise FetchError(f"{url}: damaged: no header at byte {archive.offset:,}")
    except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
        raise FetchError(f"{url}: damaged, or no tar file, or a compressed one: {error}") from error


class _Headers(io.BufferedReader):
    """Reads the headers of a shard, none of which is large, whatever it says."""

    def read(self, size: int | None = -1, /) -> bytes:
        """Read some bytes."""
        if size is None or not 0 <= size <= _MOST_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return super().read(size)
