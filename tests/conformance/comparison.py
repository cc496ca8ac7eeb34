"""Run a case on torch's DataLoader, then on ours, and hold what they show equal.

    @same_as_torch("fetch")
    def test_last_batch_is_short(make, num_workers):
        \"\"\"The last batch has what is left over.\"\"\"
        return make.batches(make(Squares(10), batch_size=4, num_workers=num_workers))

A case gets `make`, builds loaders with it and returns what it saw. pytest runs it once for each subject: on torch's
class, what it saw is kept; on ours, in each of the ways below, what it saw has to be equal to that. Torch's answers are
recorded (see recording.py), and torch's side is slow.

    torch      torch's DataLoader
    ours       ours, told to do as torch does where its defaults differ on purpose (TORCHS_WAY)
    async for  the same, taken with `async for`; for cases that take their batches with `make.batches`
    defaults   ours with its own defaults; not for cases about what the defaults change
"""

from __future__ import annotations

import asyncio
import collections.abc
import dataclasses
import functools
import random
import re
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import resource_sharer
from types import CodeType, MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data

from tests.conformance.recording import Recording

# Where a default of ours differs from torch on purpose (see differences.py), this is how to ask for torch's way.
TORCHS_WAY: Mapping[str, Any] = MappingProxyType(
    {"scheduling": "static", "seeding": "worker", "max_buffered_bytes": 0, "on_crash": "raise"}
)


