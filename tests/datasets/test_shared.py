"""SharedList: what goes in comes out, once in memory, in whatever process."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import threading
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.utils.data
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncloader import DataLoader
from asyncloader.datasets import CachedDataset, SharedList
from tests.support import inside
from tests.support.effort import examples
from tests.support.nursery import Program

ROWS = [{"path": f"{number:05}.jpg", "label": number % 7, "box": [number, 0.5, 2.0]} for number in range(3000)]


class Point(NamedTuple):
    x: int
    y: int


@dataclasses.dataclass
class Item:
    name: str
    parts: list[Any]


def alike(one: Any, other: Any) -> bool:
    """Whether two values are equal and of the same types, all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, (np.ndarray, np.generic)):
        return one.dtype == other.dtype and one.shape == other.shape and one.tolist() == other.tolist()
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, float):
        return math.copysign(1, one) == math.copysign(1, other) and (one == other or (one != one and other != other))
    return bool(one == other)


OF_ONE_FORM: dict[str, Sequence[Any]] = {
    "dicts": ROWS,
    "ints": [0, -1, 127, 128, -(1 << 63), (1 << 63) - 1],
    "large ints": [1, 1 << 70],
    "bools": [True, False],
    "ints and bools": [1, True, 0, False],
    "floats": [0.0, -0.0, math.inf, math.nan, 1e-300],
    "texts": ["", "a", "é", "𝄞", "\ud800", "x" * 1000],
    "ascii": ["", "a", "bc"],
    "bytes": [b"", b"\0", b"abc"],
    "none": [None, None],
    "optional": [None, "a", None, "b", "c"],
    "tuples": [(1, "a", 0.5), (2, "b", 1.5)],
    "pairs of ints": [(1, 2), (3, 4)],
    "large pairs": [(1, 1 << 80), (3, 4)],
    "lists of many lengths": [[], [1.5], [1.5, 2.5, 3.5]],
    "lists of texts": [["a"], [], ["bc", "d"]],
    "mixed lists": [[1, 2.0], [3], []],
    "empty": [(), (), ()],
    "empty lists": [[], []],
    "dicts in lists": [[{"a": 1}], [], [{"a": 2}, {"a": 3}]],
    "keys in another order": [{"a": 1, "b": 2}, {"b": 2, "a": 1}],
    "no keys": [{}, {}],
    "keys that are no texts": [{1: 2}, {1: 3}],
    "arrays": [np.arange(6, dtype=np.float32).reshape(2, 3) + number for number in range(4)],
    "arrays of many lengths": [np.arange(number * 2, dtype=np.int16).reshape(number, 2) for number in range(4)],
    "arrays without dimensions": [np.array(1.5), np.array(2.5)],
    "arrays of two types": [np.zeros(2), np.zeros(2, np.int8)],
    "arrays in Fortran order": [np.asfortranarray(np.arange(6).reshape(2, 3))] * 2,
    "complex arrays": [np.array([1j, 2])] * 2,
    "arrays of texts": [np.array(["a", "bc"])] * 2,
    "big-endian arrays": [np.arange(3, dtype=">i4")] * 2,
    "arrays of objects": [np.array([1, "a", None], object)] * 2,
    "structured arrays": [np.zeros(2, [("a", "i4"), ("b", "f8")])] * 2,
    "dates": [np.array(["2020-01-01"], "M8[D]")] * 2,
    "numbers of numpy": [np.float32(1.5), np.float32(2.5)],
    "durations": [np.timedelta64(1, "ms"), np.timedelta64(1, "s")],
    "numbers of two types": [np.float32(1.5), np.int8(2)],
    "tensors": [torch.arange(3) + number for number in range(3)],
    "tensors of many lengths": [torch.ones(number, 2) for number in range(3)],
    "bfloat16": [torch.ones(2, dtype=torch.bfloat16)] * 2,
    "named tuples": [Point(1, 2), Point(3, 4)],
    "objects": [Item("a", [1]), Item("b", [])],
    "nested": [{"a": {"b": [(number, {"c": [str(number)] * number})]}} for number in range(5)],
    "deep": [[[[[[[[[[1]]]]]]]]]] * 3,
    "all sorts": [1, "a", None, ROWS[0], [1], {1}, frozenset({2}), range(3)],
}

SIMPLE = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
NESTED = st.recursive(
    SIMPLE,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=8,
)


