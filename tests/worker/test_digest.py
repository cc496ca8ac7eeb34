"""Digests of batches: the same for the same data, others for others."""

from __future__ import annotations

import array
import collections
import copy
import dataclasses
import datetime
import enum
import itertools
import logging
import pathlib
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import PIL.Image
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from torch.nn.utils.rnn import pack_sequence

from asyncloader.worker.digest import Digester
from tests.sameness import same

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(prototype|beta|quantiz|deprecated|invariant|ComplexHalf).*:UserWarning"
)


def digest(batch: Any) -> int:
    return Digester()(batch)


class Point(NamedTuple):
    x: Any
    y: Any = 0


class Other(NamedTuple):
    x: Any
    y: Any = 0


@dataclasses.dataclass
class Sample:
    image: Any
    label: Any = 0


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Flags(enum.IntFlag):
    A = 1
    B = 2


class Plain:
    def __init__(self, **more: Any) -> None:
        self.__dict__.update(more)


class Batch(list[Any]):
    pass


class Labelled(dict[str, Any]):
    pass


class Pair(tuple[Any, ...]):
    pass


class Distinct(set[Any]):
    pass


@dataclasses.dataclass
class Late(Plain):
    image: Any = dataclasses.field(default=0, compare=False)


class Video:
    def __init__(self, frames: Any) -> None:
        self.frames = frames

    def __fspath__(self) -> str:
        return "video"


class Rows(collections.abc.Mapping[str, Any]):
    """Iterates over its rows, as tensordict's classes do, and tells its keys in `keys` and `items` alone."""

    def __init__(self, **columns: Any) -> None:
        self.columns = columns

    def __getitem__(self, key: Any) -> Any:
        return self.columns[key] if isinstance(key, str) else Rows(**{k: v[key] for k, v in self.columns.items()})

    def __iter__(self) -> Any:
        return (self[row] for row in range(len(self)))

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def keys(self) -> Any:
        return self.columns.keys()

    def items(self) -> Any:
        return self.columns.items()


class Subclass(torch.Tensor):
    pass


def having(thing: Any, **attributes: Any) -> Any:
    thing.__dict__.update(attributes)
    return thing


def tagged(tensor: torch.Tensor, **more: Any) -> torch.Tensor:
    made = tensor.as_subclass(Subclass)
    made.__dict__.update(more)
    return made


DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.complex32,
    torch.int8, torch.int64, torch.uint8, torch.uint16, torch.bool, torch.float8_e4m3fn,
]  # fmt: skip
NUMBERS = (
    st_numpy.integer_dtypes(endianness="=")
    | st_numpy.floating_dtypes(endianness="=")
    | st_numpy.unicode_string_dtypes(endianness="=")
    | st_numpy.datetime64_dtypes(endianness="=")
)  # copies of arrays with another byte order may have that of the machine
LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.complex_numbers() | st.text() | st.binary()
    | st_numpy.arrays(NUMBERS, st_numpy.array_shapes(min_dims=0, min_side=0, max_side=3))
    | st_numpy.arrays(np.float32, st_numpy.array_shapes(max_side=3)).map(torch.from_numpy)
)  # fmt: skip
KEYS = st.text(max_size=3) | st.integers(-3, 3)
BATCHES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.builds(Point, inner, inner)
        | st.builds(Sample, inner, inner)
        | st.builds(lambda one, other: Plain(a=one, b=other), inner, inner)
    ),
    max_leaves=8,
)


@given(BATCHES)
def test_copies_are_alike(batch: Any) -> None:
    """Also of a copy that came out of a pickle, in which what was one object may be several."""
    assert digest(batch) == digest(copy.deepcopy(batch)) == digest(pickle.loads(pickle.dumps(batch)))


@given(BATCHES, BATCHES)
def test_digests_say_what_a_comparison_says(one: Any, other: Any) -> None:
    """Two batches are the same bit for bit, or their digests differ."""
    assert (digest(one) == digest(other)) is same(one, other)


