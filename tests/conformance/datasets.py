"""Datasets, samplers and the like for the cases: importable, so that workers can be started in any way."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import multiprocessing
import os
import pickle
import random
import select
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Self

import numpy as np
import torch
import torch.utils.data
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

BOUND_S = 20.0  # a case that waits longer than this has failed


class Squares(Dataset):
    """The square of each index, as a Python number."""

    def __init__(self, length: int):
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return index * index


class Echo(Dataset):
    """The key itself, whatever it is."""

    def __init__(self, length: int = 0):
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, key: Any) -> Any:
        return key


class KeyTypes(Echo):
    """The name of the type of the key."""

    def __getitem__(self, key: Any) -> str:
        return type(key).__name__


class Samples(Dataset):
    """Samples made by a function of this module that is given by its name."""

    def __init__(self, maker: str, length: int = 6):
        self.maker = maker
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return SAMPLES[self.maker](index)


class Point(NamedTuple):
    x: torch.Tensor
    label: str


class Card(dict):
    """A mapping of a class of its own."""


class Row(list):
    """A sequence of a class of its own."""


@dataclasses.dataclass
class Record:
    """What default_collate does not know."""

    value: int


SAMPLES = {
    "int": lambda i: i,
    "bool": lambda i: i % 2 == 0,
    "float": lambda i: i / 4,
    "big int": lambda i: i + 2**40,
    "str": lambda i: "s" * i,
    "bytes": lambda i: bytes([i]) * 3,
    "uint8 tensor": lambda i: torch.full((2, 3), i, dtype=torch.uint8),
    "int16 tensor": lambda i: torch.full((2,), i, dtype=torch.int16),
    "bool tensor": lambda i: torch.tensor([i % 2 == 0, True]),
    "half tensor": lambda i: torch.full((3,), i / 2, dtype=torch.float16),
    "bfloat16 tensor": lambda i: torch.full((3,), i / 2, dtype=torch.bfloat16),
    "float64 tensor": lambda i: torch.full((1,), i / 3, dtype=torch.float64),
    "complex tensor": lambda i: torch.full((2,), complex(i, -i)),
    "scalar tensor": lambda i: torch.tensor(i),
    "empty tensor": lambda i: torch.zeros(0, 4),
    "strided tensor": lambda i: torch.arange(12).reshape(3, 4).t() + i,
    "expanded tensor": lambda i: torch.tensor([i]).expand(5),
    "large tensor": lambda i: torch.arange(20_000, dtype=torch.float32) + i,
    "ndarray": lambda i: np.full((2, 2), i, dtype=np.float32),
    "int8 ndarray": lambda i: np.full((2,), i, dtype=np.int8),
    "scalar ndarray": lambda i: np.array(i),
    "numpy number": lambda i: np.float32(i),
    "numpy int": lambda i: np.int64(i),
    "numpy bool": lambda i: np.bool_(i % 2),
    "dict": lambda i: {"image": torch.full((2, 2), float(i)), "label": i, "name": f"n{i}"},
    "nested": lambda i: {"a": [torch.tensor(i), {"b": (i, float(i))}], "c": ("x", (b"y", np.ones(2) * i))},
    "tuple": lambda i: (torch.full((2,), i), i),
    "list": lambda i: [i, i + 1.5],
    "namedtuple": lambda i: Point(torch.full((2,), i), f"p{i}"),
    "own mapping": lambda i: Card(a=i, b=str(i)),
    "own sequence": lambda i: Row([i, i + 1]),
    "ordered dict": lambda i: collections.OrderedDict([("z", i), ("a", -i)]),
    "default dict": lambda i: collections.defaultdict(list, {"k": i}),
    "int keys": lambda i: {1: i, (2, 3): i * 2},
    "empty dict": lambda i: {},
    "empty list": lambda i: [],
    "mixed types, text first": lambda i: i if i % 2 else "odd",
    # What cannot be collated.
    "None": lambda i: None,
    "record": lambda i: Record(i),
    "string ndarray": lambda i: np.array(["a", "b"]),
    "ragged lists": lambda i: list(range(i)),
    "ragged tensors": lambda i: torch.zeros(i),
    "mixed types": lambda i: "even" if i % 2 else i,
    "missing key": lambda i: {"a": i} if i % 2 else {"b": i},
}
UNCOLLATABLE = ("None", "record", "string ndarray", "ragged lists", "ragged tensors", "mixed types", "missing key")
try:
    torch.as_tensor([np.bool_(True)])
except TypeError:  # torch 2.6 beside numpy 2.4
    UNCOLLATABLE += ("numpy bool",)
COLLATABLE = tuple(name for name in SAMPLES if name not in UNCOLLATABLE)


class OfKinds(Dataset):
    """Samples of all kinds, by keys of kind and index."""

    def __len__(self) -> int:
        return 0

    def __getitem__(self, key: tuple[str, int]) -> Any:
        kind, index = key
        return SAMPLES[kind](index)


class Many(Dataset):
    """Fetches a whole batch at once; says so in what it returns."""

    def __init__(self, length: int):
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> NoReturn:
        raise AssertionError("one by one")

    def __getitems__(self, indices: list[int]) -> list[tuple[int, int]]:
        assert type(indices) is list
        return [(index, len(indices)) for index in indices]


class ManyRefused(Squares):
    """Has the name, but not the method, as datasets do that switch it off."""

    __getitems__ = None


class OneByOneSubset(torch.utils.data.Subset):
    """Overrides one of the two, which Subset refuses."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)


