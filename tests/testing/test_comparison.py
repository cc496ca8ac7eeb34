"""What the helpers for tests take for the same, what they say of what is not, and fingerprints."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import enum
import itertools
import pickle
import subprocess
import sys
import threading
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import PIL.Image
import pytest
import torch
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from asyncloader import DataLoader
from asyncloader.testing import assert_reproducible, assert_resumable, fingerprint
from asyncloader.testing.comparison import difference
from tests.support.sameness import same

pytestmark = pytest.mark.filterwarnings("ignore:.*(prototype|beta|set_vital|invariant|Sparse).*:UserWarning")
NAN = float("nan")


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


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


def structured(x: float) -> Any:
    made = np.zeros(2, np.dtype([("a", "i1"), ("b", "f8", (2,))]))
    made["b"][1, 1] = x
    return made


# By kind, what makes it of a number: of the same number it is the same, of another it is not, with these words.
KINDS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "int": (lambda x: x, "is 1 (int), and should be 2 (int)"),
    "text": (lambda x: f"text {x}", "is 'text 1' (str), and should be 'text 2' (str)"),
    "bytes": (lambda x: bytes([x]), r"is b'\x01'"),
    "float": (float, "is 1.0 (float), and should be 2.0 (float)"),
    "complex": (lambda x: complex(x, 1), "is (1+1j) (complex)"),
    "number of numpy": (np.float32, "is np.float32(1.0) (float32)"),
    "number and truth": (lambda x: x if x == 1 else True, "is 1 (int), and should be True (bool)"),
    "tensor": (
        lambda x: torch.tensor([[0.0, NAN], [0.0, x]]),
        "the first at [1, 1]: it is 1.0, and should be 2.0",
    ),
    "tensor with gaps": (lambda x: torch.full((4, 6), x)[::2, ::3].t(), "4 of 4 values differ, the first at [0, 0]"),
    "bfloat16": (lambda x: torch.tensor([x, NAN]).bfloat16(), "1 of 2 values differ, the first at [0]"),
    "requires grad": (lambda x: torch.tensor([float(x)], requires_grad=True) * 1, "1 of 1 values differ"),
    "sparse": (lambda x: torch.eye(3).mul(x).to_sparse(), "3 of 9 values differ"),
    "sparse csr": (lambda x: torch.eye(3).mul(x).to_sparse_csr(), "3 of 9 values differ"),
    "shape": (lambda x: torch.zeros(2, x), "its shape is torch.Size([2, 1]), and should be torch.Size([2, 2])"),
    "dtype": (lambda x: torch.zeros(2, dtype=[None, torch.int32, torch.int64][x]), "its dtype is torch.int32"),
    "array": (lambda x: np.array([[NAN, x]]).T, "1 of 2 values differ, the first at [1, 0]"),
    "array, structured": (structured, "is array("),
    "array of texts": (lambda x: np.array(["a", f"b{x}"]), "the first at [1]: it is b1, and should be b2"),
    "array of objects": (lambda x: np.array([None, "a", torch.full((2,), x)], object), "is array([None, 'a', tensor("),
    "list": (lambda x: [0, [NAN, x]], "[1][1]: is 1 (int), and should be 2 (int)"),
    "longer list": (lambda x: [0] * x, "is ('list', 1) (tuple), and should be ('list', 2) (tuple)"),
    "queue": (lambda x: deque([NAN, x]), "[1]: is 1 (int)"),
    "named tuple": (lambda x: Point(NAN, Point(x)), "[1][0]: is 1 (int)"),
    "dict": (lambda x: {"a": NAN, "b": {3: torch.tensor([x])}}, "['b'][3]: 1 of 1 values differ"),
    "dict with another key": (lambda x: {x: 0}, "has [1], and should have [2]"),
    "dict by truth": (lambda x: {[0, 1, True][x]: 0}, "has [1], and should have [True]"),
    "ordered dict": (lambda x: OrderedDict(a=NAN, b=x), "['b']: is 1 (int)"),
    "mapping of one's own": (lambda x: UserDict(a=torch.tensor([x])), "['a']: 1 of 1 values differ"),
    "set": (lambda x: {"a", (1, x)}, "has {(1, 1)}, and should have {(1, 2)}"),
    "dataclass": (lambda x: Sample([NAN, torch.full((3,), x)]), ".image[1]: 3 of 3 values differ"),
    "object": (lambda x: Plain(name="n", x=[torch.tensor([NAN, x])]), "is <tests.testing.test_comparison.Plain object"),
    "date": (lambda x: datetime.date(2024, 1, x), "is datetime.date(2024, 1, 1)"),
    "enumeration": (Colour, "is <Colour.RED: 1>"),
    "function": (lambda x: [len, print][x - 1], "is <built-in function len>"),
    "picture": (lambda x: PIL.Image.new("RGB", (4, 4), (x, 0, 0)), "is <PIL.Image.Image"),
    "frame": (lambda x: pd.DataFrame({"a": [1.0, NAN], "b": [x, 3]}), "is      a  b"),
    "random state": (np.random.default_rng, "is Generator(PCG64)"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_the_same_and_what_is_not(kind: str) -> None:
    """Made twice; there and back by pickle; and of other numbers: for comparisons and for fingerprints."""
    make, words = KINDS[kind]
    assert difference([make(1)], [make(1)]) is None
    assert fingerprint([make(1), 0]) == fingerprint([make(1), 0]) != fingerprint([make(2), 0])
    assert words in str(difference(make(1), make(2)))
    assert str(difference([0, make(1)], [0, make(2)])).startswith(("[1]", "it has [1]"))
    if kind != "requires grad":  # pickle refuses what was computed
        again = pickle.loads(pickle.dumps(make(1)))
        assert difference(again, make(1)) is None
        assert fingerprint([again]) == fingerprint([make(1)])


def test_what_is_not_part_of_a_value() -> None:
    """Strides, the order of keys, fields that are not for comparison, whether two parts are one object."""
    text = "".join(["te", "xt"])
    for one, other in [
        (torch.ones(2, 3), torch.ones(3, 2).t()),
        (np.arange(6).reshape(2, 3), np.asfortranarray(np.arange(6).reshape(2, 3))),
        ({"a": 1, "b": NAN}, {"b": NAN, "a": 1}),
        (MappingProxyType({"a": 1, "b": 2}), MappingProxyType({"b": 2, "a": 1})),
        ({"a", "b", 1}, {1, "b", "a"}),
        (Sample(1, 2, when=3), Sample(1, 2, when=4)),
        (Plain(a=text, b=text), Plain(a=text, b="".join(["te", "xt"]))),
        (torch.stack([torch.arange(9)] * 2)[1], torch.arange(9)),
        (torch.zeros(0, 3), torch.zeros(0, 3)),
    ]:
        assert same(one, other)
        assert fingerprint([one]) == fingerprint([other])


def test_zeros_with_another_sign_are_equal_and_have_other_fingerprints() -> None:
    """Comparisons are of values, fingerprints of bits."""
    assert same([0.0, torch.zeros(2)], [-0.0, -torch.zeros(2)])
    assert fingerprint([0.0]) != fingerprint([-0.0])
    assert fingerprint([torch.zeros(2)]) != fingerprint([-torch.zeros(2)])


def test_equal_is_not_the_same_of_other_types() -> None:
    """Numbers, containers, and tensors of other layouts."""
    for one, other in [
        (1, 1.0),
        ([1], (1,)),
        (Point(1), (1, 0)),
        (np.float32(1), np.float64(1)),
        (torch.eye(2), torch.eye(2).to_sparse()),
        (torch.ones(2), np.ones(2, np.float32)),
    ]:
        assert not same(one, other)
        assert fingerprint([one]) != fingerprint([other])


def test_what_cannot_be_compared() -> None:
    """Nothing says whether they are equal, and they cannot be pickled; the same object is the same all the same."""
    lock = threading.Lock()
    assert same([lock], [lock])
    ring: list[Any] = [1]
    ring.append(ring)
    for make in (threading.Lock, lambda: (n for n in range(3)), lambda: ring):
        with pytest.raises((TypeError, RecursionError)):
            difference([make()], [copy.copy(make()) if make() is ring else make()])
        with pytest.raises((TypeError, RecursionError)):
            fingerprint([make()])


def test_a_nan_hides_no_other_field_and_bits_decide_what_has_no_comparison() -> None:
    """Records of numpy with a NaN in one field; dtypes that torch does not compare; complex numbers, texts, times."""
    record = np.dtype([("a", "f8"), ("b", "i4")])
    assert not same(np.array([(NAN, 1)], record), np.array([(NAN, 2)], record))
    assert same(np.array([(NAN, 1)], record), np.array([(NAN, 1)], record))
    assert same(torch.ones(3).to(torch.float8_e4m3fn), torch.ones(3).to(torch.float8_e4m3fn))
    assert not same(torch.ones(3).to(torch.float8_e4m3fn), torch.zeros(3).to(torch.float8_e4m3fn))
    assert not same(torch.ones(2, dtype=torch.complex64), torch.full((2,), 1j))
    assert not same(np.zeros(2, ">f4"), np.zeros(2, "<f4"))
    assert same(np.datetime64("NaT", "s"), np.datetime64("NaT", "s"))
    assert same([np.float32(NAN), -NAN], [np.float32(NAN), NAN])
    assert not same(NAN, 0.0)


@pytest.mark.slow  # a fresh interpreter
def test_a_comparison_imports_no_sympy() -> None:
    """Which takes 2 s, for a tensor that is not distributed."""
    script = (
        "import sys, torch\nfrom asyncloader.testing.comparison import difference\n"
        "assert difference(torch.ones(2), torch.zeros(2)) and 'sympy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], timeout=60, check=True)


def test_long_parts_are_shown_in_part() -> None:
    """Their beginnings."""
    words = str(difference("a" * 5000, "b" * 5000))
    assert words == f"it: is '{'a' * 399}... (str), and should be '{'b' * 399}... (str)"


def test_a_fingerprint_is_of_all_batches_in_order_whoever_makes_them() -> None:
    """Of any iterator, and whatever order a set is in: here its members were added in the one and the other."""

    def batches() -> Iterator[Any]:
        return iter([{"image": torch.arange(6.0).reshape(2, 3), "tags": {"a", "b", "c"}}, [1, "b"]])

    one, *others = batches()
    assert fingerprint(batches()) != fingerprint([*others, one])
    loaders = [DataLoader(range(20), 4, num_workers=workers) for workers in (0, 2)]
    assert len({*map(fingerprint, loaders), fingerprint(torch.utils.data.DataLoader(range(20), 4))}) == 1  # type: ignore[arg-type]
    assert fingerprint(loaders[0]) != fingerprint(DataLoader(range(20), 5))
    assert [*{8, 0}] != [*{0, 8}]  # of one hash in a small table
    assert fingerprint([{8, 0}]) == fingerprint([{0, 8}])


@pytest.mark.slow  # a fresh interpreter, which imports torch
def test_a_fingerprint_is_the_same_in_a_process_with_another_seed_for_hashes() -> None:
    """Of names in a set."""
    batches = [{"image": torch.arange(6.0).reshape(2, 3), "tags": {"a", "b", "c"}}, [1, "b"]]
    script = (
        "import torch\nfrom asyncloader.testing import fingerprint\n"
        "print(fingerprint([{'tags': {'c', 'a', 'b'}, 'image': torch.arange(6.0).reshape(2, 3)}, [1, 'b']]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == fingerprint(batches)


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
    """Makes samples with parts of many kinds."""
    return {
        "nan": [NAN, torch.tensor([index, NAN]), np.array([NAN])],
        "dataclass": Sample(torch.arange(3) + index),
        "sparse": torch.eye(3).to_sparse(),
        "object": Plain(x=index, tensor=torch.arange(4)),
        "objects": np.array([None, "a", torch.zeros(2)], dtype=object),
        "set": {"nan", index},
    }


def test_samples_of_every_kind_are_reproducible_and_resumable() -> None:
    """Those that are made elsewhere too."""
    assert_reproducible(lambda: Made(everything), num_workers=(0, 1), epochs=1, scheduling=["static"])
    assert_resumable(lambda: DataLoader(Made(everything), 4, num_workers=1, collate_fn=list))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_other_loaders_with_a_state_are_checked(num_workers: int) -> None:
    """torchdata's: it resumes a shuffled epoch, and one whose dataset keeps no state of its draws does not."""
    data: Any = range(10)
    options: Any = {"num_workers": num_workers, "multiprocessing_context": "fork" if num_workers else None}
    assert_resumable(lambda: StatefulDataLoader(data, 3, shuffle=True, **options))

    class Forgets(Made):
        asked = 0

        def __getitem__(self, index: int) -> Any:
            self.asked += 1
            return self.asked

    with pytest.raises(
        AssertionError, match=r"^The state .*: batch [12] is not the same: it: [123] of [123] values differ"
    ):
        assert_resumable(lambda: StatefulDataLoader(Forgets(int), 2, **options))