class Rows(torch.utils.data.Dataset[Any]):
    """A dataset that keeps rows, and tells what process made a sample of one."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[str, int]:
        return self.rows[index]["path"], self.rows[index]["label"]


# ---- what goes in comes out ----


@pytest.mark.parametrize("name", OF_ONE_FORM)
def test_rows_come_back_as_they_were(name: str) -> None:
    """Whatever the form of the rows: equal, and of the same types."""
    rows = OF_ONE_FORM[name]
    shared = SharedList(rows)
    assert len(shared) == len(rows)
    assert all(map(alike, shared, rows))
    assert alike(shared[-1], rows[-1])


@given(st.lists(NESTED, max_size=12) | NESTED.map(lambda row: [row] * 3))
@settings(max_examples=examples(100), deadline=None)
def test_any_rows_come_back(rows: list[Any]) -> None:
    """Values nested in any way."""
    assert all(map(alike, SharedList(rows), rows))


def test_rows_of_several_forms() -> None:
    """Rows of another form, in the middle of a long list, are as right as the others."""
    rows: list[Any] = [*ROWS, *range(5000), None, *ROWS, "end"]
    shared = SharedList(iter(rows))
    assert list(shared) == rows
    assert [shared[at] for at in (0, 2999, 3000, 7999, 8000, -1)] == [
        rows[at] for at in (0, 2999, 3000, 7999, 8000, -1)
    ]


def test_rows_are_the_readers_own() -> None:
    """To change a row, an array in it included, changes nothing for the next reader."""
    shared = SharedList([{"a": [1], "array": np.zeros(2)}])
    row = shared[0]
    row["a"].append(2)
    row["array"][:] = 1
    assert alike(shared[0], {"a": [1], "array": np.zeros(2)})


VIEWS = {
    "bfloat16": torch.zeros(400, 100, dtype=torch.bfloat16),
    "float8": torch.zeros(400, 100).to(torch.float8_e5m2),
    "with gradients": torch.zeros(400, 100, requires_grad=True),
    "conjugate": torch.zeros(400, 100, dtype=torch.complex64).conj(),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_is_no_more_than_it_shows(name: str, tmp_path: Path) -> None:
    """Of tensors that are pickled too, in rows and in objects, as rows and as samples that are kept."""
    whole = VIEWS[name]
    for rows in (
        [row.detach().requires_grad_(row.requires_grad) for row in whole],
        [Item("a", [row]) for row in whole],
    ):
        folder = tmp_path / type(rows[0]).__name__
        shared, cached = SharedList(rows), CachedDataset(rows, folder, fingerprint="v1")
        made_first = cached[1]
        for found in (shared[1], cached[1]):
            assert found is not made_first
            there = found.parts[0] if isinstance(found, Item) else found
            assert (there.dtype, there.shape, there.requires_grad) == (whole.dtype, (100,), whole.requires_grad)
            assert not there.to(torch.complex64).any()
            there.detach().fill_(1)
        size = 100 * whole.itemsize
        assert shared.nbytes / len(rows) < size + 500
        (kept,) = filter(Path.is_file, folder.rglob("*"))
        assert kept.stat().st_size < size + 500


def test_tensors_inside_objects() -> None:
    """Of every dtype, without dimensions, without items, in any order; what Python code has hung on one stays on it."""
    tagged = torch.ones(3, dtype=torch.bfloat16)
    tagged.tag = "a"  # type: ignore[attr-defined]
    tensors = [
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.tensor(1.5, requires_grad=True),
        torch.zeros(0, 3, dtype=torch.bfloat16),
        torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).T,
        torch.arange(6.0)[::2],
        torch.arange(3) * 1j,
        (torch.arange(3) * 1j).conj(),
        torch._efficientzerotensor((3,)),
        torch.ones(3, dtype=torch.bool),
        torch.eye(2).to_sparse(),
        tagged,
    ]
    found = SharedList([Item("a", [tensor]) for tensor in tensors])
    for item, tensor in zip(found, tensors, strict=True):
        (there,) = item.parts
        assert (there.dtype, there.shape, there.layout) == (tensor.dtype, tensor.shape, tensor.layout)
        assert there.requires_grad == tensor.requires_grad
        assert torch.equal(there.to_dense(), tensor.to_dense())
    assert found[-1].parts[0].tag == "a"


def test_an_empty_list_is_no_error() -> None:
    """No rows are no error, until one is asked for."""
    shared: SharedList[int] = SharedList([])
    assert (len(shared), list(shared), list(shared[:]), list(pickle.loads(pickle.dumps(shared)))) == (0, [], [], [])
    with pytest.raises(IndexError, match="row 0 of a SharedList of 0 rows"):
        shared[0]


# ---- a list like others, but for changing it ----


@pytest.mark.parametrize("cut", [slice(None), slice(5, 100, 7), slice(None, None, -1), slice(-3, None), slice(9, 2)])
def test_slices_are_lists_over_the_same_memory(cut: slice) -> None:
    """Slices of slices, too; they read what a list's would."""
    shared = SharedList(ROWS)
    part = shared[cut]
    assert isinstance(part, SharedList)
    assert list(part) == ROWS[cut]
    assert list(part[1:-1]) == ROWS[cut][1:-1]
    assert part.nbytes == shared.nbytes
    assert len(part) == len(ROWS[cut])


