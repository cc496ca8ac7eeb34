"""fingerprint_of: what makes other samples makes another fingerprint; what does not, and what Python adds, does not."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncloader import ConfigurationError
from asyncloader.datasets import ArrayDataset, CachedDataset
from asyncloader.datasets.fingerprint import fingerprint_of
from tests.nursery import Program

IMPORTS = """
import abc, collections, dataclasses, enum, functools, logging, re, threading, typing
import numpy as np, torch
"""


def made_of(body: str, before: str = "class D:") -> Any:
    """Return an object of a class with this body."""
    names: dict[str, Any] = {"__name__": "__main__", "made_of": made_of}
    lines = "".join(f"\n    {line}" for line in ["pass", *body.splitlines()])
    exec(compile(f"{IMPORTS}\n{before}{lines}", "<code>", "exec", dont_inherit=True), names)
    return names["D"]()


CHANGES = {
    "attribute": ("size = {}", 224, 256),
    "array": ("mean = np.arange({})", 3, 4),
    "text": ("__slots__ = ()\nname = '{}'", "a", "b"),
    "partial": ("f = functools.partial(pow, {})", 2, 3),
    "lru_cache": ("@functools.lru_cache\ndef f(self, i): return i + {}", 1, 2),
    "cached_property": ("@functools.cached_property\ndef f(self): return lambda i: i + {}", 1, 2),
    "partialmethod": ("def g(self, k): return k\nf = functools.partialmethod(g, {})", 1, 2),
    "singledispatchmethod": (
        "@functools.singledispatchmethod\ndef f(self, i): return i\nf.register(int, lambda self, i: {})",
        1,
        2,
    ),
    "setter": ("@property\ndef f(self): return 1\n@f.deleter\ndef f(self): return {}", 1, 2),
    "abstract": ("@staticmethod\n@functools.cache\ndef f(i): return {}", 1, 2),
    "nested class": ("class C:\n    k = 1\n    def h(self): return {}", 1, 2),
    "its attribute": ("class C:\n    class B:\n        k = {}\n    b = B()", 1, 2),
    "enum": ("class C(enum.Enum):\n    RED = {}\ncolor = C.RED", 1, 2),
    "regex": ("wanted = re.compile('{}')", "a", "b"),
    "callable": ("class C:\n    def __init__(self, k): self.k = k\n    def __call__(self): pass\nf = C({})", 1, 2),
    "dunder": ("__call__ = functools.partial(pow, {})", 1, 2),
    "after an error": ("def g(self): return {}\na = [g, threading.Lock()]", 1, 2),
    "named partial": ("f = functools.update_wrapper(functools.partial(pow, {}), made_of)", 2, 3),
    "bound method": (
        "class C:\n    @functools.wraps(made_of)\n    def h(self): return 1\nc = C()\nc.k = {}\nf = c.h",
        1,
        2,
    ),
    "decorator": (
        "def g(self): return {}\nlock = threading.Lock()\n"
        "f = functools.partial(lock.acquire)\nfunctools.update_wrapper(f, g)\ndel g",
        1,
        2,
    ),
    "library": ("f = {}", "torch.nn.ReLU", "torch.nn.GELU"),
    "module": ("f = {}", "np", "torch"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_class_has_tells_it_from_others(name: str) -> None:
    """Whatever its entries are made with; the same once more is the same."""
    body, one, other = CHANGES[name]
    first, again, second = (fingerprint_of(made_of(body.format(value))) for value in (one, one, other))
    assert first == again
    assert first != second


ORDINARY = {
    "lock": "lock = threading.Lock()",
    "locks": "locks = {'a': threading.RLock()}",
    "thread locals": "local = threading.local()",
    "open file": "file = open('/dev/null')\nfile.close()",
    "generator": "numbers = (x for x in ())",
    "logger": "log = logging.getLogger('a')",
    "module": "numpy = np",
    "itself": "all = []\nall.append(all)",
    "slots": "__slots__ = ('a', 'b')",
    "types": "kind = torch.Tensor\nother: typing.ClassVar = list[int]\nmore = typing.Optional[int]",
    "functions": "f = torch.add\ng = np.add\nh = len\nk = torch.nn.functional.relu",
    "type variable": "T = typing.TypeVar('T')",
    "jit": "class M(torch.nn.Module):\n    def forward(self, x): return x\nmodel = M()",
    "generics": ("class D(torch.utils.data.Dataset[int], typing.Generic[typing.TypeVar('T')]):"),
    "abstract": "class D(abc.ABC):",
    "protocol": "class D(typing.Protocol[typing.TypeVar('T')]):\n    a: int\nclass D(D):",
    "dataclass": "@dataclasses.dataclass\nclass D:\n    a: int = 1\n    b: set = dataclasses.field(default=())",
    "frozen": "@dataclasses.dataclass(frozen=True, slots=True, order=True)\nclass D:\n    a: int = 1",
    "named tuple": "class D(typing.NamedTuple):\n    a: int = 1",
    "enum": "class E(enum.IntFlag):\n    A = 1\n    B = 2\nclass D:\n    both = E.A | E.B",
    "module of layers": "class D(torch.nn.Module):",
    "iterable": "class D(torch.utils.data.IterDataPipe):",
}


def ordinary(name: str) -> Any:
    text = ORDINARY[name]
    return made_of("", text) if "class D" in text else made_of(text)


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_classes_have_one(name: str) -> None:
    """What cannot be pickled is left out, and has no say in the rest."""
    assert fingerprint_of(ordinary(name)) == fingerprint_of(ordinary(name))


def test_a_lock_hides_nothing_else() -> None:
    """Only the attribute that it is in."""
    body = "a = 1\nlock = threading.Lock()\nz = {}"
    assert fingerprint_of(made_of(body.format(1))) != fingerprint_of(made_of(body.format(2)))


def test_code_of_which_it_cannot_be_said() -> None:
    """A method that holds a lock is an error, as it may do anything with it."""
    body = "def held(lock):\n    def f(self): return lock\n    return {}(f)\nf = held(threading.Lock())"
    for wrapper in ("", "functools.cache", "functools.cached_property"):
        with pytest.raises(ConfigurationError, match="fingerprint="):
            fingerprint_of(made_of(body.format(wrapper)))


def test_an_object_of_the_class_in_the_class() -> None:
    """It has an end, and what it holds counts."""
    singles = []
    for number in (1, 1, 2):
        single = made_of("one = None")
        type(single).one = single
        single.number = number
        singles.append(fingerprint_of(single))
    assert singles[0] == singles[1] != singles[2]


SAME = f"""
    import sys
    sys.path.insert(0, {os.getcwd()!r})
    from asyncloader.datasets.fingerprint import fingerprint_of
    from tests.datasets.test_fingerprint import CHANGES, ORDINARY, made_of, ordinary

    def first(): return second
    second = (lambda function: lambda: function)(first)

    class Held:
        names = {{"a", "b", "c", first, second, len, int}}

    print(fingerprint_of(Held()).hex())
    for body, one, _ in CHANGES.values():
        print(fingerprint_of(made_of(body.format(one))).hex())
    for name in ORDINARY:
        print(fingerprint_of(ordinary(name)).hex())
