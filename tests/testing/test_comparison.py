"""What `assert_reproducible` and `assert_resumable` take for the same, and what they say of what is not."""

from __future__ import annotations

import array
import collections
import dataclasses
import datetime
import decimal
import enum
import functools
import itertools
import pickle
import re
import struct
import threading
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import pandas as pd
import PIL.Image
import pyarrow as pa
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import Dataset

from asyncloader import DataLoader
from asyncloader.testing import assert_reproducible, assert_resumable
from asyncloader.testing.comparison import CannotCompareError, Difference, difference, told_apart
from tests.sameness import same

pytestmark = pytest.mark.filterwarnings("ignore:.*(prototype|beta|quantiz|deprecated|invariant).*:UserWarning")
NAN = float("nan")
OTHER_NAN = struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000001))[0]


class Point(NamedTuple):
    x: Any
    y: Any = 0


@dataclasses.dataclass
class Sample:
    image: Any
    label: Any = 0
    when: Any = dataclasses.field(default=0, compare=False)


class Plain:
    """Says nothing of what is equal."""

    def __init__(self, **more: Any) -> None:
        self.__dict__.update(more)


class Slotted:
    __slots__ = ("here", "x")

    def __init__(self, x: Any) -> None:
        self.x = x


class Saying:
    """Compares one thing of two."""

    def __init__(self, x: Any, y: Any = 0) -> None:
        self.x = x
        self.y = y

    def __eq__(self, other: object) -> Any:
        return self.x == other.x if isinstance(other, Saying) else NotImplemented

    __hash__ = None  # type: ignore[assignment]


class Numbers(list[Any]):
    pass


class Kept(dict[str, Any]):
    pass


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Silent:
    def __repr__(self) -> str:
        raise RuntimeError("no words")


class Labelled(torch.Tensor):
    """A subclass with attributes."""


def labelled(**attributes: Any) -> torch.Tensor:
    tensor = torch.ones(2).as_subclass(Labelled)
    vars(tensor).update(attributes)
    return tensor


def ring(x: int) -> list[Any]:
    """Holds itself, and an object that holds it."""
    made: list[Any] = [x]
    made += [made, Plain(of=made), x]
    return made


def crossed(count: int) -> Any:
    """Objects, each of which is held by all after it: more ways through them than can be gone."""
    made: list[Any] = []
    for number in range(count):
        made.append(Plain(before=list(made), number=number))
    return made[-1]


def structured(x: float) -> Any:
    made = np.zeros(2, np.dtype([("a", "i1"), ("b", "f8", (2,)), ("c", "O")], align=True))
    made["b"][1, 1], made["c"] = x, "text"
    return made


def quantized(x: float, by_channel: bool = False) -> torch.Tensor:
    values = torch.tensor([[1.0, x], [3.0, 4.0]])
    if by_channel:
        return torch.quantize_per_channel(values, torch.tensor([0.5, 0.25]), torch.tensor([0, 0]), 0, torch.qint8)
    return torch.quantize_per_tensor(values, 0.5, 0, torch.qint8)


def uncoalesced(x: float) -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.tensor([[0, 0]]), torch.tensor([x, NAN]), (3,), check_invariants=False)


def rare(x: int) -> torch.Tensor:
    return torch.tensor([1, x], dtype=torch.uint8).view(torch.bits8)


def adder(x: Any) -> Callable[[Any], Any]:
    return lambda y: x + y