class Augmented(Dataset):
    """Draws from each of the three global generators, as augmentations do."""

    def __init__(self, length: int):
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, float, float, torch.Tensor]:
        return index, random.random(), float(np.random.rand()), torch.rand(2)


class Whereabouts(Dataset):
    """Who fetches: the id and the process of the worker."""

    def __init__(self, length: int):
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        info = get_worker_info()
        return index, -1 if info is None else info.id, os.getpid()


class Informed(Dataset):
    """What a worker is told about itself."""

    def __init__(self, length: int):
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        info = get_worker_info()
        if info is None:
            return {"in": "main process"}
        is_plain = not dataclasses.is_dataclass(info)  # in torch 2.6
        return {
            "type": type(info).__name__,
            "fields": sorted(vars(info)) if is_plain else [field.name for field in dataclasses.fields(info)],
            "id": info.id,
            "num_workers": info.num_workers,
            "seed": info.seed,
            "seed is torch's": info.seed == torch.initial_seed(),
            "dataset is this": info.dataset is self,
            "rng": getattr(info, "rng", None),  # these two not in torch 2.6
            "worker_method": getattr(info, "worker_method", None),
            "threads": torch.get_num_threads(),
            "frozen": _refuses_change(info),
        }


def _refuses_change(info: Any) -> bool:
    try:
        info.id = 7
    except Exception:
        return True
    return False


class Remembering(Dataset):
    """Keeps state of its own: counts what this copy has fetched, and can be told things by worker_init_fn."""

    def __init__(self, length: int):
        self.length = length
        self.fetched = 0
        self.told: list[int] = []

    def __len__(self) -> int:
        return self.length

    def tell(self, worker_id: int) -> None:
        self.told.append(worker_id)

    def __getitem__(self, index: int) -> tuple[int, int, tuple[int, ...]]:
        self.fetched += 1
        return index, self.fetched, tuple(self.told)


class Growing(Dataset):
    """A dataset that grows while it is used."""

    def __init__(self) -> None:
        self.items = [0, 1, 2]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> int:
        return self.items[index]


class Unpicklable(Squares):
    """Cannot be sent to another process by any pickler."""

    def __init__(self, length: int):
        super().__init__(length)
        self.lock = threading.Lock()


# --- datasets that fail ---


class TwoArguments(Exception):
    """Cannot be built from one text."""

    def __init__(self, code: int, reason: str):
        super().__init__(code, reason)
        self.code = code


class WithMessage(Exception):
    """Wants its text by name, as some libraries' exceptions do."""

    message = "a default"

    def __init__(self, message: str = ""):
        super().__init__(message)


class KeepsSocket(Exception):
    """Cannot be sent to another process."""

    def __init__(self, text: str):
        super().__init__(text)
        self.lock = threading.Lock()


ERRORS = {
    "ValueError": lambda: ValueError("bad value"),
    "KeyError": lambda: KeyError("missing\nkey"),
    "IndexError": lambda: IndexError("far out"),
    "AssertionError": lambda: AssertionError(),
    "RuntimeError": lambda: RuntimeError("run", "time"),
    "OSError": lambda: OSError(2, "No such file or directory", "cat.png"),
    "FileNotFoundError": lambda: FileNotFoundError("cat.png"),
    "UnicodeDecodeError": lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    "ZeroDivisionError": lambda: ZeroDivisionError("division by zero"),
    "NotImplementedError": lambda: NotImplementedError("some day"),
    "StopAsyncIteration": lambda: StopAsyncIteration("enough"),
    "WithMessage": lambda: WithMessage("hello"),
    "KeepsSocket": lambda: KeepsSocket("locked"),
    "TwoArguments": lambda: TwoArguments(5, "five"),
    "Timeout": lambda: TimeoutError("slow disk"),
    "StopIteration": lambda: StopIteration("the end"),
}


