"""Keys on their way to a worker: what comes out of the pickle, and what is not copied on the way into it."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from asyncloader.messages.tickets import TicketPickler, inline, pickle_tickets
from tests.sameness import same

LARGE = 1 << 17


def whole(parts: Any) -> bytes:
    """Return a pickle in one piece."""
    return inline(0, [pickle.PickleBuffer(part).raw() for part in parts])


def tensors() -> list[torch.Tensor]:
    """Return tensors of every kind that pickling tells apart."""
    wide = torch.arange(LARGE, dtype=torch.float32).view(256, -1)
    return [
        wide,
        wide[:, :3],
        wide.t(),
        wide.to(torch.bfloat16),
        torch.zeros(0, 3),
        torch.tensor(3),
        torch.ones(3, requires_grad=True),
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.eye(4).to_sparse(),
        torch.empty(3, device="meta"),
    ]


@pytest.mark.parametrize("tensor", tensors(), ids=lambda tensor: f"{tensor.dtype}{tuple(tensor.shape)}")
def test_tensors(tensor: torch.Tensor) -> None:
    """They are as torch pickles them, and may be written to."""
    ours = pickle.loads(whole(TicketPickler()([(0, tensor)])))[0][1]
    torchs = pickle.loads(pickle.dumps(tensor))
    assert (ours.dtype, ours.shape, ours.layout) == (torchs.dtype, torchs.shape, torchs.layout)
    assert (ours.requires_grad, ours.device, ours.is_conj()) == (torchs.requires_grad, torchs.device, torchs.is_conj())
    if ours.device.type == "cpu":
        assert torch.equal(ours.detach().to_dense(), torchs.detach().to_dense())
        ours.detach().clone().zero_()


@pytest.mark.parametrize("is_writeable", [True, False])
@pytest.mark.parametrize("order", ["C", "F", "gaps"])
def test_arrays(order: str, is_writeable: bool) -> None:
    """Of any order, and those that may not be written to."""
    array = np.arange(LARGE, dtype=np.int32).reshape(256, -1)
    array = {"C": array, "F": np.asfortranarray(array), "gaps": array[:, ::3]}[order]
    array.flags.writeable = is_writeable
    named = np.zeros(3, [("a", "f4"), ("b", "U3")])
    ours, other, objects = pickle.loads(whole(TicketPickler()([array, named, np.array([{}, None])])))
    assert same(ours, array)
    assert same(other, named)
    assert objects.tolist() == [{}, None]
    ours[:] = 0  # its memory is its own


def test_tensors_of_one_memory_keep_it() -> None:
    """As in a batch; rows of a large tensor do not bring all of it along."""
    whole_one = torch.zeros(100, LARGE)
    first, second = pickle.loads(whole(TicketPickler()([whole_one[0], whole_one[0, 5:]])))
    second += 1
    assert first[4:6].tolist() == [0, 1]
    assert len(whole(TicketPickler()([whole_one[0], whole_one[7]]))) < 3 * whole_one[0].nbytes


def test_large_bytes_are_not_copied() -> None:
    """The parts are the objects; a long text, whose memory may be freed, is copied."""
    large, other, text = bytes(LARGE), bytearray(b"7" * LARGE), "é" * LARGE
    keys = [(0, large), (1, {"a": other}), (2, text), (3, memoryview(b"no").tobytes())]
    parts = TicketPickler()(keys)
    assert any(part is large for part in parts)
    assert any(part is other for part in parts)
    assert not any(type(part) is memoryview for part in parts)
    assert pickle.loads(whole(parts)) == keys
    array = np.zeros(LARGE, np.uint8)
    assert any(type(part) is pickle.PickleBuffer for part in TicketPickler()([array]))


def test_one_pickle_has_nothing_of_the_last() -> None:
    """Each ticket stands for itself, also after one that could not be pickled."""
    dumps, tensor = TicketPickler(), torch.arange(5)
    for _ in range(2):
        with pytest.raises((AttributeError, pickle.PicklingError), match="local object"):  # so from Python 3.14 on
            dumps([tensor, tensor[1:], lambda: 0])
        assert torch.equal(pickle.loads(whole(dumps([tensor])))[0], tensor)


def test_a_ticket_that_finds_no_place_is_refused_alone() -> None:
    """So those before it, which may be in slabs, are sent, and those behind it."""

    def place(ticket: int, parts: Any) -> bytes:
        if ticket == 2:
            raise MemoryError("no room")
        return inline(ticket, parts)

    pickled, ((ticket, error),) = pickle_tickets([(1, [10]), (2, [20]), (3, [30])], TicketPickler(), place)
    assert [(ticket, pickle.loads(keys)) for ticket, keys in pickled] == [(1, [10]), (3, [30])]
    assert (ticket, str(error)) == (2, "no room")
