"""Where the samples of tar shards are: found once, kept in a file for each shard.

    shards ──> versions now ──> index files: of this version? ──> spans
                                        └ no, or none ──> headers read by ranges ──> spans ──> index file

An index is of one version of its shard, by size and time (or tag); of any other one it is made anew. Whoever made the
shard could have put an index beside it. An index is therefore believed no more than its shard: its own length is
bounded by that of the shard, and all spans lie in the shard, in order.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import secrets
from array import array
from collections.abc import AsyncGenerator, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from asyncloader.datasets.apart import run_apart
from asyncloader.datasets.limits import open_regular
from asyncloader.datasets.source import Version, kind_of, path_of
from asyncloader.datasets.sources import Access, Sources
from asyncloader.datasets.tar import Bytes, Damaged, grouped

_log = logging.getLogger("asyncloader.datasets")

_FORMAT = 2
_SUFFIX = ".index"
_BLOCK = 512  # the least that a sample takes, and what its bounds are multiples of
_SPAN_BYTES = 16
_MOST_FILES = 1 << 24  # in a shard: a server may make up one header after the other, and say that there are more
_AHEAD_BYTES = {"file": 1 << 16, "http": 1 << 20, "store": 1 << 20}


def spans_of(
    shards: Sequence[str], versions: Sequence[Version], folder: Path | None, access: Access
) -> list[NDArray[np.int64]]:
    """Return for each shard where its samples begin and end: pairs of bytes, headers included.

    A single process of the machine makes the indices that are missing; the others wait for it.

    Args:
        shards: Paths and urls.
        versions: The present version of each shard.
        folder: Where indices are kept; None keeps them beside local shards, and others in the user's cache.
        access: How shards are reached.

    Raises:
        FetchError: A shard is damaged, or does not come.
    """
    places = [_places(shard, folder) for shard in shards]
    found = {at: load(places[at], versions[at]) for at in range(len(shards))}
    if any(spans is None for spans in found.values()):
        with _turn(shards):
            for at in [at for at, spans in found.items() if spans is None]:
                found[at] = load(places[at], versions[at])
            missing = [at for at, spans in found.items() if spans is None]
            urls = [shards[at] for at in missing]
            made = run_apart(_make, urls, access, [versions[at] for at in missing])
            for at, spans in zip(missing, made, strict=True):
                found[at] = spans
                save(places[at], versions[at], spans)
    return [spans for spans in found.values() if spans is not None]


async def _make(sources: Sources, url: str, version: Version) -> NDArray[np.int64]:
    bounds, stream = array("q"), _Skipping(sources, url, version)
    async for _, _, begin, end in grouped(stream, stream.skip):
        bounds.extend((begin, end))
    return np.array(bounds, np.int64).reshape(-1, 2)


class _Skipping(Bytes):
    """The bytes of a file, of which those that are passed over are not read."""

    def __init__(self, sources: Sources, url: str, version: Version) -> None:
        super().__init__(self._read_on(), url)
        self._read = partial(sources.read_range, url, version=version)
        self._end = version.size
        self._num_files = 0

    async def _read_on(self) -> AsyncGenerator[bytes, None]:
        """Yield the bytes behind those that are waiting to be taken."""
        while (begin := self.at + len(self._waiting)) < self._end:
            yield await self._read(begin, min(begin + _AHEAD_BYTES[kind_of(self.url)], self._end))

    def check(self, size: int, name: str) -> None:
        """Count one more file. How large it is does not matter: nothing of it is held."""
        self._num_files += 1
        if self._num_files > _MOST_FILES:
            raise Damaged(f"more than {_MOST_FILES:,} files, the last of which is {name}: split it into several shards")

    async def skip(self, size: int, name: str) -> None:
        """Pass over the content of a member."""
        self.check(size, name)
        size += -size % _BLOCK
        del self._waiting[:size]
        self.at += size
        if self.at > self._end:
            raise Damaged(f"it ends in the middle of {name}")


# --------------------------------------------------------------------------------------------------------- index files


def _places(shard: str, folder: Path | None) -> list[Path]:
    """Return where the index of a shard may be, the best first."""
    is_local = kind_of(shard) == "file"
    path = os.path.abspath(path_of(shard)) if is_local else shard
    name = hashlib.sha256(path.encode("utf-8", "surrogateescape")).hexdigest()[:32] + _SUFFIX
    if folder is not None:
        return [folder / name]
    return [Path(path + _SUFFIX), _cache() / name] if is_local else [_cache() / name]


def load(places: Sequence[Path], version: Version) -> NDArray[np.int64] | None:
    """Return the index of this version of a shard from the first place that has it; None if there is none."""
    for place in places:
        with contextlib.suppress(OSError):
            if (spans := _read(place, version)) is not None:
                return spans
            _log.info("%s: is of another version of its shard, and made anew", place)
    return None


def _read(place: Path, version: Version) -> NDArray[np.int64] | None:
    """Read an index; None if it is none of this version of its shard.

    Raises:
        OSError: The file cannot be read.
    """
    beginning = head(version)
    with open_regular(place) as file:
        body = os.fstat(file.fileno()).st_size - len(beginning)
        most = min(version.size // _BLOCK, _MOST_FILES) * _SPAN_BYTES
        if not 0 <= body <= most or file.read(len(beginning)) != beginning:
            return None
        data = file.read(body)
    if len(data) != body or body % _SPAN_BYTES:
        return None
    bounds = np.frombuffer(data, "<i8").astype(np.int64)
    is_in_shard = not body or (bounds[0] >= 0 and bounds[-1] <= version.size)
    is_in_order = (bounds[::2] < bounds[1::2]).all() and (bounds[:-1] <= bounds[1:]).all()
    return bounds.reshape(-1, 2) if is_in_shard and is_in_order and not (bounds % _BLOCK).any() else None


def head(version: Version) -> bytes:
    """Return how the index of this version of a shard begins."""
    return f"asyncloader index {_FORMAT} of {version.size} bytes, {version.tag}\n".encode("utf-8", "surrogateescape")


def save(places: Sequence[Path], version: Version, spans: NDArray[np.int64]) -> None:
    """Keep an index in the first place where that is possible."""
    for place in places:
        beside = place.with_name(f"{place.name}.{secrets.token_hex(4)}.part")
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                with open(beside, "xb") as file:
                    file.write(head(version) + spans.astype("<i8").tobytes())
                os.replace(beside, place)
            finally:
                beside.unlink(missing_ok=True)
            return
        except OSError as error:
            failure = error
    _log.warning("An index of a tar shard cannot be kept (%s): it will be made again by the next run.", failure)


@contextlib.contextmanager
def _turn(shards: Sequence[str]) -> Iterator[None]:
    """Let one process of this user at a time make indices of these shards, where there is a place to agree in."""
    name = hashlib.sha256("\n".join(shards).encode("utf-8", "surrogateescape")).hexdigest()[:16]
    path = _cache() / f"{name}.lock"
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(path, "wb"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield  # The file stays: removed, it could be locked by one process while another one makes it anew.


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "asyncloader", "tar")