def test_rows_are_named_by_any_integer() -> None:
    """Python's, numpy's and torch's, also of slices; torch's Subset takes rows by their numbers."""
    shared = SharedList(range(100))
    for kind in (int, np.int8, np.array, torch.tensor):
        assert (shared[kind(4)], shared[10:20][kind(-1)], shared[::-1][kind(0)]) == (4, 19, 99)
    assert list(torch.utils.data.Subset(shared, [3, 99, 3])) == [3, 99, 3]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("index", "error"),
    [
        (100, "row 100 of a SharedList of 100 rows"),
        (-101, "row -101"),
        ([3], "'list' object cannot be interpreted as an integer"),
        (1.0, "'float' object cannot be"),
        ("1", "'str' object cannot be"),
    ],
)
def test_bad_indices_are_errors_that_say_so(index: Any, error: str) -> None:
    """What is no index, or of no row, is an error that says so."""
    with pytest.raises((IndexError, TypeError), match=error):
        SharedList(range(100))[index]


def test_it_cannot_be_changed() -> None:
    """A clear error for each of the ways."""
    shared: Any = SharedList([1, 2])
    with pytest.raises(AttributeError, match="no attribute 'append'"):
        shared.append(3)
    with pytest.raises(TypeError, match="does not support item assignment"):
        shared[0] = 1
    with pytest.raises(AttributeError, match="no attribute 'rows'"):
        _ = shared.rows
    with pytest.raises(ValueError, match="read-only"):
        inside.contents(shared)[0] = 1


def test_the_rest_of_a_sequence() -> None:
    """`in`, `index`, `count`, `reversed`, copies, a text."""
    shared = SharedList([5, 6, 7, 6])
    assert 6 in shared
    assert 8 not in shared
    assert (shared.index(6), shared.count(6), list(reversed(shared))) == (1, 2, [6, 7, 6, 5])
    assert list(copy.copy(shared)) == [5, 6, 7, 6]
    assert copy.deepcopy(shared) is shared
    assert repr(SharedList(ROWS)[:10]).startswith("<SharedList of 10 rows in 0.")


def test_threads_read_at_once() -> None:
    """Each row comes right, whoever else reads at the time."""
    shared, wrong = SharedList(ROWS), []

    def look() -> None:
        wrong.extend(row for row, there in zip(shared, ROWS, strict=True) if row != there)

    threads = [threading.Thread(target=look) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ---- making it ----


def test_little_memory_is_needed_to_make_one() -> None:
    """60 MB of rows from a generator, with little more than that at any time."""
    tracemalloc.start()
    try:
        shared = SharedList(bytes([number % 256]) * 20_000 for number in range(3000))
        assert tracemalloc.get_traced_memory()[1] < 75e6
    finally:
        tracemalloc.stop()
    assert shared.nbytes > 60e6
    assert shared[2999] == bytes([2999 % 256]) * 20_000


def test_what_cannot_be_pickled_is_named() -> None:
    """The error is that of pickle, with a note on which row it was; nothing is left."""
    with pytest.raises((TypeError, AttributeError, pickle.PicklingError)) as caught:
        SharedList([lambda: 1])
    assert "row 0" in caught.value.__notes__[0]

    def broken() -> Any:
        yield 1
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        SharedList(broken())


# ---- other processes ----


@pytest.mark.covering(1)
def test_workers_read_it(start_method: str) -> None:
    """Forked, spawned, and of a fork server, by torch's loader and by ours."""
    shared = SharedList(ROWS)[:100][::-1]
    for loader in (torch.utils.data.DataLoader, DataLoader):
        made: Any = loader(Rows(shared), batch_size=32, num_workers=1, multiprocessing_context=start_method)
        batches = list(made)
        assert [path for paths, _ in batches for path in paths] == [row["path"] for row in ROWS[99::-1]]
        assert torch.cat([labels for _, labels in batches]).tolist() == [row["label"] for row in ROWS[99::-1]]


PRIVATE = """
    import gc, multiprocessing, os, re, sys
    import torch
    from asyncloader import DataLoader
    from asyncloader.datasets import SharedList

    class Rows(torch.utils.data.Dataset):
        def __init__(self, rows): self.rows = rows
        def __len__(self): return 2
        def __getitem__(self, index):
            before = private()
            for _ in self.rows: pass
            return private() - before

    # A fork has copies of the trainer's pages that it has written to. In other workers the rows are in a file in
    # memory, whose pages count as private of whoever is the first to read them.
    KIND = "Private_Dirty" if sys.argv[1] == "fork" else "Anonymous"

    def private():
        text = open("/proc/self/smaps_rollup").read()
        return 1024 * sum(map(int, re.findall(KIND + r": +(\\d+)", text)))

    if __name__ == "__main__":
        rows = SharedList(os.urandom(1000) for _ in range(50_000))
        loader = DataLoader(Rows(rows), num_workers=2, multiprocessing_context=sys.argv[1])
        print(max(int(grown) for grown in loader) / rows.nbytes)
"""


def test_it_is_in_memory_once(run: Callable[..., Program], start_method: str) -> None:
    """Two workers that read all rows have hardly more memory of their own than before."""
    done = run(PRIVATE, start_method)
    assert done.returncode == 0, done.explain("")
    assert float(done.out) < 0.1