class Failing(Dataset):
    """Raises one of ERRORS at the given indices, or at all."""

    def __init__(self, length: int, error: str, at: Iterable[int] | None = None):
        self.length = length
        self.error = error
        self.at = range(length) if at is None else frozenset(at)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if index in self.at:
            raise ERRORS[self.error]()
        return index


class FailingByKind(Echo):
    """Raises the one of ERRORS that the key names."""

    def __getitem__(self, key: Any) -> NoReturn:
        raise ERRORS[key]()


class FailingBatches(Squares):
    """Raises where a whole batch is fetched."""

    def __getitems__(self, indices: list[int]) -> list[int]:
        if 2 in indices:
            raise ValueError("bad batch")
        return indices


class FailingWithCause(Squares):
    """Raises an error that has a cause."""

    def __getitem__(self, index: int) -> NoReturn:
        try:
            raise OSError("the disk")
        except OSError as error:
            raise ValueError("the sample") from error


class Dying(Dataset):
    """Ends the process that fetches a certain index, once the gate is open, if there is one."""

    def __init__(self, length: int, at: int, how: str, gate: Gate | None = None):
        self.length = length
        self.at = at
        self.how = how
        self.gate = gate.path if gate else None

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if index == self.at:
            if self.gate:
                pass_gate(self.gate)
            match self.how:
                case "SIGKILL" | "SIGTERM":
                    signal.signal(signal.SIGTERM, signal.SIG_DFL)
                    os.kill(os.getpid(), getattr(signal, self.how))
                    signal.pause()
                case "os._exit":
                    os._exit(3)
                case "sys.exit":
                    sys.exit(4)
        return index


# --- meetings between the processes of a case; a path crosses any way of starting a process, a lock does not ---


class Mailbox:
    """Letters from workers to the case, in the order in which they were sent.

    A named pipe: it holds thousands of letters. A datagram socket holds ten, and then whoever posts waits for a reader.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="mailbox-")
        self.path = os.path.join(self._folder.name, "in")
        os.mkfifo(self.path)
        self._pipe = os.open(self.path, os.O_RDWR | os.O_NONBLOCK)

    def letter(self) -> Any:
        """Wait for the next letter."""
        if not select.select([self._pipe], [], [], BOUND_S)[0]:
            raise TimeoutError(f"no letter in {BOUND_S} s")
        (length,) = LETTER.unpack(os.read(self._pipe, LETTER.size))
        return pickle.loads(os.read(self._pipe, length))

    def empty(self) -> bool:
        """Whether no letter lies here."""
        return not select.select([self._pipe], [], [], 0)[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._pipe)
        self._folder.cleanup()


LETTER = struct.Struct("I")


def post(path: str, content: Any) -> None:
    """Send a letter to a mailbox; if it is gone, nobody reads it. One small write: letters do not mix."""
    letter = pickle.dumps(content)
    with contextlib.suppress(OSError):
        pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(pipe, LETTER.pack(len(letter)) + letter)
        finally:
            os.close(pipe)


class Gate:
    """Closed at first; whoever passes waits until it is open."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="gate-")
        self.path = os.path.join(self._folder.name, "gate")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(self.path)
        self._socket.listen(64)

    def open(self) -> None:
        """Let all pass, now and later. Forked workers hold the socket too: closing it here would not be enough."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
            while True:
                self._socket.accept()[0].close()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.open()
        self._folder.cleanup()


def pass_gate(path: str) -> None:
    """Wait until a gate is open."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as visitor:
        visitor.settimeout(BOUND_S)
        visitor.connect(path)
        visitor.recv(1)


class DyingOnce(Echo):
    """Ends the process that fetches a certain index for the first time, in whatever process that is."""

    def __init__(self, length: int, at: int, folder: str):
        super().__init__(length)
        self.at = at
        self.folder = folder

    def __getitem__(self, key: Any) -> Any:
        if key == self.at:
            with contextlib.suppress(FileExistsError):
                os.mkdir(os.path.join(self.folder, "died"))
                os.kill(os.getpid(), signal.SIGKILL)
        return key