# By kind, what makes it of a number. Of the same number it is the same, of others it is not, at the path and with the
# words that are told.
KINDS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "int": (lambda x: int(x), "it is 1, and should be 2"),
    "text": (lambda x: f"text {x}", "it is 'text 1', and should be 'text 2'"),
    "bytes": (lambda x: bytes([x]), r"it is b'\x01', and should be b'\x02'"),
    "bytearray": (lambda x: bytearray([x]), r"it is bytearray(b'\x01'), and"),
    "memoryview": (lambda x: memoryview(bytes([x])), "it is <memory at"),
    "array of Python's": (lambda x: array.array("d", [NAN, x]), "it is array('d', [nan, 1.0]), and should be"),
    "float": (lambda x: float(x), "it is 1.0, and should be 2.0"),
    "complex": (lambda x: complex(x, NAN), "it is (1+nanj), and should be (2+nanj)"),
    "number of numpy": (lambda x: np.float32(x), "it is 1.0, and should be 2.0"),
    "date of numpy": (lambda x: np.array([x, "NaT"], "M8[s]"), "it differs in 1 of 2 elements; the first, [0], is"),
    "truth": (lambda x: x == 1, "it is True, and should be False"),
    "nothing, and a number": (lambda x: None if x == 1 else x, "it is of type NoneType, and should be of type int"),
    "tensor": (lambda x: torch.tensor([[0.0, NAN], [0.0, x]]), "the first, [1, 1], is 1.0, and should be 2.0"),
    "tensor without dimensions": (lambda x: torch.tensor(x), "it is 1, and should be 2"),
    "tensor with gaps": (lambda x: torch.full((4, 6), x)[::2, ::3].t(), "4 of 4 elements; the first, [0, 0], is 1"),
    "conjugate": (lambda x: torch.tensor([1 + x * 1j]).conj(), "is (1-1j), and should be (1-2j)"),
    "bfloat16": (lambda x: torch.tensor([x, NAN]).bfloat16(), "1 of 2 elements; the first, [0], is 1.0"),
    "rare dtype": (lambda x: rare(x), "1 of 2 elements; the first, [1], is 0x01, and should be 0x02"),
    "requires grad": (lambda x: torch.tensor([float(x)], requires_grad=True) * 1, "is 1.0"),
    "parameter": (lambda x: torch.nn.Parameter(torch.tensor([float(x)])), "is 1.0"),
    "subclass": (lambda x: labelled(number=x), "it.number is 1, and should be 2"),
    "subclass, its values": (
        lambda x: (torch.ones(2) * x).as_subclass(Labelled),
        "2 of 2 elements; the first, [0], is",
    ),
    "sparse": (lambda x: torch.eye(3).mul(x).to_sparse(), "it._values() differs in 3 of 3"),
    "sparse, not coalesced": (uncoalesced, "it._values() differs in 1 of 2 elements; the first, [0], is 1.0"),
    "sparse, other places": (lambda x: torch.eye(4).roll(x, 0).to_sparse(), "it._indices() differs in 4 of 8"),
    "sparse csr": (lambda x: torch.eye(3).mul(x).to_sparse_csr(), "it.values() differs in 3 of 3"),
    "sparse csc": (lambda x: torch.eye(3).mul(x).to_sparse_csc(), "it.values() differs in 3 of 3"),
    "quantized": (quantized, "it.int_repr() differs in 1 of 4 elements; the first, [0, 1], is 2, and should be 4"),
    "quantized by channel": (lambda x: quantized(x, True), "it.int_repr() differs in 1 of 4"),
    "nested": (
        lambda x: torch.nested.nested_tensor([torch.ones(2), torch.full((3,), x)]),
        "it.unbind()[1] differs in 3",
    ),
    "jagged": (
        lambda x: torch.nested.nested_tensor([torch.ones(2), torch.ones(x)], layout=torch.jagged),
        "it.unbind()[1] has the shape torch.Size([1]), and should have torch.Size([2])",
    ),
    "meta": (lambda x: torch.empty(x, device="meta"), "it has the shape torch.Size([1]), and"),
    "packed sequence": (
        lambda x: pack_sequence([torch.tensor([x, 2]), torch.tensor([3])]),
        "it.data differs in 1 of 3",
    ),
    "dtype": (lambda x: torch.zeros(2, dtype=[None, torch.int32, torch.int64][x]), "the dtype torch.int32, and should"),
    "array": (lambda x: np.array([[NAN, x]]).T, "1 of 2 elements; the first, [1, 0], is 1.0, and should be 2.0"),
    "array, big-endian": (lambda x: np.array([NAN, x], ">f4"), "1 of 2 elements; the first, [1], is 1.0"),
    "array, structured": (structured, "it['b'] differs in 1 of 4 elements; the first, [1, 1], is 1.0"),
    "array, record": (lambda x: structured(x).view(np.recarray), "it['b'] differs in 1 of 4"),
    "row of an array": (lambda x: structured(x)[1], "it['b'] differs in 1 of 2"),
    "array of texts": (lambda x: np.array(["a", f"b{x}"]), "the first, [1], is 'b1', and should be 'b2'"),
    "array of objects": (
        lambda x: np.array([None, "a", torch.full((2,), x)], object),
        "it[2] differs in 2 of 2 elements",
    ),
    "array of objects, 2-D": (lambda x: np.array([[None, NAN], ["a", x]], object), "it[1, 1] is 1, and should be 2"),
    "array of long doubles": (lambda x: np.array([x, NAN], np.longdouble), "1 of 2 elements; the first, [0], is"),
    "array of long complex": (lambda x: np.array([1, x * 1j], np.clongdouble), "1 of 2 elements; the first, [1], is"),
    "masked array": (lambda x: np.ma.masked_equal([1.0, 5.0, NAN, x * 10], 5), "it.filled() differs in 1 of 4"),
    "masked array, its mask": (lambda x: np.ma.masked_equal([1, 2], x), "it.mask differs in 2 of 2 elements"),
    "shape of an array": (lambda x: np.zeros((2, x)), "it has the shape (2, 1), and should have (2, 2)"),
    "list": (lambda x: [0, [NAN, x]], "it[1][1] is 1, and should be 2"),
    "longer list": (lambda x: [0] * x, "it has 1 items, and should have 2"),
    "list of one's own": (lambda x: Numbers([NAN, x]), "it[1] is 1, and should be 2"),
    "queue": (lambda x: deque([NAN, x]), "it[1] is 1, and should be 2"),
    "tuple": (lambda x: (0, torch.tensor([x])), "it[1] differs in 1 of 1 elements; the first, [0], is 1"),
    "named tuple": (lambda x: Point(NAN, Point(x)), "it.y.x is 1, and should be 2"),
    "dict": (lambda x: {"a": NAN, "b": {3: torch.tensor([x])}}, "it['b'][3] differs in 1 of 1"),
    "dict without a key": (lambda x: {"a": 1, 2: 2} if x > 1 else {"a": 1}, "it lacks [2]"),
    "dict with another key": (lambda x: {"a": 1, 2: 2} if x == 1 else {"a": 1}, "it has [2], and should not"),
    "dict by nan": (lambda x: {float("nan"): x}, "it[nan] is 1, and should be 2"),
    "dict by truth": (lambda x: {[0, 1, True][x]: 0}, "it (keys)[0] is of type int, and should be of type bool"),
    "dict of one's own": (lambda x: Kept(a=x), "it['a'] is 1, and should be 2"),
    "ordered dict": (lambda x: OrderedDict(a=NAN, b=x), "it['b'] is 1, and should be 2"),
    "mapping of one's own": (lambda x: UserDict(a=torch.tensor([x])), "it['a'] differs in 1 of 1"),
    "set": (lambda x: {"a", NAN, (1, x)}, "it has (1, 1), and should not"),
    "frozen set": (lambda x: frozenset([x, -x, NAN]), "and should not"),
    "larger set": (lambda x: {*range(x)}, "it has 1 elements, and should have 2"),
    "dataclass": (lambda x: Sample([NAN, torch.full((3,), x)]), "it.image[1] differs in 3 of 3 elements"),
    "dataclass, another field": (lambda x: Sample(0, x), "it.label is 1, and should be 2"),
    "object": (lambda x: Plain(name="n", x=[torch.tensor([NAN, x])]), "it.x[0] differs in 1 of 2 elements"),
    "object with slots": (lambda x: Slotted({"a": x}), "it.x['a'] is 1, and should be 2"),
    "object without anything": (lambda x: Plain() if x == 1 else Plain(a=1), "it lacks ['a']"),
    "object that compares": (lambda x: Saying(x), "it.x is 1, and should be 2"),
    "object that compares tensors": (lambda x: Saying(torch.tensor([x, 5])), "it.x differs in 1 of 2 elements"),
    "decimal": (lambda x: [decimal.Decimal("nan"), decimal.Decimal(x)], "it[1] is Decimal('1'), and should be Decimal"),
    "date": (lambda x: datetime.date(2024, 1, x), "it is datetime.date(2024, 1, 1), and should be datetime.date("),
    "enumeration": (lambda x: Colour(x), "it is <Colour.RED: 1>, and should be <Colour.BLUE: 2>"),
    "class": (lambda x: [Plain, Slotted][x - 1], "Plain'>, and should be"),
    "function": (lambda x: [len, functools.partial(adder(x))], "it[1] (as pickled)[1][0][1][3][0] is 1, and"),
    "function by name": (lambda x: len if x == 1 else print, "it is <built-in function len>, and should be"),
    "picture": (lambda x: PIL.Image.new("RGB", (4, 4), (x, 0, 0)), "(as pickled)"),
    "frame": (lambda x: pd.DataFrame({"a": [1.0, NAN], "b": [x, 3]}), "elements; the first, [0, 0], is 1"),
    "table": (lambda x: pa.table({"a": [NAN, x]}), "it"),
    "random state": (lambda x: np.random.default_rng(x), "it"),
    "itself": (ring, "it[0] is 1, and should be 2"),
}