"""


def test_the_next_run_has_the_same(run: Callable[..., Program]) -> None:
    """Of all of these, with other addresses and other orders of sets."""
    outs = []
    for seed in range(3):
        done = run(SAME, PYTHONHASHSEED=str(seed))
        assert done.returncode == 0, done.explain("")
        outs.append(done.out)
    assert len(set(outs)) == 1


class Rows:
    """Rows of an array."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> float:
        return float(self.rows[index, 0])


def test_parts_of_a_mapped_file(tmp_path: Path) -> None:
    """Are told apart by where they begin, how they lie and what is in them; the same part is the same."""
    path = tmp_path / "rows.npy"
    np.save(path, np.arange(200.0).reshape(100, 2))

    def mapped(mode: Any = "r") -> Any:
        return np.load(path, mmap_mode=mode)

    changed = mapped("c")
    changed[3] = -1
    rows = mapped()
    pairs = [("b", "<f4"), ("a", "<f4")]
    parts = [
        *(rows[:50], rows[50:], rows[::2], rows[1::2], rows[:50][::-1], rows[:2].T, rows[:2]),
        *(rows.view([("a", "<f4"), ("b", "<f4")]), rows.view(pairs)),
        *(mapped("c"), changed, np.asarray(rows[:50]) + 1, np.asarray(rows[50:])),
    ]
    prints = [fingerprint_of(Rows(part)) for part in parts]
    assert len(set(prints)) == len(parts)
    assert fingerprint_of(Rows(mapped()[50:])) == prints[1]
    assert fingerprint_of(Rows(np.asarray(mapped()[:50]))) != prints[-1] == fingerprint_of(Rows(np.asarray(rows[50:])))
    halves = [CachedDataset(Rows(half), tmp_path / "cache") for half in (rows[:50], rows[50:])]
    assert [half[0] for half in halves] == [0.0, 100.0]


def test_a_mapped_file_that_was_written_to(tmp_path: Path) -> None:
    """Is another one, in a dataset of arrays too."""
    path = tmp_path / "rows.npy"
    np.save(path, np.arange(10.0))
    datasets = [kind(np.load(path, mmap_mode="r")[2:]) for kind in (Rows, ArrayDataset)]
    before = [fingerprint_of(dataset) for dataset in datasets]
    assert before == [fingerprint_of(dataset) for dataset in datasets]
    os.utime(path, (1, 1))
    assert all(fingerprint_of(dataset) != old for dataset, old in zip(datasets, before, strict=True))
