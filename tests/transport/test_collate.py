"""Our entries in torch's collation map against torch's own: the same values, dtypes and errors, other memory."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import default_collate, get_worker_info
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data._utils import worker as torch_worker

from asyncloader.transport import collate
from asyncloader.transport.codec import Encoder
from asyncloader.transport.heap import Heap
from asyncloader.transport.tensors import INLINE_MAX
from asyncloader.transport.worker_heap import heap_for_a_worker
from tests.transport.wire import Pool

Outcome = tuple[str, Any]


@pytest.fixture
def installed(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Encoder, Heap]]:
    """This process is a worker for a while: our entries are in torch's map, and torch thinks so too."""
    monkeypatch.setattr(torch_collate, "default_collate_fn_map", dict(torch_collate.default_collate_fn_map))
    monkeypatch.setattr(torch_worker, "_worker_info", object())
    record = heap_for_a_worker(pool)
    heap = record.hand_over(1)
    assert heap is not None
    encoder = Encoder(heap)
    collate.install(encoder)
    yield encoder, heap
    record.reclaim()


def outcome(function: Callable[[Any], Any], batch: Any) -> Outcome:
    try:
        return "returned", function(batch)
    except Exception as error:
        return type(error).__name__, str(error)


def in_a_worker_of_torch(batch: Any) -> Any:
    """What torch's own functions make of a batch in a worker."""
    functions = {
        torch.Tensor: torch_collate.collate_tensor_fn,
        np.ndarray: torch_collate.collate_numpy_array_fn,
        (np.bool_, np.number, np.object_): torch_collate.collate_numpy_scalar_fn,
        float: torch_collate.collate_float_fn,
        int: torch_collate.collate_int_fn,
        str: torch_collate.collate_str_fn,
        bytes: torch_collate.collate_str_fn,
    }
    return torch_collate.collate(batch, collate_fn_map=functions)


def assert_same(ours: Outcome, torchs: Outcome) -> None:
    assert ours[0] == torchs[0], (ours, torchs)
    if ours[0] == "returned":
        assert_equal(ours[1], torchs[1])
    else:
        assert ours[1] == torchs[1]


