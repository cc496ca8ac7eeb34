"""Our options beyond torch's: what is accepted, what is refused, where they are kept, and in how many places."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data
from torch.utils.data.datapipes.iter import IterableWrapper

import asyncloader
from asyncloader import AsyncLoaderError, ConfigurationError, DataLoader
from asyncloader.loader import OPTIONS
from asyncloader.messages.messages import WorkerSpec
from asyncloader.options import _KEPT_BY_WORKERS, ASKED, Options
from tests.support import inside

OURS = list(OPTIONS)
OF_TORCH_ALONE = {"self", "shuffle", "pin_memory", "pin_memory_device"}
"""What torch's own code deals with."""
VIEWS = {"Options", "WorkerSpec", "RayWorkers"}
"""The record, what workers are told of it, and options of the same name that are others."""


class Stream(torch.utils.data.IterableDataset[int]):
    """An iterable dataset, which some options are for."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize("name", OURS)
def test_each_option_has_one_default(name: str) -> None:
    """The same in the signature, on a loader that was made without it, and in its options."""
    parameter = inspect.signature(DataLoader.__init__).parameters[name]
    assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
    loader = DataLoader([1])
    assert getattr(loader, name) == parameter.default
    default = "batch" if name == "seeding" else parameter.default  # where the scheduling does not imply another one
    assert getattr(inside.options(loader), name) == default


def test_the_signature_is_torchs_and_ours() -> None:
    """torch's parameters come first, in torch's order and with torch's defaults."""
    theirs = inspect.signature(torch.utils.data.DataLoader.__init__).parameters
    ours = inspect.signature(DataLoader.__init__).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    assert [ours[name].kind for name in theirs] == [parameter.kind for parameter in theirs.values()]
    assert [ours[name].default for name in theirs] == [parameter.default for parameter in theirs.values()]
    assert list(ours)[len(theirs) :] == OURS


def test_the_docstring_names_every_option() -> None:
    """So that help() shows them all."""
    documentation = inspect.getdoc(DataLoader)
    assert documentation is not None
    missing = [name for name in inspect.signature(DataLoader).parameters if f"\n    {name}: " not in documentation]
    assert missing == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("scheduling", "fair"),
        ("scheduling", None),
        ("seeding", "epoch"),
        ("on_error", "ignore"),
        ("on_timeout", "wait"),
        ("on_crash", "ignore"),
        ("worker_backend", "interpreter"),
        ("concurrency", 0),
        ("concurrency", 2.5),
        ("max_buffered_bytes", -1),
        ("max_buffered_bytes", 1.5),
        ("max_buffered_bytes", True),
        ("max_retries", -1),
        ("max_retries", "2"),
        ("snapshot_every_n_steps", -1),
        ("max_errors", -1),
        ("max_errors", 1.5),
        ("max_errors", True),
        ("max_worker_memory", 500),
        ("max_worker_memory", "4GB"),
        ("max_worker_memory", 4e9),
    ],
)
def test_what_cannot_work_is_refused_at_construction(name: str, value: Any) -> None:
    """With the name, what would be right, and what was given."""
    with pytest.raises(ConfigurationError, match=f"{name} should be .* but got {value!r}") as caught:
        DataLoader([1], **{name: value})
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, AsyncLoaderError)


def test_a_timeout_without_workers_says_what_to_do() -> None:
    """When a run begins, as torch's loader, and of its type."""
    loader: Any = DataLoader([1], timeout=3)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match=r"timeout=3 is for workers, .* Use num_workers=1, or timeout=0"):
        iter(loader)


def test_each_option_takes_another_value() -> None:
    """And keeps it under its own name."""
    values: dict[str, Any] = {
        "concurrency": 4,
        "scheduling": "dynamic",
        "seeding": "worker",
        "seeding_rank": 2,
        "max_buffered_bytes": 0,
        "on_error": "skip",
        "max_errors": 5,
        "on_timeout": "retry",
        "on_crash": "skip",
        "max_retries": 0,
        "worker_backend": "thread",
        "trace": "trace.json",
        "snapshot_every_n_steps": 3,
        "max_workers": 5,
        "max_worker_memory": 1 << 30,
    }
    assert sorted(values) == sorted(OURS)
    for name, value in values.items():
        needs: dict[str, Any] = {
            "max_errors": {"on_error": "skip"},
            "max_workers": {"num_workers": "auto"},
            "max_worker_memory": {"num_workers": 1},
        }.get(name, {})
        loader: Any = DataLoader([1], **{**needs, name: value})  # type: ignore[arg-type]
        assert getattr(loader, name) == value


def test_a_bound_for_what_is_not_skipped_is_refused() -> None:
    """max_errors without skipping or replacing would be ignored."""
    with pytest.raises(ConfigurationError, match="max_errors"):
        DataLoader([1], max_errors=3)


def test_options_can_be_changed_between_epochs() -> None:
    """What can be set on a loader is looked at when it is iterated, and checked then."""
    loader = DataLoader(range(4), num_workers=1)  # type: ignore[arg-type]
    loader.scheduling = "dynamic"
    assert [int(batch) for batch in loader] == [0, 1, 2, 3]
    loader.scheduling = "never"  # type: ignore[assignment]
    with pytest.raises(ConfigurationError):
        iter(loader)


