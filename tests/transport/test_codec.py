"""Batches of every kind, there and back: equal to what plain pickling gives, writable, with what they share."""

from __future__ import annotations

import collections
import copyreg
import dataclasses
import datetime
import gc
import io
import pickle
import threading
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import PIL.Image
import pyarrow as pa
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate

from asyncloader.transport import codec
from asyncloader.transport.codec import Encoder, decode
from asyncloader.transport.tensors import INLINE_MAX
from asyncloader.transport.worker_heap import heap_for_a_worker
from tests.support.effort import examples
from tests.transport.wire import Pool, worker

LARGE = 2 * INLINE_MAX


class RoundTrip:
    """An encoder and its parent in one process: the same memory, seen from both sides."""

    def __init__(self, pool: Pool | None = None) -> None:
        self.record = None if pool is None else heap_for_a_worker(pool)
        self.heap = None if self.record is None else self.record.hand_over(1)
        self.encoder = Encoder(self.heap)

    def __call__(self, batch: Any) -> Any:
        return self.measured(batch)[0]

    def measured(self, batch: Any) -> tuple[Any, int]:
        """What arrives, and the bytes of it, those in slabs too."""
        if self.heap is not None and self.record is not None:
            self.heap.returned(self.record.returned())
        parts = self.encoder.encode(batch)
        payload = bytearray().join(parts)
        decoded, nbytes = self.record.decode(payload) if self.record is not None else decode(payload)
        payload[:] = bytes(len(payload))  # nothing decoded may refer to it
        return decoded, nbytes

    def close(self) -> None:
        if self.record is not None:
            self.record.reclaim()


@pytest.fixture(params=["inline", "slabs"])
def there_and_back(request: pytest.FixtureRequest) -> Iterator[RoundTrip]:
    """Through the channel alone, and through slabs."""
    if request.param == "inline":
        yield RoundTrip()
        return
    pool = Pool()
    made = RoundTrip(pool)
    yield made
    made.close()
    pool.drain()
    if pool.leased_bytes:  # a cycle: an exception holds the frames that hold the batch
        gc.collect()
    pool.close()


# ------------------------------------------------------------------------------------------------------ comparison
def assert_same(new: Any, old: Any) -> None:
    """Equal in type, value, dtype, layout and shape, at any depth."""
    assert type(new) is type(old)
    if isinstance(old, torch.Tensor):
        assert_same_tensor(new, old)
    elif isinstance(old, np.ndarray):
        assert (new.dtype, new.shape) == (old.dtype, old.shape)
        assert new.flags.f_contiguous == old.flags.f_contiguous or not old.flags.forc
        assert new.flags.writeable
        np.testing.assert_array_equal(new, old)
    elif isinstance(old, dict):
        assert list(new) == list(old)
        for key in old:
            assert_same(new[key], old[key])
    elif isinstance(old, list | tuple):
        assert len(new) == len(old)
        for a, b in zip(new, old, strict=True):
            assert_same(a, b)
    else:
        assert new == old


def assert_same_tensor(new: torch.Tensor, old: torch.Tensor) -> None:
    assert (new.dtype, new.layout, new.device) == (old.dtype, old.layout, old.device)
    assert new.requires_grad == old.requires_grad
    if old.is_nested or old.layout is not torch.strided:
        assert new.is_nested == old.is_nested
        pairs = zip(components(new), components(old), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
        return
    assert new.shape == old.shape
    if old.device.type == "meta":
        return
    if old.is_quantized:
        assert (new.qscheme(), new.q_scale()) == (old.qscheme(), old.q_scale())
        new, old = new.int_repr(), old.int_repr()
    assert raw(new) == raw(old)
    if new.numel():
        assert new.data_ptr() != old.data_ptr()


def components(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.is_nested:
        return list(tensor.unbind())
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout is torch.sparse_csr:
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]


def raw(tensor: torch.Tensor) -> bytes:
    if not tensor.numel():
        return b""
    plain = tensor.detach().resolve_conj().resolve_neg()
    plain = plain.clone() if plain._is_zerotensor() else plain.contiguous()
    return bytes(plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy())


# ------------------------------------------------------------------------------------------------------- the table
class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Sample:
    image: torch.Tensor
    label: int
    meta: dict[str, Any]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sample) and torch.equal(self.image, other.image) and self.label == other.label