def told(one: Any, other: Any) -> str:
    found = difference(one, other)
    assert found is not None
    return f"it{found.path} {found.how}"


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_the_same_and_what_is_not(kind: str) -> None:
    """Made twice; there and back by pickle; and of other numbers."""
    make, words = KINDS[kind]
    assert difference(make(1), make(1)) is None
    assert difference([make(2), 0], [make(2), 0]) is None
    assert words in told(make(1), make(2))
    assert words.removeprefix("it") in told([0, make(1)], [0, make(2)]).removeprefix("it[1]")
    assert told([0, make(1)], [0, make(2)]).startswith("it[1]")
    if kind not in ("memoryview", "requires grad", "rare dtype"):  # pickle refuses these
        thing = make(1)
        again = pickle.loads(cloudpickle.dumps(thing))
        assert difference(again, thing) is None
        assert difference(thing, again) is None


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x,
        np.float64,
        np.float16,
        lambda x: complex(x, x),
        lambda x: np.array([x]),
        lambda x: np.array([x], np.longdouble),
        lambda x: np.array([x], [("a", "f8")]),
        lambda x: np.array([x], object),
        lambda x: torch.tensor(x),
        lambda x: torch.tensor([x]).half(),
        lambda x: torch.sparse_coo_tensor([[0]], [x], (2,), check_invariants=False),
        lambda x: [x],
        lambda x: {x: 0},
        lambda x: {x},
        lambda x: Sample(x),
        lambda x: Plain(x=x),
    ],
)
def test_zeros_are_not_the_same_with_another_sign(make: Callable[[float], Any]) -> None:
    """To the last bit, wherever they are."""
    assert not same(make(0.0), make(-0.0))
    assert same(make(-0.0), make(-0.0))


