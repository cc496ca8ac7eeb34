"""SharedList and SharedDict: what goes in comes out, once in memory, in whatever process."""

from __future__ import annotations

import copy
import dataclasses
import math
import multiprocessing
import os
import pickle
import shutil
import threading
import tracemalloc
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.utils.data
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncloader import ConfigurationError
from asyncloader.datasets import CachedDataset, SharedDict, SharedList
from asyncloader.datasets.memory_file import by_value
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
def test_a_view_is_no_more_than_it_shows(name: str) -> None:
    """Of tensors that are pickled too, in rows and in objects, as rows and as samples that are kept."""
    whole = VIEWS[name]
    for rows in (
        [row.detach().requires_grad_(row.requires_grad) for row in whole],
        [Item("a", [row]) for row in whole],
    ):
        shared, cached = SharedList(rows), CachedDataset(rows, "ram")
        made_first = cached[1]
        for found in (shared[1], cached[1]):
            assert found is not made_first
            there = found.parts[0] if isinstance(found, Item) else found
            assert (there.dtype, there.shape, there.requires_grad) == (whole.dtype, (100,), whole.requires_grad)
            assert not there.to(torch.complex64).any()
            there.detach().fill_(1)
        size = 100 * whole.itemsize
        assert shared.nbytes / len(rows) < size + 500
        assert cached.usage().bytes < size + 500


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
    """A clear error for each of the ways, and the kernel refuses it as well."""
    shared: Any = SharedList([1, 2])
    with pytest.raises(AttributeError, match="no attribute 'append'"):
        shared.append(3)
    with pytest.raises(TypeError, match="does not support item assignment"):
        shared[0] = 1
    with pytest.raises(AttributeError, match="no attribute 'rows'"):
        _ = shared.rows
    with pytest.raises(PermissionError):
        os.pwrite(inside.descriptor(shared), b"x", 100)
    with pytest.raises(TypeError):
        inside.memory(shared)[100] = 1


def test_the_rest_of_a_sequence() -> None:
    """`in`, `index`, `count`, `reversed`, copies, a text."""
    shared = SharedList([5, 6, 7, 6])
    assert 6 in shared
    assert 8 not in shared
    assert (shared.index(6), shared.count(6), list(reversed(shared))) == (1, 2, [6, 7, 6, 5])
    assert copy.copy(shared) is copy.deepcopy(shared) is shared
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
    """60 MB of rows from a generator, with less than 40 MB at any time."""
    tracemalloc.start()
    try:
        shared = SharedList(bytes([number % 256]) * 20_000 for number in range(3000))
        assert tracemalloc.get_traced_memory()[1] < 40e6
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


def test_a_handle_is_small() -> None:
    """Less than 1 kB, of slices too."""
    shared = SharedList(ROWS)
    chosen = shared[::2]
    for one in (shared, shared[10:], chosen, chosen[::-1], SharedDict({1: 2})):
        assert len(pickle.dumps(one)) < 1000
    again = pickle.loads(pickle.dumps(chosen))
    assert list(again) == ROWS[::2]
    assert inside.descriptor(again) != inside.descriptor(shared)
    os.fstat(inside.descriptor(again))
    descriptor = inside.descriptor(again)
    del again
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def read_through(rows: Any, into: Any) -> None:
    into.put((list(rows), len(pickle.dumps(rows))))


@pytest.mark.covering(1)
@pytest.mark.parametrize("loader_name", ["torch", "ours"])
def test_workers_read_it(start_method: str, loader_name: str) -> None:
    """With forked, forkserver and spawned workers, of torch's loader and of ours."""
    if loader_name == "torch":
        loader: Any = torch.utils.data.DataLoader
    else:
        from asyncloader import DataLoader as loader
    shared = SharedList(ROWS)[:100][::-1]
    made = loader(Rows(shared), batch_size=32, num_workers=1, multiprocessing_context=start_method)
    batches = list(made)
    assert [path for paths, _ in batches for path in paths] == [row["path"] for row in ROWS[99::-1]]
    assert torch.cat([labels for _, labels in batches]).tolist() == [row["label"] for row in ROWS[99::-1]]


def test_a_process_of_ones_own(start_method: str) -> None:
    """As an argument of a process (the descriptor goes along), and through a queue (it is opened when it arrives)."""
    context = multiprocessing.get_context(start_method)
    shared, answers = SharedList(ROWS), context.SimpleQueue()
    child = context.Process(target=read_through, args=(shared[5:50], answers))
    child.start()
    rows, size = answers.get()
    child.join()
    child.close()
    answers.close()
    assert rows == ROWS[5:50]
    assert size < 1000


RANKS = """
    import os, pickle, subprocess, sys
    from asyncloader.datasets import SharedDict, SharedList

    if len(sys.argv) > 1:  # another process, that has nothing of the first but the pickle
        rows, names = pickle.load(sys.stdin.buffer)
        print(rows[999]["name"], names["12"], len(rows))
        sys.exit()
    rows = SharedList({"name": str(number)} for number in range(1000))
    names = SharedDict({str(number): number for number in range(1000)})
    data = pickle.dumps((rows, names))
    command = [sys.executable, __file__, "again"]
    print(subprocess.run(command, input=data, capture_output=True, check=True).stdout.decode(), end="")
    del rows, names
    print(subprocess.run(command, input=data, capture_output=True).stderr.decode().splitlines()[-1])
"""