class Labelled(torch.Tensor):
    """A subclass that adds nothing but attributes, as torchvision's do."""


class OutOfBand:
    """A user's class with buffers of its own (PEP 574)."""

    def __init__(self, content: Any) -> None:
        self.content = content

    def __reduce_ex__(self, protocol: int) -> Any:
        return OutOfBand, (pickle.PickleBuffer(self.content),)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OutOfBand) and bytes(self.content) == bytes(other.content)


class Registered:
    """A class whose pickling somebody registered with copyreg."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Registered) and other.value == self.value


copyreg.pickle(Registered, lambda registered: (Registered, (registered.value + 1,)))


def labelled(size: int) -> torch.Tensor:
    tensor = torch.arange(float(size)).as_subclass(Labelled)
    tensor.names_of_labels = ["a", "b"]  # type: ignore[attr-defined]
    return tensor


def quantized(size: int) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.arange(float(size)), 0.5, 3, torch.quint8)


TENSORS: dict[str, Callable[[int], torch.Tensor]] = {
    "contiguous": lambda n: torch.arange(n).view(-1, 2),
    "transposed": lambda n: torch.arange(n).view(-1, 2).t(),
    "channels last": lambda n: torch.arange(n).view(-1, 2, 2, 2).to(memory_format=torch.channels_last),
    "every second": lambda n: torch.arange(2 * n)[::2],
    "a column": lambda n: torch.arange(8 * n).view(-1, 8)[:, 3],
    "a slice": lambda n: torch.arange(3 * n)[n : 2 * n],
    "expanded": lambda n: torch.arange(n).view(-1, 1).expand(-1, 50),
    "bfloat16": lambda n: torch.arange(n).bfloat16(),
    "bfloat16 transposed": lambda n: torch.arange(n).bfloat16().view(-1, 2).t(),
    "bool": lambda n: torch.arange(n) % 3 == 0,
    "float16": lambda n: torch.arange(n).half(),
    "uint16": lambda n: torch.arange(n).to(torch.uint16),
    "uint64": lambda n: torch.arange(n).to(torch.uint64),
    "float8": lambda n: torch.arange(n).to(torch.float8_e4m3fn),
    "complex64": lambda n: torch.arange(n) + 1j,
    "complex32": lambda n: torch.arange(4 * n, dtype=torch.int16).view(torch.complex32),
    "conjugate": lambda n: (torch.arange(n) + 1j).conj(),
    "imaginary of conjugate": lambda n: (torch.arange(n) + 1j).conj().imag,
    "zero": lambda n: torch._efficientzerotensor((n,)),
    "requires grad": lambda n: torch.arange(float(n)).requires_grad_(),
    "parameter": lambda n: torch.nn.Parameter(torch.arange(float(n))),
    "zero dim": lambda n: torch.tensor(n),
    "empty": lambda n: torch.empty(0, n),
    "empty bfloat16": lambda n: torch.empty(n, 0, dtype=torch.bfloat16),
    "subclass": labelled,
    "sparse": lambda n: torch.eye(n // 64 + 1).to_sparse(),
    "sparse csr": lambda n: torch.eye(n // 64 + 1).to_sparse_csr(),
    "sparse csc": lambda n: torch.eye(n // 64 + 1).to_sparse_csc(),
    "quantized": quantized,
    "nested": lambda n: torch.nested.nested_tensor([torch.arange(float(n)), torch.arange(3.0)]),
    "jagged": lambda n: torch.nested.nested_tensor([torch.arange(float(n)), torch.arange(3.0)], layout=torch.jagged),
    "meta": lambda n: torch.empty(n, device="meta"),
    "inference": lambda n: torch.inference_mode()(torch.arange)(n),
}


@pytest.mark.covering(2)
@pytest.mark.parametrize("size", [16, LARGE])
@pytest.mark.parametrize(
    "kind",  # the jagged ones import torch._dynamo and sympy, 1.3 s and 75 MB
    [pytest.param(kind, marks=[pytest.mark.slow] * (kind == "jagged")) for kind in TENSORS],
)
@pytest.mark.filterwarnings("ignore:.*(prototype|beta|experimental|quantiz|deprecated).*:UserWarning")
def test_tensors_arrive_as_they_were(there_and_back: RoundTrip, kind: str, size: int) -> None:
    """Small and large, of every layout and dtype; dense ones can be written."""
    tensor = TENSORS[kind](size)
    new = there_and_back(tensor)
    assert_same(new, tensor)
    if kind == "subclass":
        assert new.names_of_labels == ["a", "b"]
    elif kind not in ("expanded", "quantized", "meta", "nested", "jagged") and not kind.startswith("sparse"):
        with torch.no_grad():
            new.zero_()


RARE_NAMES = ("bits8", "bits16", "float4_e2m1fn_x2", "uint4", "int3")
RARE = [getattr(torch, name) for name in RARE_NAMES if hasattr(torch, name)]


@pytest.mark.covering(2)
@pytest.mark.parametrize("size", [16, LARGE])
@pytest.mark.parametrize("dtype", RARE, ids=str)
def test_rare_dtypes(there_and_back: RoundTrip, dtype: torch.dtype, size: int) -> None:
    """Those that hardly any operation exists for travel as bytes, whatever their layout."""
    as_bytes = (torch.arange(size) % 251).to(torch.uint8)
    plain = as_bytes.view(torch.int16) if dtype.itemsize == 2 else as_bytes
    for view in (plain, plain.view(-1, 2).t(), plain[::4], plain[:0], plain[3]):
        new = there_and_back(view.view(dtype))
        assert (new.dtype, new.shape) == (dtype, view.shape)
        assert torch.equal(new.view(plain.dtype), view)
    first, second = there_and_back((plain[:4].view(dtype), plain[2:].view(dtype)))
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


ARRAYS: dict[str, Callable[[int], Any]] = {
    "contiguous": lambda n: np.arange(n).reshape(-1, 2),
    "Fortran": lambda n: np.asfortranarray(np.arange(n).reshape(-1, 2)),
    "reversed": lambda n: np.arange(n)[::-1],
    "every second": lambda n: np.arange(2 * n).reshape(-1, 2)[:, 1],
    "transposed": lambda n: np.arange(n).reshape(2, 2, -1).transpose(1, 2, 0),
    "big-endian": lambda n: np.arange(n, dtype=">f4"),
    "structured": lambda n: np.ones(n, dtype=[("a", "i4"), ("b", "f8", (2,))]),
    "record": lambda n: np.ones(n, dtype=[("a", "i4"), ("b", "f8")]).view(np.recarray),
    "object": lambda n: np.array([None, "x", 3, *range(n)], dtype=object),
    "strings": lambda n: np.array(["abc", "d"] * n),
    "bytes": lambda n: np.array([b"abc", b"d"] * n),
    "dates": lambda n: np.arange(n).astype("M8[s]"),
    "spans of time": lambda n: np.arange(n).astype("m8[us]"),
    "bool": lambda n: np.arange(n) % 3 == 0,
    "complex": lambda n: np.arange(n) * 1j,
    "long double": lambda n: np.arange(n, dtype=np.longdouble),
    "zero dim": lambda n: np.array(n),
    "one": lambda n: np.array([n]),
    "empty": lambda n: np.zeros((0, n)),
    "broadcast": lambda n: np.broadcast_to(np.arange(n), (3, n)),
    "matrix of subclass": lambda n: np.ma.masked_equal(np.arange(n), 3),
}


@pytest.mark.covering(2)
@pytest.mark.parametrize("size", [16, LARGE])
@pytest.mark.parametrize("kind", ARRAYS)
def test_arrays_arrive_and_can_be_written(there_and_back: RoundTrip, kind: str, size: int) -> None:
    """Small and large, of every layout and dtype, and all of them can be written, as pickled by any older protocol."""
    array = ARRAYS[kind](size)
    new = there_and_back(array)
    if isinstance(array, np.ma.MaskedArray):
        assert new.mask.tolist() == array.mask.tolist()
        return
    assert_same(new, array)


def test_an_array_that_is_read_only_can_be_written_when_it_arrives(there_and_back: RoundTrip) -> None:
    """As from torch's DataLoader, whose pickle copies it."""
    for size in (8, LARGE):
        array = np.zeros(size)
        array.flags.writeable = False
        new = there_and_back(array)
        new += 1
        assert (new == 1).all()
        assert (array == 0).all()