class Watched(Dataset):
    """Reports each fetch to a mailbox, and waits at a gate at certain indices."""

    def __init__(self, length: int, mailbox: Mailbox | None = None, gate: Gate | None = None, at: Iterable[int] = ()):
        self.length = length
        self.mailbox = mailbox.path if mailbox else None
        self.gate = gate.path if gate else None
        self.at = frozenset(at)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if self.mailbox:
            post(self.mailbox, index)
        if self.gate and index in self.at:
            pass_gate(self.gate)
        return index


class Meeting(Dataset):
    """Each sample is done when as many processes as expected work on one at the same time."""

    def __init__(self, folder: str, parties: int):
        self.folder = folder
        self.parties = parties

    def __len__(self) -> int:
        return self.parties

    def __getitem__(self, index: int) -> int:
        (Path(self.folder) / str(index)).touch()
        give_up = time.monotonic() + BOUND_S
        while len(os.listdir(self.folder)) < self.parties:
            if time.monotonic() > give_up:
                raise TimeoutError(f"only {os.listdir(self.folder)} came")
            time.sleep(0.002)
        return index


class Shared(Dataset):
    """Holds what processes share by inheritance: a counter of multiprocessing, a shared tensor."""

    def __init__(self, length: int, counter: Any, marks: torch.Tensor):
        self.length = length
        self.counter = counter
        self.marks = marks

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        with self.counter.get_lock():
            self.counter.value += 1
        self.marks[index] = index + 1
        return index


class HasChild(Echo):
    """Starts a process of its own for each sample."""

    def __getitem__(self, key: Any) -> Any:
        child = multiprocessing.get_context("fork").Process(target=_nothing)
        child.start()
        child.join(BOUND_S)
        return key


def _nothing() -> None:
    pass


# --- samplers ---


class Unsized:
    """A sampler that does not know its length."""

    def __init__(self, indices: Iterable[Any]):
        self.indices = list(indices)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.indices)


class Counted(Sampler):
    """Says how often it was started and how far it was read; may go on forever, or fail after a while."""

    def __init__(self, length: int | None, fail_at: int | None = None, batch: int | None = None):
        self.length = length
        self.fail_at = fail_at
        self.batch = batch
        self.started = 0
        self.read = 0
        self.threads: set[int] = set()

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("it has no end")
        return self.length

    def __iter__(self) -> Iterator[Any]:
        self.started += 1
        return self._steps()

    def _steps(self) -> Iterator[Any]:
        step = 0
        while self.length is None or step < self.length:
            self.threads.add(threading.get_ident())
            if step == self.fail_at:
                raise LookupError("the sampler is lost")
            self.read += 1
            yield step % 8 if self.batch is None else [(step + k) % 8 for k in range(self.batch)]
            step += 1


class EagerShuffle(Sampler):
    """Draws its order from the global generator when it is started, not at its first step."""

    def __init__(self, length: int):
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.length).tolist())


class StepwiseRandom(Sampler):
    """Draws from the global generators of all three libraries at every step."""

    def __init__(self, length: int):
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.length):
            yield (int(torch.randint(100, ())) + random.randrange(100) + int(np.random.randint(100))) % self.length


class Forever(Sampler):
    """A batch sampler without an end, around another; keeps its length."""

    def __init__(self, batches: Any):
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from iter(self.batches)


# --- functions for collate_fn and worker_init_fn ---


def as_list(samples: list[Any]) -> list[Any]:
    return samples


def total(samples: list[Any]) -> int:
    return sum(samples)


def with_noise(samples: list[Any]) -> tuple[list[Any], float, float, torch.Tensor]:
    return samples, random.random(), float(np.random.rand()), torch.rand(1)


def twice_the_same(samples: list[Any]) -> dict[str, Any]:
    stacked = torch.tensor(samples)
    return {"a": stacked, "b": stacked, "list": [stacked]}


def channels_last(samples: list[Any]) -> torch.Tensor:
    return torch.zeros(len(samples), 3, 4, 5).contiguous(memory_format=torch.channels_last)


def sparse(samples: list[Any]) -> torch.Tensor:
    return torch.eye(3).mul(samples[0] + 1).to_sparse()


def needs_grad(samples: list[Any]) -> torch.Tensor:
    return torch.zeros(len(samples), requires_grad=True)


class PinsItself:
    """A batch type of a user, with the method that torch asks for."""

    def __init__(self, samples: list[Any]):
        self.values = torch.tensor(samples)
        self.pinned = False

    def pin_memory(self) -> Self:
        self.pinned = True
        return self