@given(st.data())
def test_one_flipped_bit_is_found(data: st.DataObject) -> None:
    """Wherever it is, in tensors of every dtype, among others that stay as they are."""
    dtype = data.draw(st.sampled_from(DTYPES))
    shape = data.draw(st_numpy.array_shapes(max_dims=3, max_side=4))
    count = int(np.prod(shape)) * dtype.itemsize
    contents = data.draw(st.binary(min_size=count, max_size=count)) if dtype is not torch.bool else bytes(count)
    bit = (
        data.draw(st.integers(0, 8 * count - 1))
        if dtype is not torch.bool
        else 8 * data.draw(st.integers(0, count - 1))
    )
    flipped = bytearray(contents)
    flipped[bit // 8] ^= 1 << bit % 8
    one, other = (
        torch.frombuffer(bytearray(each), dtype=torch.uint8).view(dtype).reshape(shape) for each in (contents, flipped)
    )
    assert digest({"a": 1, "image": [one]}) != digest({"a": 1, "image": [other]})
    assert digest(one) == digest(one.clone())


@given(st_numpy.arrays(np.float32, st_numpy.array_shapes(min_dims=2, max_dims=3, max_side=5)))
def test_the_layout_does_not_matter(values: np.ndarray[Any, Any]) -> None:
    """Strides, gaps, shared or other memory, views of a larger storage."""
    tensor = torch.from_numpy(values)
    found = digest(tensor)
    gaps = torch.zeros(*(2 * size for size in tensor.shape))[tuple(slice(None, None, 2) for _ in tensor.shape)]
    gaps.copy_(tensor)
    turned = tensor.transpose(0, -1).contiguous().transpose(0, -1)
    assert found == digest(gaps) == digest(turned) == digest(tensor.clone().share_memory_())
    assert found == digest(torch.stack([tensor, tensor])[1]) == digest(tensor.clone().requires_grad_())
    assert digest(values) == digest(np.asfortranarray(values)) == digest(gaps.numpy())


UNLIKE: list[Callable[[], tuple[Any, ...]]] = [
    lambda: (0, 0.0, -0.0, False, None, "", b"", "0", b"0", 0j, ..., [], (), {}, set(), frozenset(), bytearray(), int),
    lambda: ([1, 2], [2, 1], [1, 2, 0], [[1], 2], [[1], [2]], (1, 2), collections.deque([1, 2]), {1, 2}),
    lambda: (Point(1, 2), Other(1, 2), Point(2, 1), Sample(1, 2), Plain(image=1, label=2), {"x": 1, "y": 2}),
    lambda: ({"a": 1}, {"b": 1}, {"a": 2}, {"a": True}, collections.OrderedDict(a=1), {b"a": 1}, {"a": {"a": 1}}),
    lambda: (torch.zeros(4), torch.zeros(2, 2), torch.zeros(4, 1), torch.zeros(4, dtype=torch.int32), np.zeros(4)),
    lambda: (torch.zeros(0, 3), torch.zeros(3, 0), torch.zeros(0, 3, dtype=torch.int8), torch.zeros(0, 3).to_sparse()),
    lambda: (torch.ones(3).to_sparse(), torch.eye(3)[:2].sum(0).to_sparse(), torch.eye(3).to_sparse_csr()),
    lambda: (torch.zeros(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.int16)),
    lambda: (torch.tensor([1 + 2j]), torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j]).imag),
    lambda: (torch.zeros(2, device="meta"), torch.zeros(3, device="meta"), torch.zeros(2)),
    lambda: (tagged(torch.ones(2)), tagged(torch.ones(2), box=1), tagged(torch.ones(2), box=2), torch.ones(2)),
    lambda: (np.float32(1), np.float64(1), 1.0, np.int64(1), np.array(1.0), np.str_("1"), np.datetime64(1, "s")),
    lambda: (np.array(["a", "b"]), np.array(["a", "bb"]), np.array([b"a", b"b"]), np.array(["a", "b"], object)),
    lambda: (np.array([1, "a"], object), np.array([1, "b"], object), np.array([[1, "a"]], object), [1, "a"]),
    lambda: (np.zeros(2, [("a", "i4")]), np.zeros(2, [("b", "i4")]), np.zeros(2, [("a", "f4")])),
    lambda: (np.ma.array([1, 2], mask=[0, 1]), np.ma.array([1, 2], mask=[1, 0]), np.array([1, 2])),
    lambda: (torch.ones(3).to_sparse(), torch.sparse_coo_tensor(torch.arange(3)[None], torch.ones(3), (4,))),
    lambda: (torch.nested.nested_tensor([torch.ones(2)]), torch.nested.nested_tensor([torch.ones(1), torch.ones(1)])),
    lambda: (Color.RED, Color.BLUE, 1, "RED", Flags.A, Flags.A | Flags.B, Flags(8), Flags(16)),
    lambda: (len, max, int, float, Plain, digest),
    lambda: (array.array("b", [1]), array.array("B", [1]), b"\1", bytearray(b"\1"), memoryview(b"\1")),
    lambda: (datetime.date(2026, 1, 1), datetime.date(2026, 1, 2), pathlib.Path("a"), range(3), range(4)),
    lambda: (PIL.Image.new("L", (2, 2)), PIL.Image.new("L", (2, 2), 1), PIL.Image.new("RGB", (2, 2))),
    lambda: (pd.Series([1, 2]), pd.Series([1, 3]), pd.DataFrame({"a": [1, 2]}), pd.DataFrame({"b": [1, 2]})),
    lambda: (pack_sequence([torch.ones(2), torch.ones(1)]), pack_sequence([torch.ones(2), torch.zeros(1)])),
    lambda: (Plain(a=1), Plain(a=2), Plain(b=1), Plain()),
    lambda: (Late(1), Late(2), having(Late(1), more=1), having(Late(1), more=2)),
    lambda: (Batch([1]), having(Batch([1]), ids=1), having(Batch([1]), ids=2), [1]),
    lambda: (Labelled(a=1), having(Labelled(a=1), ids=1), having(Labelled(a=1), ids=2), {"a": 1}),
    lambda: (Pair([1]), having(Pair([1]), ids=1), Distinct([1]), having(Distinct([1]), ids=1)),
    lambda: (Video(1), Video(2), pathlib.Path("video"), pathlib.PurePosixPath("video")),
    lambda: (Rows(a=torch.zeros(2)), Rows(a=torch.ones(2)), Rows(b=torch.ones(2)), {"a": torch.ones(2)}),
]  # fmt: skip