@dataclasses.dataclass(frozen=True)
class Subject:
    """One of the ways in which a case is run; called as a DataLoader class is, it makes a loader.

    Attributes:
        name: What it is called in the name of a test.
        options: What every loader it makes is given beyond what the case asks for.
        start_method: How workers start where the case does not say; None leaves it to the loader.
        on_threads: Workers are threads where the case does not say how they start.
    """

    name: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    start_method: str | None = None
    on_threads: bool = False

    @property
    def cls(self) -> type[torch.utils.data.DataLoader]:
        """The class itself, for cases about subscripts, subclasses and the like."""
        if self.name == "torch":
            return torch.utils.data.DataLoader
        return pytest.importorskip("asyncloader").DataLoader

    @property
    def is_torch(self) -> bool:
        """Whether this is the one that the others are compared with."""
        return self.name == "torch"

    def __call__(self, *args: Any, **options: Any) -> torch.utils.data.DataLoader:
        """Make a loader with these arguments."""
        return self.cls(*args, **self.complete(options))

    def complete(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Add to the arguments of a loader, or of a subclass, what belongs to this subject."""
        started: dict[str, Any] = {"multiprocessing_context": self.start_method} if self.start_method else {}
        if self.on_threads and "multiprocessing_context" not in options:
            started = {"worker_backend": "thread"}
        return {**(started if _positive(options.get("num_workers", 0)) else {}), **self.options, **options}

    def batches(self, loader: torch.utils.data.DataLoader) -> list[Any]:
        """Take one epoch with this subject's kind of loop."""
        return asyncio.run(_take_async(loader)) if self.name == "async for" else list(loader)


SUBJECTS = (
    Subject("torch"),
    Subject("ours", TORCHS_WAY),
    Subject("async for", TORCHS_WAY),
    Subject("defaults"),
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A line of the table: what was compared."""

    topic: str
    name: str
    says: str
    subjects: tuple[str, ...]


TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
CASES: list[Case] = []
RECORDING = Recording()
_seen_on_torch: dict[str, Any] = {}


def same_as_torch(
    topic: str,
    *,
    async_for: bool | None = None,
    defaults: bool = True,
    torch_leaves: str | None = None,
    since: tuple[int, int] = (2, 6),
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Make a test of a function that returns what it saw.

    Args:
        topic: A word or two by which the table is ordered.
        async_for: Whether to run it with `async for` too; by default, if it takes batches with `make.batches`.
        defaults: Whether to run it on ours with its own defaults too. False for what depends on the streams of random
            numbers in workers, on how far the sampler is read, or on what follows a crash.
        torch_leaves: Why what torch leaves behind in this case is not counted.
        since: The oldest torch that is known to do so. With an older one the case is run on ours only.
    """

    def decorate(case: Callable[..., Any]) -> Callable[..., None]:
        loops = _mentions(case.__code__, "batches") if async_for is None else async_for
        left_out = {name for name, wanted in (("async for", loops), ("defaults", defaults)) if not wanted}
        subjects = tuple(subject.name for subject in SUBJECTS if subject.name not in left_out)
        CASES.append(Case(topic, case.__name__, (case.__doc__ or "").strip().split("\n")[0], subjects))

        @functools.wraps(case)
        def test(make: Subject, **asked: Any) -> None:
            if since > TORCH:
                if not make.is_torch:
                    _observe(case, make, asked)
                return
            key = re.sub(" at 0x[0-9a-f]+", "", f"{case.__module__}.{case.__name__} {asked!r}")  # where functions are
            is_recorded = make.start_method is None  # the platform's own
            seen = snapshot(_observe(case, make, asked))
            if make.is_torch:
                _seen_on_torch[key] = seen
                if is_recorded:
                    RECORDING.check(key, seen)
            elif not (is_recorded and RECORDING.confirms(key, seen)):
                if key not in _seen_on_torch:
                    reference = dataclasses.replace(SUBJECTS[0], start_method=make.start_method)
                    _seen_on_torch[key] = snapshot(_observe(case, reference, asked))
                assert seen == _seen_on_torch[key]

        # wraps() hands on the signature, so pytest sees the arguments of the case; conftest.py parametrises `make`
        test.subjects = subjects  # type: ignore[attr-defined]
        test.torch_leaves = torch_leaves  # type: ignore[attr-defined]
        return test

    return decorate


def _mentions(code: CodeType, name: str) -> bool:
    """Whether a function uses an attribute of this name, in functions inside it too."""
    return name in code.co_names or any(
        _mentions(inner, name) for inner in code.co_consts if isinstance(inner, CodeType)
    )


def _observe(case: Callable[..., Any], make: Subject, asked: Mapping[str, Any]) -> Any:
    seed_everything(7)
    seen = case(make, **asked)
    if make.is_torch:
        resource_sharer.stop(timeout=5)  # the thread that torch starts for tensors it sends to workers, and never ends
    assert seen is not None, "a case returns what it saw"
    return seen


def seed_everything(seed: int) -> None:
    """Seed the main process's generators."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def snapshot(value: Any) -> Any:
    """Turn a batch, nested as it may be, into plain values: equal only if types, dtypes, shapes and contents are."""
    match value:
        case torch.Tensor():
            dense = value.detach().to_dense() if value.layout != torch.strided else value.detach()
            listed = dense.to(torch.float32).tolist() if value.dtype in _WITHOUT_LISTS else dense.tolist()
            return (
                type(value).__name__,
                str(value.dtype),
                str(value.layout),
                tuple(value.shape),
                value.requires_grad,
                _plain(listed),
            )
        case np.ndarray():
            return ("ndarray", value.dtype.str, value.shape, snapshot(value.tolist()))
        case np.generic():
            return (type(value).__name__, value.item())
        case torch.Size():
            return ("Size", tuple(value))
        case collections.abc.Mapping():
            return (type(value).__name__, [(snapshot(key), snapshot(item)) for key, item in value.items()])
        case tuple() | list() | set() | frozenset() | collections.abc.ValuesView():
            items = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
            return (type(value).__name__, [snapshot(item) for item in items])
        case float() if value != value:
            return "nan"
        case _:
            return value


_WITHOUT_LISTS = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


def _plain(listed: Any) -> Any:
    """Make nan equal to itself."""
    if isinstance(listed, list):
        return [_plain(item) for item in listed]
    return "nan" if listed != listed else listed


def told(error: BaseException) -> str:
    """All that an error tells a reader: its text, its notes, and the same of what caused it."""
    lines = [str(error), *getattr(error, "__notes__", [])]
    for behind in (error.__cause__, error.__context__):
        if behind is not None:
            lines.append(told(behind))
            break
    return "\n".join(lines)


def caught(act: Callable[[], Any]) -> Exception | None:
    """What an act raises, or None; without its traceback.

    torch's iterator and the error that it raises hold one another. Left to the garbage collector, that takes the queues
    apart before the workers have been told to end, and each worker costs five seconds.
    """
    try:
        act()
    except Exception as error:
        behind: BaseException | None = error
        while behind is not None:
            behind = behind.with_traceback(None).__cause__ or behind.__context__
        return error
    return None


def failure(act: Callable[[], Any]) -> tuple[str, str] | None:
    """Type and text of what an act raises, or None."""
    error = caught(act)
    return error and (type(error).__name__, str(error))


def _positive(number: Any) -> bool:
    return isinstance(number, int) and number > 0


async def _take_async(loader: Any) -> list[Any]:
    return [batch async for batch in loader]


def table(cases: Sequence[Case]) -> str:
    """Write how many behaviours are compared; what each case says is in its docstring."""
    topics = {case.topic for case in cases}
    return f"{len(cases)} behaviours of {len(topics)} topics, from attributes to `worker_init_fn`."