@pytest.mark.slow  # fresh programs; a fork server's workers are no children of the list's maker either
def test_processes_that_are_given_a_pickle(run: Callable[..., Program]) -> None:
    """Ranks are no children of one another: the handle does while the list lives; later the error says why not."""
    done = run(RANKS)
    assert done.returncode == 0, done.explain("")
    first, second = done.out.splitlines()
    assert first == "999 12 1000"
    assert "shared memory is not there" in second
    assert "has let go of it" in second


def test_a_handle_is_not_taken_for_that_of_another_file() -> None:
    """A number that another file has got since, or something that is no file, is told by the token."""
    shared = SharedList([1, 2, 3])
    other = SharedList([4])
    data = pickle.dumps(shared)
    number = inside.descriptor(shared)
    del shared
    os.dup2(inside.descriptor(other), number)
    with pytest.raises(FileNotFoundError, match="shared memory is not there"):
        pickle.loads(data)
    reading, writing = os.pipe()
    os.dup2(reading, number)
    with pytest.raises(FileNotFoundError, match="shared memory is not there"):
        pickle.loads(data)
    for fd in (reading, writing, number):
        os.close(fd)


PSS = """
    import multiprocessing, os, re, sys
    from asyncloader.datasets import SharedList

    def pss():
        total = 0
        for part in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", open("/proc/self/smaps").read()):
            if "memfd:asyncloader-shared" in part.split("\\n")[0]:
                total += int(re.search(r"Pss: +(\\d+)", part)[1]) * 1024
        return total

    def look(rows, all_have_read, all_have_looked, answers):
        for _ in rows: pass
        all_have_read.wait()
        answers.put(pss())
        all_have_looked.wait()

    if __name__ == "__main__":
        context = multiprocessing.get_context(sys.argv[1])
        rows = SharedList(os.urandom(1000) for _ in range(20_000))
        answers, barriers = context.SimpleQueue(), [context.Barrier(3), context.Barrier(3)]
        children = [context.Process(target=look, args=(rows, *barriers, answers)) for _ in range(2)]
        for child in children: child.start()
        look(rows, *barriers, answers)
        for child in children: child.join()
        print(sum(answers.get() for _ in range(3)) / rows.nbytes)
"""


def test_it_is_in_memory_once(run: Callable[..., Program], start_method: str) -> None:
    """Proportional set size of the list in three processes that have read all of it: its size, once."""
    done = run(PSS, start_method)
    assert done.returncode == 0, done.explain("")
    assert 0.9 < float(done.out) < 1.1


KILLED = """
    import os, signal
    from asyncloader.datasets import SharedList

    reading, writing = os.pipe()
    if not os.fork():
        rows, creator = SharedList(range(1000)), os.getpid()
        if os.fork():
            os.kill(creator, signal.SIGKILL)
        while os.getppid() == creator: pass
        os.write(writing, b"%d" % sum(rows))
        os._exit(0)
    print(os.read(reading, 100), os.WTERMSIG(os.wait()[1]))
"""


def test_nothing_is_left_of_who_is_killed(run: Callable[..., Program]) -> None:
    """A child reads on after the list's creator was killed; there is no name in /dev/shm, before or after."""
    names = set(os.listdir("/dev/shm"))
    assert run(KILLED).out == "b'499500' 9\n"
    assert not {name for name in set(os.listdir("/dev/shm")) - names if "asyncloader" in name}


# ---- SharedDict ----

KEYS: list[Any] = [
    "a",
    "é",
    "",
    "\ud800",
    b"a",
    b"",
    0,
    -1,
    1 << 80,
    0.5,
    -math.inf,
    None,
    (),
    ("a", 1),
    ("a", (1, b"x")),
]


def test_items_come_back_in_order() -> None:
    """Keys of all sorts; whatever equals a key finds it; everything a mapping does."""
    there = {key: [number] for number, key in enumerate(KEYS)}
    shared = SharedDict(there)
    assert dict(shared) == there
    assert list(shared) == list(there)
    assert list(shared.items()) == list(there.items())
    assert list(shared.values()) == list(there.values())
    assert [shared[key] for key in KEYS] == [[number] for number in range(len(KEYS))]
    assert shared[False] == shared[0.0] == shared[np.int8(0)] == shared[np.float32(0)] == there[0]
    assert shared[np.str_("a")] == there["a"]
    assert ("b" in shared, 0.25 in shared, frozenset() in shared, shared.get(7, 8)) == (False, False, False, 8)
    assert (["a"] in shared.values(), ("a", [0]) in shared.items(), len(shared.keys())) == (False, True, len(KEYS))
    with pytest.raises(KeyError, match="'nobody'"):
        shared["nobody"]
    with pytest.raises(KeyError):
        shared[[]]  # type: ignore[index]
    assert repr(shared).startswith("<SharedDict of 15 items")
    assert pickle.loads(pickle.dumps(shared))["a"] == [0]
    assert (copy.deepcopy(shared)["a"], copy.deepcopy(shared).nbytes) == ([0], shared.nbytes)