def pins_itself(samples: list[Any]) -> PinsItself:
    return PinsItself(samples)


def failing_collate(samples: list[Any]) -> list[Any]:
    if 2 in samples:
        raise ValueError("cannot collate")
    return samples


def seed_numpy_alike(worker_id: int) -> None:
    """What torch's own documentation gives as a way to seed workers."""
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)


def draw_some(worker_id: int) -> None:
    random.random(), np.random.rand(worker_id + 1), torch.rand(worker_id + 2)


def register_record(worker_id: int) -> None:
    """Teach default_collate a type, as users do."""
    from torch.utils.data._utils.collate import default_collate_fn_map

    default_collate_fn_map[Record] = _collate_records


def _collate_records(samples: list[Record], *, collate_fn_map: Any = None) -> torch.Tensor:
    return torch.tensor([sample.value for sample in samples])


def fail_to_start(worker_id: int) -> NoReturn:
    raise ValueError(f"worker {worker_id} does not start")


def remember_globally(worker_id: int) -> None:
    global started_with
    started_with = (worker_id, get_worker_info().id, torch.initial_seed() == get_worker_info().seed)


started_with: tuple[int, int, bool] | None = None


class StartedWith(Squares):
    """What remember_globally left in this process."""

    def __getitem__(self, index: int) -> Any:
        return started_with


# --- iterable datasets ---


class Count(IterableDataset):
    """Counts; every worker counts it all."""

    def __init__(self, length: int, says: int | None = None):
        self.length = length
        self.says = says

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))

    def __len__(self) -> int:
        if self.says is None:
            raise TypeError("of unknown length")
        return self.says


class Shares(IterableDataset):
    """Counts; worker i gives every num_workers-th number, or as many as `lengths` says."""

    def __init__(self, length: int, lengths: tuple[int, ...] | None = None):
        self.length = length
        self.lengths = lengths

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        if info is None:
            return iter(range(self.length))
        if self.lengths is not None:
            return iter(range(info.id * 100, info.id * 100 + self.lengths[info.id]))
        return iter(range(info.id, self.length, info.num_workers))


class Span(IterableDataset):
    """torch's documented example: a range that worker_init_fn divides among the workers."""

    def __init__(self, start: int, end: int):
        self.start = start
        self.end = end

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.end))


def divide_span(worker_id: int) -> None:
    info = get_worker_info()
    dataset = info.dataset
    per_worker = -(-(dataset.end - dataset.start) // info.num_workers)
    dataset.start, dataset.end = (
        dataset.start + worker_id * per_worker,
        min(dataset.start + (worker_id + 1) * per_worker, dataset.end),
    )


class NoisyStream(IterableDataset):
    """Random numbers of the three global generators."""

    def __init__(self, length: int):
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.length):
            yield number, random.random(), float(np.random.rand()), torch.rand(1)


class FailingStream(IterableDataset):
    """A generator that raises in its midst, after which it has ended."""

    def __init__(self, length: int, at: int):
        self.length = length
        self.at = at

    def __iter__(self) -> Iterator[int]:
        for number in range(self.length):
            if number == self.at:
                raise ValueError("bad number")
            yield number


class FailingOnce(IterableDataset):
    """An iterator that raises in its midst and goes on afterwards."""

    def __init__(self, length: int, at: int):
        self.length = length
        self.at = at
        self.number = 0

    def __iter__(self) -> Self:
        self.number = 0
        return self

    def __next__(self) -> int:
        number, self.number = self.number, self.number + 1
        if number >= self.length:
            raise StopIteration
        if number == self.at:
            raise ValueError("bad number")
        return number


class EndsOnce(IterableDataset):
    """Its iterator may not be asked again after its end."""

    def __init__(self, length: int):
        self.length = length
        self.epochs = 0

    def __iter__(self) -> Self:
        self.epochs += 1
        self.number = 0
        self.ended = False
        return self

    def __next__(self) -> tuple[int, int]:
        assert not self.ended, "asked again after the end"
        if self.number == self.length:
            self.ended = True
            raise StopIteration
        self.number += 1
        return self.number, self.epochs


class Tuned(IterableDataset):
    """Says which worker gives what."""

    def __init__(self, length: int):
        self.length = length

    def __iter__(self) -> Iterator[tuple[int, int, bool]]:
        info = get_worker_info()
        for number in range(self.length):
            yield number, -1 if info is None else info.id, info is None or info.dataset is self
