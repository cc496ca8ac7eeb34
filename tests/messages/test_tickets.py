"""Keys on their way to a worker: what comes out of the pickle, and what is not copied on the way into it."""

from __future__ import annotations

import gc
import pickle
import weakref
from copy import deepcopy
from threading import Lock
from typing import Any

import numpy as np
import pytest
import torch

from asyncloader.messages.tickets import as_read, pack_tickets, pickle_keys, pickle_tickets, unpickled
from tests.support.sameness import same

LARGE = 1 << 17


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
    """They are as torch pickles them, but for views that are conjugated, and may be written to."""
    ours = pickle.loads(b"".join(pickle_keys([(0, tensor)])))[0][1]
    torchs = pickle.loads(pickle.dumps(tensor))
    assert (ours.dtype, ours.shape, ours.layout) == (torchs.dtype, torchs.shape, torchs.layout)
    assert (ours.requires_grad, ours.device) == (torchs.requires_grad, torchs.device)
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
    ours, other, objects = pickle.loads(b"".join(pickle_keys([array, named, np.array([{}, None])])))
    assert same(ours, array)
    assert same(other, named)
    assert objects.tolist() == [{}, None]
    ours[:] = 0  # its memory is its own


def test_rows_of_a_large_tensor_do_not_bring_all_of_it_along() -> None:
    """Each travels by itself, as their values."""
    whole = torch.arange(100 * LARGE).view(100, -1)
    pickled = b"".join(pickle_keys([whole[0], whole[0, 5:], whole[7]]))
    assert len(pickled) < 4 * whole[0].nbytes
    first, second, third = pickle.loads(pickled)
    assert torch.equal(first[5:], second)
    assert torch.equal(third, whole[7])


def test_large_bytes_are_not_copied() -> None:
    """The parts of a message are the objects; a long text, whose memory may be freed, is copied."""
    large, other, text = bytes(LARGE), bytearray(b"7" * LARGE), "é" * LARGE
    keys = [[large], [{"a": other}], [text], "name", [memoryview(b"no").tobytes()]]
    pickled, refused = pickle_tickets(enumerate(keys))
    assert not refused
    parts = pack_tickets(pickled, [7])
    assert any(part is large for part in parts)
    assert any(part is other for part in parts)
    assert not any(type(part) is memoryview for part in parts)
    returned, tickets = pickle.loads(b"".join(parts))
    assert (returned, [number for number, _ in tickets]) == ([7], [0, 1, 2, 3, 4])
    assert [pickle.loads(b"".join(each)) for _, each in tickets] == keys


def test_one_pickle_has_nothing_of_the_last() -> None:
    """Each ticket stands for itself, also after one that could not be pickled, and which alone is refused."""
    tensor = torch.arange(5)
    keys = [[tensor, tensor[1:]], [tensor, lambda: 0], [tensor]]
    pickled, ((ticket, error),) = pickle_tickets(enumerate(keys))
    assert (ticket, type(error)) in [(1, AttributeError), (1, pickle.PicklingError)]  # from Python 3.14 on
    assert [ticket for ticket, _ in pickled] == [0, 2]
    assert torch.equal(pickle.loads(b"".join(pickled[1][1]))[0], tensor)


def test_why_keys_cannot_be_pickled_is_in_no_cycle() -> None:
    """The consumer that it is raised in, and so the workers, would stay until a collection."""

    class Refusal(Exception):
        """Can be referred to weakly, and lets nobody set anything, as a frozen dataclass."""

        def __setattr__(self, name: str, value: object) -> None:
            raise AttributeError(name)

    class Key:
        def __reduce__(self) -> Any:
            raise Refusal

    gc.disable()
    try:
        _, refused = pickle_tickets([(0, Key())])
        ((_, error),) = refused
        kept = weakref.ref(error)
        assert isinstance(error, Refusal)
        del refused, error, _
        assert kept() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("in_pickles", [False, True])
@pytest.mark.parametrize("keys", [[3, 1, 2], [], [[3], [1]], np.arange(3), torch.arange(3), (3, 1)], ids=type)
def test_keys_stay_as_they_were_read(keys: Any, in_pickles: bool) -> None:
    """Whatever the sampler makes of them then, and by whichever way they go."""
    before = deepcopy(keys)
    read = as_read(keys, in_pickles=in_pickles)
    if len(keys) and type(keys) is not tuple:
        (keys[0] if type(keys[0]) is list else keys)[0] = 7
    assert same(unpickled(read), before)
    assert same(pickle.loads(b"".join(pickle_keys(read))), before)


@pytest.mark.parametrize("first", [[3], {3: 1}])
def test_keys_among_lists_that_cannot_be_copied_are_as_they_are(first: Any) -> None:
    """Threads may have them."""
    lock = Lock()
    read = as_read([first, lock], in_pickles=False)
    assert read[0] == first
    assert read[0] is not first
    assert read[1] is lock


class Lost:
    """Does not come out of its pickle."""

    def __reduce__(self) -> Any:
        return int, ("lost",)


@pytest.mark.parametrize("other", [Lost(), lambda: 0], ids=["does not come out", "does not go in"])
def test_what_only_begins_as_ints_fails_where_it_is_sent(other: Any) -> None:
    """To read it, and to name it, raises nothing."""
    read = as_read([1, other], in_pickles=True)
    assert unpickled(read)
    with pytest.raises((ValueError, AttributeError, pickle.PicklingError)):
        pickle.loads(b"".join(pickle_keys(read)))