@pytest.mark.parametrize("make", UNLIKE, ids=map(str, range(len(UNLIKE))))
def test_what_differs_has_another_digest(make: Callable[[], tuple[Any, ...]]) -> None:
    """In type, in structure, in a key, a dtype, a shape or a value; and each is the same when it is made again."""
    found = [digest(thing) for thing in make()]
    assert len(set(found)) == len(found)
    assert found == [digest(thing) for thing in make()]
    assert len({digest([thing]) for thing in make()} | set(found)) == 2 * len(found)


def test_the_order_of_keys_and_elements_does_not_matter() -> None:
    """Of dictionaries and sets: that of strings in a set differs from process to process."""
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    assert digest({"a", "b", "c"}) == digest({"c", "b", "a"})
    assert digest({"a": 1, "b": 2}) != digest({"a": 2, "b": 1})


def test_what_holds_itself_has_a_digest() -> None:
    """Which differs with what is in it."""

    def ring(value: int) -> list[Any]:
        made: list[Any] = [value]
        made.append({"me": made})
        return made

    assert digest(ring(1)) == digest(ring(1)) != digest(ring(2))


def linked(count: int, *, from_number: int = 0) -> Any:
    """Return one of several objects that each refer to all others."""
    things = [Looked(number) for number in range(count)]
    for thing in things:
        thing.others = [other for other in things if other is not thing]
    return things[from_number]