@given(st.dictionaries(st.integers() | st.text() | st.tuples(st.booleans(), st.floats(allow_nan=False)), NESTED))
@settings(max_examples=30, deadline=None)
def test_any_items_come_back(items: dict[Any, Any]) -> None:
    """Keys and values in any mixture."""
    shared = SharedDict(items)
    assert alike(dict(shared.items()), items)
    assert all(alike(shared[key], value) for key, value in items.items())


@pytest.mark.parametrize("count", [0, 1, 2, 3, 50_000])
def test_all_of_many_keys_are_found(count: int) -> None:
    """All are found, and nothing else."""
    shared = SharedDict((number, number + 1) for number in range(count))
    assert all(shared[number] == number + 1 for number in range(count))
    assert not any(number in shared for number in (-1, count, count + 1))


def test_keys_that_collide() -> None:
    """Keys of one hash are told apart, and a key that comes twice is an error."""
    seen: dict[int, str] = {}
    names = map(str, np.random.default_rng(0).integers(1 << 62, size=1 << 20))
    codes = ((name, zlib.crc32(b"s" + name.encode())) for name in names)
    first, second = next((seen[code], name) for name, code in codes if seen.setdefault(code, name) != name)
    shared = SharedDict({first: 1, second: 2})
    assert (shared[first], shared[second], len(shared)) == (1, 2, 2)
    with pytest.raises(ConfigurationError, match="comes twice, as items 0 and 2"):
        SharedDict([(first, 1), (second, 2), (first, 3)])


def test_numbers_of_numpy_are_no_tuples() -> None:
    """They compare with each item of a tuple that is in their bucket, and are keys only where a dict finds them."""
    for tuples in (
        [(number,) for number in range(1000)],
        [(number, 2) for number in range(1000)],
        [((number,),) for number in range(1000)],
    ):
        there = dict.fromkeys(tuples, "a tuple")
        shared = SharedDict(there)
        keys = [
            *map(np.int64, range(1000)),
            *map(np.float64, range(1000)),
            *((np.int64(number),) for number in range(1000)),
        ]
        assert [key in shared for key in keys] == [key in there for key in keys]
        assert all(key in shared for key in there)


def test_dicts_that_cannot_be_shared_are_refused() -> None:
    """Keys of other types, and changes."""
    with pytest.raises(ConfigurationError, match=r"but not .*frozenset"):
        SharedDict({frozenset(): 1})
    with pytest.raises(ConfigurationError, match=r"but not .*frozenset"):
        SharedDict({("a", frozenset()): 1})
    shared: Any = SharedDict({1: 2})
    with pytest.raises(TypeError, match="does not support item assignment"):
        shared[1] = 2
    with pytest.raises(AttributeError, match="no attribute 'update'"):
        shared.update({})


ELSEWHERE = """
    import pickle, sys
    from multiprocessing import get_context

    def rows(shared):
        return [shared[number] for number in range(3)]

    def names(shared):
        return [shared[name] for name in ("a", "b")]

    if __name__ == "__main__":
        data, buffers = pickle.load(open(sys.argv[1], "rb"))
        part, captions, cached = pickle.loads(data, buffers=buffers)
        print(rows(part), names(captions), part.nbytes == len(buffers[0]))
        with get_context("spawn").Pool(1) as pool:  # and on to a process of that machine
            print(pool.apply(rows, (part,)), pool.apply(names, (captions,)))
        print(cached[3], cached[3], cached.usage().samples)
"""


@pytest.mark.parametrize("where", ["ram", "folder"])
def test_other_machines_are_given_the_content(run: Callable[..., Program], tmp_path: Path, where: str) -> None:
    """By value, if asked: what was shared is read out of the buffers that came; a cache begins anew there."""
    rows: SharedList[Any] = SharedList({"number": number} for number in range(0, 100, 2))
    options: Any = {"fingerprint": "v1"}
    cached = CachedDataset(range(10), "ram" if where == "ram" else tmp_path / "cache", **options)  # type: ignore[var-annotated]
    buffers: list[pickle.PickleBuffer] = []
    with by_value():
        data = pickle.dumps(
            (rows[10:], SharedDict({"a": [1], "b": [2]}), cached), protocol=5, buffer_callback=buffers.append
        )
    assert (len(buffers), len(data) < 2000) == (2, True)
    assert pickle.loads(pickle.dumps(rows))[3] == rows[3]  # by its handle again
    sent = tmp_path / "sent"
    sent.write_bytes(pickle.dumps((data, [bytes(buffer) for buffer in buffers])))
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    done = run(ELSEWHERE, sent)
    assert done.returncode == 0, done.explain("")
    found, again, kept = done.out.splitlines()
    expected = "[{'number': 20}, {'number': 22}, {'number': 24}] [[1], [2]]"
    assert (found, again, kept) == (f"{expected} True", expected, "3 3 1")
