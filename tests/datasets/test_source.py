"""What a source makes of a stream: ranges and whole files of the length that they should have, of one version."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncGenerator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncloader.datasets import FetchError
from asyncloader.datasets.retry import TransientError
from asyncloader.datasets.source import NOTHING, Known, Source, Version


class Told(Source):
    """A place that yields what it is told to, whatever was asked for."""

    def __init__(self, *chunks: bytes, known: Known) -> None:
        self.chunks, self.known = chunks, known
        self.yielded = 0

    async def stream(
        self, url: str, start: int = 0, stop: int | None = None, known: Known = NOTHING
    ) -> AsyncGenerator[tuple[bytes, Known], None]:
        yield b"", self.known
        for chunk in self.chunks:
            self.yielded += 1
            yield chunk, self.known

    async def aclose(self) -> None: ...


@given(
    chunks=st.lists(st.binary(max_size=5), max_size=6),
    size=st.none() | st.integers(0, 20),
    start=st.integers(0, 5),
    length=st.integers(1, 15),
    max_bytes=st.integers(1, 20),
)
def test_lengths_are_those_that_were_asked_for(
    chunks: list[bytes], size: int | None, start: int, length: int, max_bytes: int
) -> None:
    """Fewer bytes may come whole the next time, more are an error; no chunk is read behind the one that is too much."""
    data = b"".join(chunks)
    part = Told(*chunks, known=Known("tag", size))
    try:
        assert asyncio.run(part.read("url", start, start + length)) == data
        assert len(data) == length
    except TransientError:
        assert len(data) < length
    except FetchError as error:
        assert "more than" in str(error)
        assert len(data) > length
        assert len(b"".join(chunks[: part.yielded - 1])) <= length
    whole = Told(*chunks, known=Known("tag", size))
    try:
        assert asyncio.run(whole.read_whole("url", max_bytes)) == data
        assert size in (None, len(data))
        assert len(data) <= max_bytes
    except TransientError:
        assert size is not None
        assert len(data) < size <= max_bytes
    except FetchError as error:
        is_too_large = max(len(data), size or 0) > max_bytes
        assert is_too_large or (size is not None and len(data) > size)
        assert "larger than" in str(error) or not (size or 0) > max_bytes
        assert whole.yielded == 0 or not (size or 0) > max_bytes


def test_bytes_of_another_version_are_refused() -> None:
    """By tag and size, as far as the place knows them; a place that tells no tag now is not of one that did."""
    version = Version(10, "old")
    for known in (Known("old", 10), Known("old")):
        assert asyncio.run(Told(b"abc", known=known).read("url", 0, 3, version)) == b"abc"
    for known in (Known("new", 10), Known("old", 11), Known(None, 10)):
        with pytest.raises(FetchError, match="was changed since this dataset was made"):
            asyncio.run(Told(b"abc", known=known).read("url", 0, 3, version))
    assert asyncio.run(Told(known=Known("old", 10)).version("url")) == version
    with pytest.raises(FetchError, match="does not say how long it is"):
        asyncio.run(Told(b"a", known=Known("old")).version("url"))


def test_a_place_that_compresses_is_decompressed_once() -> None:
    """A whole file; the bound is one of what comes out as well."""
    packed = gzip.compress(bytes(1000))
    place = Told(packed, known=Known("tag", len(packed), True))
    assert asyncio.run(place.read_whole("url", 1000)) == bytes(1000)
    with pytest.raises(FetchError, match="url, decompressed: larger than 999 bytes"):
        asyncio.run(place.read_whole("url", 999))