def test_every_nan_is_itself_alone() -> None:
    """They have bits to tell them apart, and are told by these."""
    for make in (lambda x: x, lambda x: np.array(x), lambda x: torch.tensor(x, dtype=torch.float64)):
        assert same(make(OTHER_NAN), make(OTHER_NAN))
        assert told(make(NAN), make(OTHER_NAN)) == "it is 0x7ff8000000000000, and should be 0x7ff8000000000001"


def test_what_is_not_part_of_a_value() -> None:
    """Strides, the order of keys, what fills an array's gaps, fields that are not for comparison."""
    assert same(torch.ones(2, 3), torch.ones(3, 2).t())
    assert same({"a": 1, "b": NAN}, {"b": NAN, "a": 1})
    assert same(MappingProxyType({"a": 1, "b": 2}), MappingProxyType({"b": 2, "a": 1}))
    assert same({"a", "b", 1, NAN}, {NAN, 1, "b", "a"})
    padded = np.dtype([("a", "i1"), ("b", "f8")], align=True)
    one, other = (np.frombuffer(bytearray([filling]) * 32, padded).copy() for filling in (0, 255))
    one["a"] = other["a"] = 1
    one["b"] = other["b"] = 2
    assert same(one, other)
    long = np.frombuffer(bytearray([255]) * 64, np.longdouble).copy()
    long[:] = 3
    assert same(long, np.full(len(long), 3, np.longdouble))
    assert same(Sample(1, 2, when=3), Sample(1, 2, when=4))
    assert same(np.zeros((0, 3)), np.zeros((0, 3)))
    assert same(torch.zeros(0, 3), torch.zeros(0, 3))
    assert same(np.array(["", ""]), np.array(["", ""]))