OTHERS: dict[str, Callable[[], Any]] = {
    "nested": lambda: {"a": [torch.arange(3), (np.arange(3), "text")], "b": {"c": b"bytes", "d": None, "e": 1.5}},
    "named tuple": lambda: Point(torch.arange(LARGE), [Point(1, 2)]),
    "dataclass": lambda: Sample(torch.arange(LARGE), 3, {"path": "x"}),
    "ordered dict": lambda: collections.OrderedDict(b=1, a=torch.arange(3)),
    "default dict": lambda: collections.defaultdict(list, {"a": [torch.arange(3)]}),
    "user's buffer, small": lambda: OutOfBand(bytearray(b"abc")),
    "user's buffer, large": lambda: OutOfBand(bytearray(LARGE)),
    "user's buffer, read-only": lambda: OutOfBand(bytes(LARGE)),
    "long strings": lambda: ["x" * codec.STREAM_MAX, b"y" * codec.STREAM_MAX, bytearray(codec.STREAM_MAX)],
    "numbers": lambda: [
        1,
        1 << 80,
        1.5,
        1j,
        True,
        Fraction(1, 3),
        np.float32(2),
        np.int64(3),
        datetime.date(2024, 2, 3),
    ],
    "types": lambda: [torch.float32, torch.device("cpu"), torch.Size([1, 2]), np.dtype("f4"), int, Point, slice(1, 2)],
    "table of arrow": lambda: pa.table({"a": list(range(LARGE)), "b": ["x"] * LARGE}),
    "array of arrow": lambda: pa.array([1, None, 3]),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_what_can_be_pickled_arrives_with_large_buffers(there_and_back: RoundTrip, kind: str) -> None:
    """Whatever can be pickled, with large buffers inside."""
    thing = OTHERS[kind]()
    assert_same(there_and_back(thing), thing)


def test_registered_reductions_are_respected(there_and_back: RoundTrip) -> None:
    """copyreg.pickle works as ever."""
    assert there_and_back(Registered(3)) == Registered(4)


def test_images_arrive_as_they_were(there_and_back: RoundTrip) -> None:
    """Images of PIL, small and large."""
    for size in (4, 500):
        image = PIL.Image.fromarray(np.random.default_rng(0).integers(0, 255, (size, size, 3), np.uint8))
        new = there_and_back([image, image])
        assert new[0] is new[1]
        assert new[0].tobytes() == image.tobytes()


def test_frames_of_pandas_arrive_and_can_be_changed(there_and_back: RoundTrip) -> None:
    """Frames of pandas can be changed in place."""
    rows = LARGE // 4  # of 8 bytes each
    frame = pd.DataFrame({"a": np.arange(rows), "b": np.arange(rows) * 0.5, "c": ["x"] * rows, "d": 1})
    frame["e"] = pd.Categorical(frame["c"])
    frame["f"] = pd.date_range("2024", periods=rows)
    new = there_and_back(frame)
    pd.testing.assert_frame_equal(new, frame)
    new.loc[0, "a"] = -1
    new["b"] += 1


# --------------------------------------------------------------------------------------------------- what is shared
def test_one_object_twice_is_one_object(there_and_back: RoundTrip) -> None:
    """Identity inside a batch is kept."""
    for size in (4, LARGE):
        tensor, array = torch.arange(size), np.arange(size)
        new = there_and_back([tensor, tensor, array, array])
        assert new[0] is new[1]
        assert new[2] is new[3]


@pytest.mark.parametrize("size", [64, LARGE])
def test_tensors_that_share_memory_share_it_still(there_and_back: RoundTrip, size: int) -> None:
    """Views of any kind of one tensor, whatever comes first."""
    base = torch.arange(float(size))
    views = [
        base[8:],
        base,
        base.view(-1, 2).t(),
        base[::2],
        base.view(torch.int32),
        base.detach(),
        base[3:9].view(2, 3),
    ]
    new = there_and_back({"views": views, "other": torch.arange(size)})
    for a, b in zip(new["views"], views, strict=True):
        assert_same(a, b)
        assert a.stride() == b.stride()
    assert len({view.untyped_storage().data_ptr() for view in new["views"]}) == 1
    new["views"][1].zero_()
    assert not any(bool(view.any()) for view in new["views"])
    assert bool(new["other"].any())


def test_small_buffers_travel_in_the_pickle() -> None:
    """To find a place for one takes longer than to copy it."""
    small, large = (Encoder(None).encode(pa.py_buffer(bytes(count))) for count in (4, LARGE))
    assert len(small) == 1
    assert len(large) > 1


def test_a_worker_lets_go_of_memory_that_tensors_share(there_and_back: RoundTrip) -> None:
    """Once they are sent."""
    array = np.arange(LARGE)
    is_there = weakref.ref(array)
    tensor = torch.from_numpy(array)
    there_and_back([tensor, tensor[1:]])
    del array, tensor
    assert is_there() is None


def test_views_of_a_large_tensor_bring_no_more_than_they_show(there_and_back: RoundTrip) -> None:
    """A row of a matrix of 64 MB is a row, and two rows that overlap are two rows."""
    matrix = torch.zeros(4000, 4000)
    for batch in (matrix[7], [matrix[7], matrix[9, 5:]], [matrix[7:9], matrix[8]], matrix[:, 3]):
        _, nbytes = there_and_back.measured(batch)
        assert nbytes < 100_000


SIDE = 2048


def diagonal(values: torch.Tensor) -> torch.Tensor:
    numbers = torch.arange(len(values)).expand(2, -1)
    return torch.sparse_coo_tensor(numbers, values, check_invariants=False)


GAPPED: dict[str, Callable[[torch.Tensor], list[Any]]] = {
    "columns": lambda m: [m[:, i] for i in range(0, 64, 7)],
    "the same column": lambda m: [m[:, 3], m[:, 3], m[:, 3].view(torch.int32)],
    "windows": lambda m: [m[:, i : i + 40] for i in range(0, 320, 30)],
    "a window by itself": lambda m: [m[:, 9:99]],
    "windows, transposed": lambda m: [m.t()[i : i + 40] for i in range(0, 320, 30)],
    "columns and rows": lambda m: [m[:, 3], m[5:7], m[6], m[:, 4]],
    "every 64th": lambda m: [m.view(-1)[::64], m.view(-1)[1::64]],
    "crops": lambda m: [m.view(64, -1, 256)[:, i : i + 30, i : i + 30] for i in range(3)],
    "crops, channels last": lambda m: [m.view(1, 512, -1, 8).permute(0, 3, 1, 2)[:, :3, :60, i:60] for i in range(3)],
    "repeated": lambda m: [m[:, 3].expand(900, SIDE), m[:, 4].view(-1, 1).expand(SIDE, 900)],
    "running": lambda m: [m[:, 3].unfold(0, 20, 1), m[:, 4].unfold(0, 20, 1)],
    "bfloat16": lambda m: [m.view(torch.bfloat16)[:, i] for i in range(5)],
    "conjugate": lambda m: [m.view(torch.complex64)[:, i].conj() for i in range(5)],
    "requires grad": lambda m: [m[:, i].detach().requires_grad_() for i in range(5)],
    "quantized": lambda m: [q := torch.quantize_per_tensor(m, 0.5, 3, torch.quint8), q[3], q[:, 4]][1:],
    "subclass": lambda m: [m[:, i].as_subclass(Labelled) for i in range(5)],
    "sparse": lambda m: [diagonal(m[:, i]) for i in range(5)],
    "arrays, columns": lambda m: [m.numpy()[:, i] for i in range(0, 64, 7)],
    "arrays, windows": lambda m: [m.numpy().T[i : i + 40] for i in range(0, 320, 30)],
    "tensors over columns of an array": lambda m: [torch.from_numpy(m.numpy()[:, i]) for i in range(5)],
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", GAPPED)
@pytest.mark.filterwarnings("ignore:.*(quantiz|deprecated).*:UserWarning")
def test_views_with_gaps_leave_the_gaps_behind(there_and_back: RoundTrip, kind: str) -> None:
    """Though their extents are most of a matrix of 16 MB, and overlap: at most twice the data. They can be written."""
    views = GAPPED[kind](torch.arange(float(SIDE * SIDE)).view(SIDE, SIDE))
    new, nbytes = there_and_back.measured(views)
    assert_same(new, views)
    data = sum(5 * each._values().nbytes if kind == "sparse" else each.nbytes for each in views)
    assert nbytes < 2 * data + 10_000
    if kind == "repeated":
        assert nbytes < 30_000
        assert [each.stride() for each in new] == [(0, 1), (1, 0)]
    elif kind not in ("quantized", "sparse"):
        with torch.no_grad():
            for each in new:
                each[:] = 0


def test_views_with_gaps_keep_the_order_of_their_strides(there_and_back: RoundTrip) -> None:
    """By which torch chooses the strides of results: a batch of crops is in the same layout as without workers."""
    pictures = torch.arange(2.0 * 300 * 300 * 3).view(2, 300, 300, 3).permute(0, 3, 1, 2)
    crops = [pictures[:1, :, i : i + 30, i : i + 40] for i in range(4)]
    new = there_and_back(crops)
    assert new[0].stride() == (3600, 1, 120, 3)
    assert torch.cat(new).stride() == torch.cat(crops).stride() == (3600, 1, 120, 3)
    single = torch.zeros(2, 1, 300, 300)
    for layout in (torch.contiguous_format, torch.channels_last):
        crops = [single.to(memory_format=layout)[:1, :, :30, :40]] * 2
        assert torch.cat(there_and_back(crops)).stride() == torch.cat(crops).stride()


def test_views_that_leave_few_gaps_share_memory_still(there_and_back: RoundTrip) -> None:
    """Of which each may have wide ones; and those beside a view whose gaps are too wide to be kept."""
    narrow = torch.arange(LARGE).view(-1, 8)
    wide = torch.arange(SIDE * SIDE).view(SIDE, SIDE)
    batches: list[tuple[list[torch.Tensor], int]] = [  # and how many, from the first, are on the same memory
        ([*narrow.unbind(1), narrow[:, 2:5]], 9),
        ([narrow[:, i] for i in range(5)], 5),
        ([narrow[:, 3], narrow, narrow[5]], 3),
        ([wide, wide[:, 3], wide[7, ::5]], 3),
        ([narrow.view(-1)[i : i + 100] for i in range(0, 600, 50)], 12),
        ([wide[7], wide[7, 4:], wide[7, ::4], wide[:, 3], wide[9], wide[:, 5]], 3),
        ([wide[7], wide[:, 3], wide[:, 4]], 1),
    ]
    for views, count in batches:
        new = there_and_back(views)
        assert_same(new, views)
        assert [each.stride() for each in new[:count]] == [each.stride() for each in views[:count]]
        storages = [each.untyped_storage().data_ptr() for each in new]
        assert [each == storages[0] for each in storages] == [number < count for number in range(len(new))]


def test_a_label_does_not_hold_the_payload(there_and_back: RoundTrip) -> None:
    """What is raw in a payload is copied out of it."""
    image, label = there_and_back([torch.zeros(LARGE), torch.arange(10)])
    assert label.untyped_storage().nbytes() == 80
    assert image.untyped_storage().nbytes() == 4 * LARGE
    buffer = io.BytesIO()
    torch.save(label, buffer)
    assert len(buffer.getvalue()) < 5000


# ----------------------------------------------------------------------------------------------- what cannot be sent
def test_what_requires_grad_and_is_no_leaf(there_and_back: RoundTrip) -> None:
    """torch's words."""
    with pytest.raises(RuntimeError, match="Cowardly refusing"):
        there_and_back(torch.ones(3, requires_grad=True) * 2)
    assert there_and_back(3) == 3


def test_what_cannot_be_pickled(there_and_back: RoundTrip) -> None:
    """The error is pickle's own; the encoder goes on, and no slab is lost."""
    for _ in range(20):
        with pytest.raises(TypeError, match=r"cannot pickle '_thread\.lock' object"):
            there_and_back([torch.arange(LARGE), threading.Lock()])
    assert there_and_back(3) == 3
    if there_and_back.heap is not None:
        assert len(there_and_back.heap.regions()) <= 1


def test_what_only_cloudpickle_takes(there_and_back: RoundTrip) -> None:
    """Lambdas, local classes; tensors beside them go the fast way."""

    class Local:
        def __init__(self) -> None:
            self.tensor = torch.arange(LARGE)

    new, function = there_and_back([Local(), lambda x: x + 1])
    assert_same(new.tensor, torch.arange(LARGE))
    assert type(new).__name__ == "Local"
    assert function(2) == 3
    stream = there_and_back.encoder.encode([Local(), lambda x: x + 1])[1]
    assert len(stream) < LARGE
    base = torch.arange(LARGE)
    first, second, _ = there_and_back([base[10:], base[:20], lambda x: x])
    second[10] = -1
    assert first[0] == -1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")
@pytest.mark.gpu
def test_tensors_on_an_accelerator(there_and_back: RoundTrip) -> None:
    """They cannot leave a worker, and the error says what to do."""
    with pytest.raises(RuntimeError, match="pin_memory"):
        there_and_back(torch.ones(3, device="cuda"))


def test_slabs_that_nobody_knows() -> None:
    """A payload that names slabs is of no use without its parent."""
    pool = Pool()
    trip = RoundTrip(pool)
    with pytest.raises(LookupError, match="nobody knows"):
        decode(b"".join(trip.encoder.encode(torch.zeros(LARGE))))
    trip.close()
    pool.close()


# ----------------------------------------------------------------------------------------------------- by hypothesis
DTYPES = [
    torch.float32,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.float8_e5m2,
]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 40]), max_size=4))
    dtype = draw(st.sampled_from(DTYPES))
    tensor = torch.randint(0, 2, shape).to(dtype)
    for _ in range(draw(st.integers(0, 2))):
        if tensor.dim() > 1 and draw(st.booleans()):
            tensor = tensor.transpose(0, draw(st.integers(1, tensor.dim() - 1)))
        elif tensor.dim() and tensor.shape[0] > 1:
            tensor = tensor[draw(st.integers(0, 1)) :: draw(st.integers(1, 2))]
    return tensor


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    shape = draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 40]), max_size=4))
    dtype = draw(st.sampled_from(["f4", ">i2", "u1", "?", "U3", "M8[ns]", "c8", "i4,f8"]))
    array = np.zeros(shape, dtype)
    array = array.transpose(draw(st.permutations(range(array.ndim))))
    return array[1:] if array.ndim and draw(st.booleans()) else array


