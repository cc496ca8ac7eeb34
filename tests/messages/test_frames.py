"""Frames out of a stream of bytes: however they are cut on the way, whatever size they have, and what is no frame."""

from __future__ import annotations

import os
import struct
import tracemalloc

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from asyncloader.messages.frames import BadFrame, FrameBuffer, frame
from asyncloader.messages.messages import HEADER, KINDS, MAX_FRAME_BYTES, Kind
from tests.support import effort

MOST_PIECES = 2000
"""About so many: a megabyte in pieces of a byte takes seconds."""
FRAME = st.tuples(
    st.sampled_from(sorted(KINDS)),
    st.binary(max_size=100)
    | st.integers(0, 600_000).map(lambda size: os.urandom(16)[:size].ljust(size, b"."))
    | st.integers(-40, 40).map(lambda more: b"x" * ((256 << 10) + more)),  # about as long as the buffer
)


def wire(frames: list[tuple[int, bytes]]) -> bytes:
    """Return the frames as they travel."""
    return b"".join(b"".join(frame(kind, [body])) for kind, body in frames)


def cut(data: bytes, sizes: list[int]) -> list[tuple[int, bytes]]:
    """Give the data to a FrameBuffer in pieces of these sizes, and return the frames that come out."""
    buffer = FrameBuffer()
    found = []
    left = memoryview(data)

    def receive(view: memoryview) -> int:
        size = sizes[len(left) % len(sizes)] if sizes else len(left)
        count = min(max(size, len(data) // MOST_PIECES), len(view), len(left))
        assert count > 0, "no room to receive into: this would be taken for the end"
        view[:count] = left[:count]
        return count

    while left:
        left = left[buffer.read(receive) :]
        found += [(kind, bytes(body)) for kind, body in buffer.frames()]
    return found


@settings(max_examples=effort.examples(90), deadline=None)
@given(frames=st.lists(FRAME, max_size=5), sizes=st.lists(st.integers(1, 300_000), max_size=4))
def test_frames_come_out_as_they_went_in(frames: list[tuple[int, bytes]], sizes: list[int]) -> None:
    """Whole, in order, at any cut."""
    assert cut(wire(frames), sizes) == frames


def test_frames_cut_at_every_byte() -> None:
    """Header and body in the smallest pieces."""
    frames = [(Kind.BATCH, b"abc"), (Kind.READY, b""), (Kind.AWAITS, b"x" * 40)]
    assert cut(wire(frames), [1]) == frames


@pytest.mark.parametrize(
    "garbage",
    [
        os.urandom(1000),
        b"\0" * 16,
        HEADER.pack(5, 99) + b"hello",
        HEADER.pack(MAX_FRAME_BYTES + 1, Kind.BATCH),
        HEADER.pack((1 << 64) - 1, Kind.BATCH),
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("<Q", 3) + b"\xff" * 8,
    ],
    ids=["random", "zeros", "unknown kind", "too long", "longest", "http", "padding"],
)
def test_garbage_is_no_frame(garbage: bytes) -> None:
    """It is refused before memory is made for it, and before anything in it is unpickled."""
    with pytest.raises(BadFrame):
        cut(garbage, [])


HEADERS = st.builds(
    HEADER.pack,
    st.integers(0, 40) | st.integers(0, MAX_FRAME_BYTES) | st.integers(0, (1 << 64) - 1),
    st.sampled_from(sorted(KINDS)) | st.integers(0, 255),
)


@settings(max_examples=effort.examples(200), deadline=None)
@given(
    pieces=st.lists(HEADERS | st.binary(max_size=60) | st.integers(0, 600_000).map(bytes), max_size=6),
    sizes=st.lists(st.integers(1, 300_000), min_size=1, max_size=4),
)
def test_any_bytes(pieces: list[bytes], sizes: list[int]) -> None:
    """They are frames, wait for more, or are refused; they take no more memory than has come."""
    data = b"".join(pieces)
    tracemalloc.start()
    try:
        found = cut(data, sizes)
    except BadFrame:
        found = None
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 4 * len(data) + (1 << 20)
    if found is not None:
        assert data.startswith(wire(found))


def test_a_length_that_is_not_sent_costs_nothing() -> None:
    """A header that announces a terabyte, and then little comes."""
    tracemalloc.start()
    assert cut(HEADER.pack(1 << 40, Kind.BATCH) + bytes(1000), [100]) == []
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
