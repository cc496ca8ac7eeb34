"""Frames cut from bytes that come in any pieces."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncloader.messages.frames import BadFrame
from asyncloader.messages.messages import HEADER, KINDS
from asyncloader.ray import wire
from asyncloader.ray.wire import FrameReader, Word, decode, frame
from asyncloader.transport.codec import Encoder, open_payload
from asyncloader.transport.loans import WorkerSlabs
from asyncloader.transport.worker_loans import WorkerLoans
from tests.transport.wire import make_pool

LARGE = 300 << 10  # more than is read at once


def allocate(nbytes: int) -> memoryview:
    """Give memory that nobody has cleared."""
    return memoryview(bytearray(b"?" * nbytes))


def feed(reader: FrameReader, data: bytes, pieces: list[int]) -> list[Any]:
    """Have bytes come in pieces of these sizes, again and again; return the frames, as plain bytes."""
    found, view, turn = [], memoryview(data), 0
    while view:
        target = reader.get_buffer()
        count = min(len(view), len(target), pieces[turn % len(pieces)])
        target[:count] = view[:count]
        view, turn = view[count:], turn + 1
        for one in reader.received(count):
            found.append((one.kind, one.life, bytes(one.body), [bytes(buffer) for buffer in one.buffers]))
    return found


FRAMES = st.lists(
    st.tuples(
        st.sampled_from(sorted(KINDS | {*Word})),
        st.integers(0, 2**32 - 1),
        st.one_of(st.binary(max_size=40), st.integers(LARGE, LARGE + 9).map(lambda size: b"b" * size)),
        st.lists(
            st.one_of(st.binary(max_size=9), st.integers(LARGE, LARGE + 9).map(lambda size: b"x" * size)), max_size=3
        ),
    ),
    max_size=5,
)


@given(FRAMES, st.lists(st.sampled_from([1, 7, 24, 25, 4096, LARGE, 1 << 20]), min_size=1, max_size=4))
def test_frames_come_out_as_they_went_in(frames: list[Any], pieces: list[int]) -> None:
    """In whatever pieces their bytes come, small ones one after the other in one piece too."""
    if sum(len(body) + sum(map(len, buffers)) for *_, body, buffers in frames) > 4096:
        pieces = [max(piece, 4096) for piece in pieces]
    data = b"".join(bytes(part) for kind, life, body, buffers in frames for part in frame(kind, life, [body], buffers))
    assert feed(FrameReader(allocate), data, pieces) == [
        (kind, life, body, buffers) for kind, life, body, buffers in frames
    ]


def test_a_large_buffer_is_received_into_its_place() -> None:
    """What comes after the frame's head goes nowhere else first."""
    given_out: list[memoryview] = []

    def note(nbytes: int) -> memoryview:
        given_out.append(allocate(nbytes))
        return given_out[-1]

    reader = FrameReader(note)
    head, buffer = frame(1, 2, [b"body"], [b"z" * LARGE])
    target = reader.get_buffer()
    target[: len(head)] = head
    assert list(reader.received(len(head))) == []
    target = reader.get_buffer()
    assert target.obj is given_out[0].obj
    assert len(target) == LARGE
    target[:] = buffer
    (found,) = reader.received(LARGE)
    assert found.buffers == [buffer]
    assert found.body == b"body"


@pytest.mark.parametrize(
    "head",
    [
        HEADER.pack(1 << 41, 1),
        HEADER.pack(8, 99),
        HEADER.pack(3, 1) + b"123",
        HEADER.pack(8, 1) + wire._HEAD.pack(0, 1),
        HEADER.pack(8, 1) + wire._HEAD.pack(0, (1 << 20) + 1),
        HEADER.pack(16, 1) + wire._HEAD.pack(0, 1) + wire._SIZE.pack(1 << 41),
    ],
)
def test_what_cannot_be_a_frame_is_refused(head: bytes) -> None:
    """Before memory is made for it."""
    reader = FrameReader(lambda nbytes: pytest.fail("memory was asked for"))
    with pytest.raises(BadFrame):
        feed(reader, head, [len(head)])


def test_memory_that_is_not_to_be_had_ends_the_reading() -> None:
    """As an error that the connection ends with."""

    def refuse(nbytes: int) -> memoryview:
        raise MemoryError

    with pytest.raises(MemoryError):
        feed(FrameReader(refuse), b"".join(map(bytes, frame(1, 0, [], [b"123"]))), [1 << 20])


def batches() -> list[Any]:
    """Batches of all shapes that a payload can have."""
    shared = torch.arange(1 << 16, dtype=torch.int64)
    return [
        1,
        {"small": torch.ones(3), "text": "words"},
        [torch.rand(1 << 16), np.arange(1 << 17), b"raw" * (1 << 16)],
        ["x" * 100] * 5000,
        [str(i) * 30 for i in range(10_000)],  # a pickle that is large itself
        ([str(i) * 30 for i in range(10_000)], torch.zeros(1 << 16)),
        (shared, shared[1 << 15 :], shared.view(256, 256).t()),
        torch.rand(1 << 16).to(torch.bfloat16),
    ]


@pytest.mark.parametrize("with_slabs", [True, False])
@pytest.mark.parametrize("number", range(len(batches())))
def test_a_batch_passes_through_an_agent(number: int, with_slabs: bool) -> None:
    """Its parts are taken apart without unpickling, sent, received and put together: it is the same batch."""
    batch, pool = batches()[number], make_pool()
    loans = WorkerLoans(pool)
    slabs = None
    if with_slabs:
        handle = pool.handle()
        assert handle is not None
        slabs = WorkerSlabs(handle)
        slabs.ask = loans.grant
    encoder = Encoder(slabs)
    payload = b"".join(map(bytes, encoder.encode(batch)))
    encoder.release()
    stream, buffers, is_placed, nbytes = open_payload(payload, loans)
    parts, large = ([], [*buffers, stream]) if is_placed else ([stream], list(buffers))
    sent = b"".join(bytes(part) for part in frame(1, 1, parts, large))
    reader = FrameReader(lambda size: memoryview(bytearray(size)))
    found, view = None, memoryview(sent)
    while found is None:
        target = reader.get_buffer()
        count = min(len(view), len(target))
        target[:count] = view[:count]
        view = view[count:]
        for found in reader.received(count):
            received, size = decode(found.buffers, found.body)
    expected = pickle.loads(pickle.dumps(batch))
    assert pickle.dumps(_plain(received)) == pickle.dumps(_plain(expected))
    assert size <= nbytes <= size + 400
    if number == 6:
        assert received[0].untyped_storage().data_ptr() == received[1].untyped_storage().data_ptr()
    del stream, buffers, large, parts
    loans.reclaim()
    pool.turn()
    pool.close()


def _plain(value: Any) -> Any:
    """Make lists of tensors and arrays."""
    if isinstance(value, torch.Tensor):
        return value.float().tolist() if value.dtype is torch.bfloat16 else value.tolist()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value