class Looked(Plain):
    """Counts how often it is looked at."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __getstate__(self) -> Any:
        LOOKS[self.number] += 1
        return self.__dict__


LOOKS: collections.Counter[int] = collections.Counter()


def test_objects_that_refer_to_each_other_are_looked_at_a_few_times() -> None:
    """Not once for each way that leads to them, which would be 16,000 ways for eight."""
    LOOKS.clear()
    found = digest(linked(8))
    assert set(LOOKS) == set(range(8))
    assert max(LOOKS.values()) <= 3
    assert found == digest(copy.deepcopy(linked(8))) != digest(linked(7))
    changed = linked(8)
    changed.others[3].others[2].number = 9
    assert digest(changed) != found


@pytest.mark.parametrize("around", [list, lambda things: [things, 1], lambda things: Plain(things=things)])
def test_samples_may_share_objects_or_have_their_own(around: Callable[[list[Any]], Any]) -> None:
    """Also parts of a circle, by whichever of them it is entered."""
    first, third = linked(4), linked(4, from_number=2)
    both = [first, first.others[1]]
    assert both[1].number == third.number
    assert digest(around(both)) == digest(around([linked(4), third]))
    text = Plain(text="shared")
    assert digest(around([text, Plain(a=text, b=text)])) == digest(
        around([Plain(text="shared"), Plain(a=Plain(text="shared"), b=Plain(text="shared"))])
    )


def test_nothing_of_a_batch_is_kept() -> None:
    """Its memory is free with it."""
    make, thing = Digester(), Plain(a=1)
    make([thing, thing])
    there = weakref.ref(thing)
    del thing
    assert there() is None


def test_the_byte_order_does_not_matter() -> None:
    """A pickle of an array may come back in the order of the machine."""
    for values in (np.arange(3), np.array(["a", "b"]), np.array([(1, 2.0)], "i4,f8"), np.ma.array([1, 2], mask=[0, 1])):
        assert digest(values) == digest(values.astype(values.dtype.newbyteorder()))
    assert digest(np.array([1], ">i4")) != digest(np.array([1 << 24], ">i4"))


def test_equal_parts_may_be_one_object_or_two() -> None:
    """A pickle would tell them apart."""
    text, other = "".join(["same", " text"]), "".join(["same", " text"])
    assert text is not other
    one, two = Plain(a=text, b=text), Plain(a=text, b=other)
    assert pickle.dumps(one) != pickle.dumps(two)
    assert digest(one) == digest(two)


PRINTING = """
import numpy as np, torch
from asyncloader.worker.digest import Digester
batch = {"image": torch.ones(2, 2, dtype=torch.uint8), "label": ["a", 3, 0.5, None], "set": {"x", "y"}}
for each in (torch.arange(6, dtype=torch.float32).reshape(2, 3), batch, np.arange(3, dtype=np.int64)):
    found.append(f"{Digester()(each):016x}")
"""


@pytest.mark.timeout(300)  # another interpreter imports torch
def test_digests_stay_what_they_are() -> None:
    """In another process, where hashes of texts are others; and those of a state of last year."""
    found: list[str] = []
    exec(PRINTING, {"found": found})
    assert found == ["657162d0c2cdff51", "aca5e280318d78c9", "a316407771aff66d"]
    program = [sys.executable, "-c", f"found = []\n{PRINTING}\nprint(*found)"]
    done = subprocess.run(program, check=True, capture_output=True, text=True)
    assert done.stdout.split() == found


class Refusing:
    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ValueError("not me")


class Fickle:
    def __reduce_ex__(self, protocol: Any) -> Any:
        return Fickle, (next(COUNT),)


COUNT = itertools.count()


@pytest.mark.parametrize("kind", [Refusing, Fickle, threading.Lock], ids=["refuses", "is fickle", "a lock"])
def test_what_cannot_be_looked_at_is_left_out_and_named_once(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The rest of the batch counts; and so does that such a thing is there."""
    make = Digester()
    with caplog.at_level(logging.WARNING, "asyncloader"):
        first = make([1, kind()])
        assert make([1, kind()]) == first
        assert make([2, kind()]) != first != make([1, None])
    (record,) = caplog.records
    assert "The fingerprint leaves out what is in objects of the class" in record.getMessage()
    assert type(kind()).__qualname__ in record.getMessage()


def test_a_subclass_in_the_main_module_of_a_spawned_worker_is_the_same_class() -> None:
    """There the module has another name, __mp_main__: so classes count by their qualified names alone."""
    twin = type("Plain", (), {"__module__": "__mp_main__", "__qualname__": "Plain"})
    made = twin()
    made.a = 1
    assert digest(made) == digest(Plain(a=1))