def test_the_part_that_differs_is_told() -> None:
    """With what was found and what should be."""

    def of_its_worker(index: int) -> Any:
        is_here = torch.utils.data.get_worker_info() is None
        return index, Sample({"x": torch.tensor([1.0, 0.0 if is_here or index < 3 else 0.5])})

    words = r"With num_workers=1, .*, epoch 0: sample 4 is not the same: \[1\]\.image\['x'\]: 1 of 2 values differ"
    with pytest.raises(AssertionError, match=words):
        assert_reproducible(lambda: Made(of_its_worker), num_workers=(0, 1), epochs=1, scheduling=["static"])
    with pytest.raises(
        AssertionError, match=r"epoch 0: sample 1 is not the same: it: is 1 \(int\), and should be 0 \(int\)\.$"
    ):
        seen = itertools.count()
        assert_reproducible(lambda: [next(seen)], num_workers=[0], batch_sizes=[1, 2], epochs=1, scheduling=["static"])


def test_the_part_that_cannot_be_compared_is_told() -> None:
    """As an assertion that failed, not as an error of ours."""
    options: dict[str, Any] = {"num_workers": [0], "epochs": 1, "scheduling": ["static"]}
    with pytest.raises(AssertionError, match=r"epoch 0: sample 1 cannot be compared: cannot pickle '_thread.lock'"):
        assert_reproducible(lambda: Made(lambda index: [Plain(lock=threading.Lock())]), **options)

    def deep(index: int) -> Any:
        made: list[Any] = []
        for _ in range(5000):
            made = [made]
        return made

    with pytest.raises(AssertionError, match="sample 1 cannot be compared: maximum recursion depth"):
        assert_reproducible(lambda: Made(deep), **options)