def test_equal_is_not_the_same_of_other_types() -> None:
    """Numbers, containers, and tensors of other layouts and devices."""
    assert told(1, 1.0) == "it is of type int, and should be of type float"
    assert told([1], (1,)) == "it is of type list, and should be of type tuple"
    assert told(Point(1), (1, 0)) == "it is of type tests.testing.test_comparison.Point, and should be of type tuple"
    assert told(np.float32(1), np.float64(1)) == "it is of type numpy.float32, and should be of type numpy.float64"
    assert "has the layout torch.sparse_coo, and should have torch.strided" in told(
        torch.eye(2).to_sparse(), torch.eye(2)
    )
    assert "has the device meta, and should have cpu" in told(torch.ones(1, device="meta"), torch.ones(1))
    in_order = torch.sparse_coo_tensor([[0, 1]], [1.0, 2.0], (3,), check_invariants=False)
    assert told(in_order.coalesce(), in_order) == "it.is_coalesced() is True, and should be False"


def test_a_class_that_says_what_is_equal_is_believed() -> None:
    """If it says yes; where it says no, for it holds NaN, by its parts."""
    assert same(Saying(1, 2), Saying(1, 3))
    assert same(Saying(NAN), Saying(NAN))
    assert same(collections.UserList([NAN, torch.ones(3)]), collections.UserList([NAN, torch.ones(3)]))
    lock = threading.Lock()
    assert told(Saying(lock), Saying(threading.Lock())).startswith(f"it is <{__name__}.Saying")


def test_things_that_hold_each_other_in_many_ways() -> None:
    """Each pair is compared once."""
    assert same(crossed(200), crossed(200))
    one, other = crossed(200), crossed(200)
    one.before[3].before[1].number = 7
    assert ".number is 7, and should be 1" in told(one, other)
    left = [Plain(x=ring(n)) for n in (1, 2, 3)]
    right = [Plain(x=ring(n)) for n in (3, 1, 2)]
    assert same(set(left), set(right))
    right[0].x[2].of[3] = 4
    assert not same(set(left), set(right))


def test_what_cannot_be_compared() -> None:
    """It says which part that is, and why."""
    for make, words in (
        (
            lambda: Plain(lock=threading.Lock()),
            r"\.lock is <unlocked .*; its class _thread.lock does not say .*pickled: ",
        ),
        (
            lambda: (n for n in range(3)),
            "it is <generator object .* its class generator does not say .*: cannot pickle",
        ),
        (lambda: [1, {"a": memoryview, "b": threading.Lock()}], r"\[1\]\['b'\] is <unlocked"),
        (lambda: np.array([1, threading.Lock()], object), r"\[1\] is <unlocked"),
    ):
        with pytest.raises(CannotCompareError, match=words):
            difference(make(), make())
    lock = threading.Lock()
    assert same([lock], [lock])