def assert_equal(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        assert torch.equal(a.nan_to_num(7), b.nan_to_num(7)) if a.dtype.is_floating_point else torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_equal(a[key], b[key])
    elif isinstance(a, list | tuple):
        for x, y in zip(a, b, strict=True):
            assert_equal(x, y)
    else:
        assert a == b


Pair = collections.namedtuple("Pair", "a b")

BATCHES: dict[str, Callable[[], Any]] = {
    "tensors": lambda: [torch.arange(6).view(2, 3)] * 3,
    "large tensors": lambda: [torch.arange(INLINE_MAX).view(2, -1)] * 3,
    "large tensors, a tuple": lambda: (torch.arange(INLINE_MAX),) * 3,
    "large tensors, transposed": lambda: [torch.arange(INLINE_MAX).view(2, -1).t()] * 3,
    "large tensors, conjugate": lambda: [(torch.arange(INLINE_MAX) * 1j).conj()] * 3,
    "large bfloat16": lambda: [torch.arange(INLINE_MAX).bfloat16()] * 3,
    "tensors of no dimension": lambda: [torch.tensor(1), torch.tensor(2)],
    "empty tensors": lambda: [torch.empty(0, 3)] * 2,
    "float and double": lambda: [torch.ones(3), torch.ones(3).double()],
    "double and float": lambda: [torch.ones(3).double(), torch.ones(3)],
    "int and float": lambda: [torch.ones(3).int(), torch.ones(3)],
    "large int and float": lambda: [torch.ones(INLINE_MAX).int(), torch.ones(INLINE_MAX)],
    "large float and int": lambda: [torch.ones(INLINE_MAX), torch.ones(INLINE_MAX).int()],
    "smaller and larger": lambda: [torch.ones(3), torch.ones(4)],
    "large, smaller and larger": lambda: [torch.ones(INLINE_MAX), torch.ones(INLINE_MAX + 1)],
    "of other dimensions": lambda: [torch.ones(3), torch.ones(3, 1)],
    "requiring grad": lambda: [torch.ones(3, requires_grad=True)] * 2,
    "large, requiring grad": lambda: [torch.ones(INLINE_MAX), torch.ones(INLINE_MAX, requires_grad=True)],
    "sparse": lambda: [torch.eye(3).to_sparse()] * 2,
    "nested tensors": lambda: [torch.nested.nested_tensor([torch.ones(2)])] * 2,
    "a tensor and a number": lambda: [torch.ones(3), 3],
    "arrays": lambda: [np.arange(6.0).reshape(2, 3)] * 3,
    "large arrays": lambda: [np.arange(INLINE_MAX).reshape(2, -1) + i for i in range(3)],
    "arrays of no dimension": lambda: [np.array(1), np.array(2)],
    "empty arrays": lambda: [np.empty((0, 3))] * 2,
    "Fortran arrays": lambda: [np.asfortranarray(np.arange(6.0).reshape(2, 3))] * 2,
    "reversed arrays": lambda: [np.arange(6)[::-1]] * 2,
    "big-endian arrays": lambda: [np.arange(6, dtype=">f4")] * 2,
    "arrays of dates": lambda: [np.arange(6).astype("M8[s]")] * 2,
    "arrays of strings": lambda: [np.array(["a"])] * 2,
    "arrays of objects": lambda: [np.array([None])] * 2,
    "structured arrays": lambda: [np.zeros(2, "i4,f8")] * 2,
    "arrays of several dtypes": lambda: [np.ones(3, "f4"), np.ones(3, "f8")],
    "arrays of several shapes": lambda: [np.ones(3), np.ones(4)],
    "arrays of bool": lambda: [np.array([True, False])] * 2,
    "arrays of uint16": lambda: [np.arange(3, dtype=np.uint16)] * 2,
    "arrays of half": lambda: [np.arange(3, dtype=np.float16)] * 2,
    "masked arrays": lambda: [np.ma.masked_equal(np.arange(3), 1)] * 2,
    "ints": lambda: [1, -2, 3],
    "one int": lambda: [7],
    "large ints": lambda: [2**63 - 1, -(2**63)],
    "too large ints": lambda: [1, 2**63],
    "much too large ints": lambda: [1, 2**80],
    "bools": lambda: [True, False],
    "bool and int": lambda: [True, 2],
    "int and bool": lambda: [2, True],
    "int and float numbers": lambda: [1, 2.5],
    "float and int numbers": lambda: [1.5, 2],
    "float and large int": lambda: [1.5, 2**60 + 1],
    "float and too large int": lambda: [1.5, 2**80],
    "floats": lambda: [0.1, float("inf"), float("nan"), -0.0],
    "int and complex": lambda: [1, 2j],
    "int and None": lambda: [1, None],
    "int and list": lambda: [1, [2, 3]],
    "float and text": lambda: [1.0, "a"],
    "int and tensor": lambda: [1, torch.tensor(2)],
    "int and numpy's": lambda: [1, np.int32(2)],
    "int and numpy's float": lambda: [1, np.float64(2.5)],
    "float and tensor": lambda: [1.0, torch.tensor([2.0])],
    "numpy float32": lambda: [np.float32(1), np.float32(2)],
    "numpy float64": lambda: [np.float64(1), np.float64(2)],
    "numpy int8": lambda: [np.int8(1), np.int8(2)],
    "numpy uint16": lambda: [np.uint16(1), np.uint16(2)],
    "numpy uint64": lambda: [np.uint64(1), np.uint64(2**64 - 1)],
    "numpy bool": lambda: [np.bool_(True), np.bool_(False)],
    "numpy complex64": lambda: [np.complex64(1j), np.complex64(2)],
    "numpy half": lambda: [np.float16(1), np.float16(2)],
    "numpy long double": lambda: [np.longdouble(1)] * 2,
    "numpy of several kinds": lambda: [np.float32(1), np.int64(2)],
    "numpy and int": lambda: [np.int64(1), 2],
    "texts": lambda: ["a", b"b"],
    "nested": lambda: [{"a": (1, 2.0), "b": [np.ones(3), Pair(torch.ones(2), "x")]}] * 2,
    "lists of several lengths": lambda: [[1, 2], [1]],
    "dictionaries of several keys": lambda: [{"a": 1}, {"b": 1}],
    "none": lambda: [None],
    "nothing": lambda: [],
}

# What torch's workers say about these is about the memory that they make for the result: they resize it, want the sizes
# of what is no tensor, and fail over conjugate views. In its main process, torch stacks, and so do we.
WORSE_IN_TORCHS_WORKERS = (
    "smaller and larger",
    "large, smaller and larger",
    "of other dimensions",
    "large tensors, conjugate",
    "a tensor and a number",
)


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.filterwarnings("ignore")
def test_like_torch_in_a_worker(installed: tuple[Encoder, Heap], kind: str) -> None:
    """Values, dtypes, strides and errors."""
    batch = BATCHES[kind]()
    with installed[0]:
        ours = outcome(default_collate, batch)
    torchs = outcome(in_a_worker_of_torch, batch)
    if kind in WORSE_IN_TORCHS_WORKERS:
        torchs = outcome(torch.stack, batch)
    assert_same(ours, torchs)


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.filterwarnings("ignore")
def test_like_torch_in_the_trainers_process(kind: str) -> None:
    """The recycling collation is default_collate."""
    batch = BATCHES[kind]()
    assert_same(outcome(collate.recycling_collate(default_collate), batch), outcome(default_collate, batch))


NUMBERS = st.integers() | st.floats() | st.booleans() | st.integers(-10, 10).map(np.int32) | st.just(np.float32(1.5))


@given(batch=st.lists(NUMBERS, min_size=1, max_size=6))
@pytest.mark.filterwarnings("ignore")
def test_any_list_of_numbers_is_collated_as_by_torch(batch: list[Any]) -> None:
    """Mixed as they come."""
    assert_same(outcome(collate.recycling_collate(default_collate), batch), outcome(default_collate, batch))


class Late:
    """A signal comes while its number is asked for, and the handler raises."""

    def __index__(self) -> int:
        raise TimeoutError("too late")


def test_what_the_handler_of_a_signal_raises_meanwhile_is_not_lost() -> None:
    """It is no reason to ask torch."""
    with pytest.raises(TimeoutError, match="too late"):
        collate.recycling_collate(default_collate)([1, Late()])


def test_results_do_not_lie_in_torchs_shared_memory(installed: tuple[Encoder, Heap]) -> None:
    """torch's own functions would make a file for each tensor."""
    assert get_worker_info() is not None
    for batch in ([torch.ones(3)] * 2, [torch.ones(INLINE_MAX)] * 2, [torch.ones(3), torch.ones(3).double()]):
        assert not default_collate(batch).is_shared()


def test_large_results_lie_in_slabs(installed: tuple[Encoder, Heap]) -> None:
    """While a batch is collated, in this thread, and nowhere else."""
    encoder, slabs = installed

    def is_in_slab(batch: list[Any]) -> bool:
        tensor = default_collate(batch)
        return slabs.locate(tensor.data_ptr(), tensor.nbytes) is not None

    tensors, arrays = [torch.ones(INLINE_MAX)] * 2, [np.ones(INLINE_MAX)] * 2
    with encoder:
        assert is_in_slab(tensors)
        assert is_in_slab(arrays)
        assert not is_in_slab([torch.ones(3)] * 2)
        elsewhere: list[bool] = []
        thread = threading.Thread(target=lambda: elsewhere.append(is_in_slab(tensors)))
        thread.start()
        thread.join()
        assert elsewhere == [False]
    assert not is_in_slab(tensors)


def test_what_the_user_put_into_the_map_stays(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Additions and replacements are not touched, and arrays go through a replaced entry for tensors, as with torch."""

    def mine(batch: Any, *, collate_fn_map: Any = None) -> str:
        return "mine"

    functions = {**torch_collate.default_collate_fn_map, torch.Tensor: mine, complex: mine}
    monkeypatch.setattr(torch_collate, "default_collate_fn_map", functions)
    collate.install(Encoder(None))
    assert functions[torch.Tensor] is functions[complex] is mine
    assert default_collate([(1j, torch.ones(2), np.ones(2), 3)] * 2)[:3] == ["mine"] * 3