LEAVES = tensors() | arrays() | st.integers() | st.text() | st.binary() | st.none() | st.booleans()
BATCHES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4) | st.tuples(inner, inner)
    ),
    max_leaves=12,
)


@settings(max_examples=examples(200), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(batches=st.lists(BATCHES, min_size=1, max_size=3))
def test_any_batch_arrives_as_it_was(there_and_back: RoundTrip, batches: list[Any]) -> None:
    """Whatever is in it, at any depth, and with views of the same tensors in it."""
    for batch in batches:
        assert_same(there_and_back(batch), batch)


@settings(max_examples=examples(100), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(base=tensors(), data=st.data())
def test_any_views_have_their_values(there_and_back: RoundTrip, base: torch.Tensor, data: st.DataObject) -> None:
    """Views of one tensor have their values; those that overlap see each other's changes, unless it is mostly gaps."""
    views = [base]
    for _ in range(data.draw(st.integers(1, 4))):
        view = data.draw(st.sampled_from(views))
        if view.dim():
            view = view[data.draw(st.integers(0, max(0, view.shape[0] - 1))) :]
        views.append(view.transpose(0, -1) if view.dim() > 1 else view.detach())
    new = there_and_back(views)
    assert_same(new, views)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(base.shape, base.stride(), strict=True))
    if extent > 2 * base.numel():
        return
    for tensors_of in (new, views):
        tensors_of[0].zero_()
    assert_same(new, views)


NUMBERS = st.sampled_from([-(1 << 62), -1, 0, 1, 2, 7, LARGE, 1 << 40, (1 << 63) - 1])
FIELDS = ["region", "capacity", "offset", "nbytes"]


@settings(max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_payloads_that_are_not_as_they_say(there_and_back: RoundTrip, data: st.DataObject) -> None:
    """With other lengths, numbers and places than were sent: an error or a batch, and no memory for what is not there.

    The heap of the worker stays in order: the batch that comes next is right.
    """
    numbers = torch.arange(3 * LARGE // 8)
    batch = [torch.arange(LARGE // 8), numbers[LARGE // 8 :], "label"]
    payload = bytearray().join(there_and_back.encoder.encode(batch))
    decode_it = decode if there_and_back.record is None else there_and_back.record.decode
    head = list(codec._HEAD.unpack_from(payload))
    assert head[0] == codec._FRAMED
    if data.draw(st.booleans(), "entries"):
        at = codec._HEAD.size + data.draw(st.integers(0, head[2] - 1)) * codec._ENTRY.size
        entry = dict(zip(FIELDS, codec._ENTRY.unpack_from(payload, at), strict=True))
        entry[data.draw(st.sampled_from(FIELDS))] = data.draw(NUMBERS)
        codec._ENTRY.pack_into(payload, at, *entry.values())
    else:
        field = data.draw(st.integers(1, 3))
        bits = {1: 8, 2: 32, 3: 64}[field]
        head[field] = data.draw(NUMBERS) % (1 << bits)
        codec._HEAD.pack_into(payload, 0, *head)
    payload = payload[: data.draw(st.integers(1, len(payload)) | st.just(len(payload)))]
    tracemalloc.start()
    try:
        decode_it(payload)
    except Exception:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 2 * len(payload) + (1 << 20)
    assert_same(there_and_back(batch), batch)


# ---------------------------------------------------------------------------------------------- from a real process
def assorted(number: int) -> dict[str, Any]:
    batch: dict[str, Any] = {
        kind: TENSORS[kind](LARGE) for kind in ("contiguous", "transposed", "bfloat16", "conjugate")
    }
    batch |= {kind: ARRAYS[kind](LARGE) for kind in ("Fortran", "dates", "structured", "object")}
    batch |= {kind: OTHERS[kind]() for kind in ("nested", "named tuple", "dataclass", "table of arrow", "long strings")}
    return batch | {
        "subclass": labelled(LARGE),
        "collated": default_collate([torch.arange(LARGE)] * 2),
        "number": number,
    }


def test_assorted_things_from_a_worker(pool: Pool, start_method: str) -> None:
    """All kinds in one batch, out of another process."""
    with worker(pool, assorted, start_method) as made:
        for number in range(3):
            assert_same(made.get(number), assorted(number))
    gc.collect()