def test_words_of_long_things_begin_where_they_differ() -> None:
    """And what has no words of its own is told without."""
    one, other = "a" * 5000 + "b" + "c" * 5000, "a" * 5000 + "d" + "c" * 5000
    words = told_apart(one, other)
    assert len(words) < 1000
    assert re.fullmatch(r"is \.\.\.a+bc+\.\.\., and should be \.\.\.a+dc+\.\.\.", words)
    assert told_apart(one, one) == f"is 'a{'a' * 398}..., and should be 'a{'a' * 398}..."
    assert told_apart(Silent(), 3).startswith("is <tests.testing.test_comparison.Silent object at 0x")
    assert told_apart(rare(1), 3).startswith("is <")


# ------------------------------------------------------------------------------------------------------- in the helpers
class Made(Dataset[Any]):
    """Samples that a function makes."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def everything(index: int) -> dict[str, Any]:
    """Makes what the comparison once stumbled over."""
    return {
        "nan": [NAN, torch.tensor([index, NAN]), np.array([NAN])],
        "dataclass": Sample(torch.arange(3) + index),
        "sparse": torch.eye(3).to_sparse(),
        "object": Plain(x=index, tensor=torch.arange(4)),
        "objects": np.array([None, "a", torch.zeros(2)], dtype=object),
        "set": {NAN, index},
    }


def test_samples_of_every_kind_are_reproducible_and_resumable() -> None:
    """Those that are made elsewhere too."""
    assert_reproducible(lambda: Made(everything), num_workers=(0, 2), epochs=1)
    assert_resumable(lambda: DataLoader(Made(everything), 2, num_workers=1, collate_fn=list))


def test_the_part_that_differs_is_told() -> None:
    """With what was found and what should be."""

    def of_its_worker(index: int) -> Any:
        is_here = torch.utils.data.get_worker_info() is None
        return index, Sample({"x": torch.tensor([1.0, 0.0 if is_here or index < 3 else -0.0])})

    words = r"With num_workers=1, .*, epoch 0: sample 4 is \(3, .*: \[1\]\.image\['x'\] differs in 1 of 2 elements; "
    with pytest.raises(AssertionError, match=words + r"the first, \[1\], is -0\.0, and should be 0\.0\."):
        assert_reproducible(lambda: Made(of_its_worker), num_workers=(0, 1), epochs=1, scheduling=["static"])
    with pytest.raises(AssertionError, match=r"epoch 0: sample 1 is 1, and should be 0\.$"):
        seen = itertools.count()
        assert_reproducible(lambda: [next(seen)], num_workers=[0], batch_sizes=[1, 2], epochs=1, scheduling=["static"])


def test_the_part_that_cannot_be_compared_is_told() -> None:
    """As an assertion that failed, not as an error of ours."""
    options: dict[str, Any] = {"num_workers": [0], "epochs": 1, "scheduling": ["static"]}
    words = r"epoch 0: sample 1 cannot be compared: \[0\]\.lock is <unlocked .*cannot pickle"
    with pytest.raises(AssertionError, match=words):
        assert_reproducible(lambda: Made(lambda index: [Plain(lock=threading.Lock())]), **options)

    def deep(index: int) -> Any:
        made: list[Any] = []
        for _ in range(5000):
            made = [made]
        return made

    with pytest.raises(AssertionError, match="sample 1 cannot be compared: maximum recursion depth"):
        assert_reproducible(lambda: Made(deep), **options)


def test_differences_are_found_by_path() -> None:
    """From the sample itself on."""
    assert difference({"a": [1]}, {"a": [2]}) == Difference("['a'][0]", "is 1, and should be 2")
    assert difference(1, 2) == Difference("", "is 1, and should be 2")