def test_options_are_frozen() -> None:
    """Nobody changes them on the way."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        inside.options(DataLoader([1])).max_retries = 5  # type: ignore[misc]


def test_what_follows_from_an_async_dataset() -> None:
    """It is awaited for 64 samples at once, and its workers have tickets enough for that."""

    class Slow:
        def __len__(self) -> int:
            return 100

        async def __getitem__(self, index: int) -> int:
            return index

    options = inside.options(DataLoader(Slow(), 10, num_workers=2))  # type: ignore[arg-type]
    assert (options.is_async, options.samples_at_once, options.tickets_at_once) == (True, 64, 9)
    assert options.prefetch == 9
    assert not options.seeds_each_batch


def test_what_follows_from_a_plain_dataset() -> None:
    """One sample after the other, torch's window, and seeds for each batch."""
    options = inside.options(DataLoader([1, 2, 3], 2, num_workers=2))  # type: ignore[arg-type]
    assert (options.is_async, options.samples_at_once, options.tickets_at_once) == (False, 1, 0)
    assert (options.num_at_start, options.prefetch, options.num_samples()) == (2, 2, 3)
    assert options.seeds_each_batch
    assert not options.is_in_process


def test_workers_that_are_there_keep_what_they_were_started_with() -> None:
    """The next run of persistent workers has the loader's new options but for those."""
    first = inside.options(DataLoader([1], num_workers=1, on_error="skip", max_errors=1))  # type: ignore[arg-type]
    now = inside.options(DataLoader([1], num_workers=2, prefetch_factor=8, concurrency=3))  # type: ignore[arg-type]
    both = now.with_workers_of(first)
    assert (both.num_workers, both.on_error, both.samples_at_once, both.prefetch_factor) == (1, "skip", 1, 8)
    assert both.prefetch == 8


def test_the_values_that_there_are_are_named() -> None:
    """After a slip of the pen."""
    with pytest.raises(ConfigurationError, match=r"should be one of 'raise', 'retry', 'skip', but got 'retyr'"):
        DataLoader([1], on_crash="retyr")  # type: ignore[arg-type]


@pytest.mark.parametrize("on_timeout", ["retry", "skip"])
def test_what_is_for_a_timeout_wants_one(on_timeout: Any) -> None:
    """Without one nothing ever is late; without workers, as while debugging, nobody minds."""
    with pytest.raises(ConfigurationError, match="set timeout, in seconds"):
        DataLoader([1], num_workers=1, on_timeout=on_timeout)
    DataLoader([1], num_workers=1, timeout=1, on_timeout=on_timeout)
    DataLoader([1], on_timeout=on_timeout)


def test_options_are_made_anew_where_something_was_set() -> None:
    """And only there: with persistent workers that is most of what the beginning of an epoch takes."""
    loader = DataLoader(range(4), num_workers=1)  # type: ignore[arg-type]
    first = inside.options(loader)
    assert inside.options(loader, first) is first
    loader.timeout = 3
    second = inside.options(loader, first)
    assert (first.timeout, second.timeout) == (0, 3)


def test_the_record_has_what_the_signature_names_and_the_rest_follows_from_it() -> None:
    """Which sampler yields keys, and automatic batching, are what torch makes of arguments."""
    asked = set(inspect.signature(DataLoader.__init__).parameters) - OF_TORCH_ALONE
    assert set(ASKED) - asked == {"index_sampler", "auto_collation"}
    assert asked <= set(ASKED)
    assert set(_KEPT_BY_WORKERS) <= set(ASKED)


def test_the_record_is_made_of_the_attributes_of_the_loader() -> None:
    """Also where they were set after construction."""
    loader: Any = DataLoader([1], num_workers=1)
    for name, parameter in OPTIONS.items():
        assert getattr(loader, name) == parameter.default
    loader.max_retries, loader.timeout = 7, 3.0
    options = inside.options(loader)
    assert (options.max_retries, options.timeout) == (7, 3.0)
    assert inside.options(loader, options) is options


def test_workers_see_part_of_the_record_under_its_names() -> None:
    """Beside what belongs to one iterator."""
    own = {"dataset", "worker_init_fn", "base_seed", "modes", "importing"}
    for each in fields(WorkerSpec):
        assert each.name in own or hasattr(Options, each.name), each.name


def test_an_option_is_added_in_two_places() -> None:
    """In ``DataLoader.__init__`` and in `Options`; at most one other class has a field for it, which decides by it."""
    root = Path(asyncloader.__file__).parent
    declared: dict[str, set[str]] = {name: set() for name in OPTIONS}
    for path in root.rglob("*.py"):
        for kind in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)):
            for name in {ast.unparse(node.target) for node in kind.body if isinstance(node, ast.AnnAssign)} & set(
                OPTIONS
            ):
                declared[name].add(kind.name)
    for name, kinds in declared.items():
        assert "Options" in kinds, name
        assert len(kinds - VIEWS) <= 1, f"{name} is copied: {kinds}"
    init = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(DataLoader.__init__))))
    named = Counter(node.id for node in ast.walk(init) if isinstance(node, ast.Name) and node.id in OPTIONS)
    # Each is named once, where it is kept as an attribute; some are looked at before torch's own __init__ as well.
    assert all(1 <= named[name] <= 2 for name in OPTIONS), named


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_data_pipes_are_not_for_threads() -> None:
    """One thread would find the pipes of another one, and divide those."""
    pipe: Any = IterableWrapper(range(3))
    with pytest.raises(ConfigurationError, match="data pipes cannot be divided among threads"):
        iter(DataLoader(pipe, num_workers=1, worker_backend="thread"))
    assert [int(batch) for batch in DataLoader(pipe, worker_backend="thread")] == [0, 1, 2]
