"""pin_memory: warnings without an accelerator, results with one."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch

from tests.conformance.comparison import Subject, failure, same_as_torch
from tests.conformance.datasets import Count, PinsItself, Samples, Squares, pins_itself

FEW_WORKERS = pytest.mark.parametrize("num_workers", [0, 2])
WITHOUT = pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
WITH = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


@WITHOUT
@FEW_WORKERS
@pytest.mark.parametrize("device", ["", "cuda"])
@same_as_torch("warnings", async_for=False)
def test_pinning_without_an_accelerator_warns_and_changes_nothing(
    make: Subject, device: str, num_workers: int
) -> object:
    """iter() gives torch's warnings, one of them about a named device; batches are not pinned."""
    loader = make(Squares(5), batch_size=2, pin_memory=True, pin_memory_device=device, num_workers=num_workers)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        batches: list[Any] = []
        error = failure(lambda: batches.extend(loader))
    if error is not None:
        return error[0]  # torch 2.6 asks CUDA for the device that is named
    texts = [(w.category, str(w.message)) for w in seen if "pin_memory" in str(w.message)]
    return batches, texts, [batch.is_pinned() for batch in batches]


@WITHOUT
@FEW_WORKERS
@same_as_torch("pinning", async_for=False)
def test_custom_types_are_not_pinned_without_an_accelerator(make: Subject, num_workers: int) -> object:
    """The pin_memory() of custom types is not called."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader = make(Squares(4), batch_size=2, collate_fn=pins_itself, pin_memory=True, num_workers=num_workers)
        return [(type(batch).__name__, batch.values, batch.pinned) for batch in loader]


@WITHOUT
@same_as_torch("warnings", async_for=False)
def test_naming_a_device_without_pinning_is_not_told(make: Subject) -> object:
    """pin_memory_device without pin_memory gives no warning, except with torch 2.6."""
    batches: list[Any] = []
    error = failure(lambda: batches.extend(make.batches(make(Squares(3), pin_memory_device="cuda"))))
    return error or batches


@pytest.mark.gpu
@WITH
@FEW_WORKERS
@pytest.mark.parametrize("kind", ["large tensor", "nested", "namedtuple", "own mapping", "dict", "str", "int"])
@same_as_torch("pinning")
def test_batches_are_pinned(make: Subject, kind: str, num_workers: int) -> object:
    """Tensors in batches of every type are page-locked, and equal to what torch gives."""
    batches = make.batches(make(Samples(kind), batch_size=4, pin_memory=True, num_workers=num_workers))
    return batches, [tensor.is_pinned() for batch in batches for tensor in _tensors(batch)]


@pytest.mark.gpu
@WITH
@FEW_WORKERS
@same_as_torch("pinning")
def test_custom_types_pin_themselves(make: Subject, num_workers: int) -> object:
    """A batch with a pin_memory method is asked to."""
    loader = make(Squares(4), batch_size=2, collate_fn=pins_itself, pin_memory=True, num_workers=num_workers)
    return [(type(batch).__name__, batch.values, batch.pinned) for batch in make.batches(loader)]


@pytest.mark.gpu
@WITH
@same_as_torch("pinning")
def test_persistent_workers_and_pinning(make: Subject) -> object:
    """Several epochs, one of them broken off."""
    loader = make(Samples("large tensor"), 2, num_workers=2, pin_memory=True, persistent_workers=True)
    next(iter(loader))
    batches = make.batches(loader)
    return batches, [batch.is_pinned() for batch in batches]


@pytest.mark.gpu
@WITH
@same_as_torch("pinning")
def test_pinning_of_a_stream(make: Subject) -> object:
    """Iterable datasets end as they should."""
    return make.batches(make(Count(5), 2, num_workers=2, pin_memory=True))


SCRIPT = """
import warnings
warnings.simplefilter("ignore")
from {module} import DataLoader
for batch in DataLoader(range(8), num_workers=1, pin_memory=True, persistent_workers=True):
    break
loader = DataLoader(range(8), num_workers=1, pin_memory=True, persistent_workers=True)
for batch in loader:
    break
"""


@pytest.mark.slow  # a fresh interpreter, which imports torch; how scripts end is tested in faults/test_exits.py
@same_as_torch("scripts", async_for=False, defaults=False)
def test_script_that_breaks_off_with_persistent_workers_and_pinning_exits_with_zero(make: Subject) -> object:
    """The script prints nothing at its exit."""
    module = "torch.utils.data" if make.is_torch else "asyncloader"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(module=module)], capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stderr


def _tensors(batch: Any) -> list[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        return [batch]
    if isinstance(batch, dict):
        return [tensor for item in batch.values() for tensor in _tensors(item)]
    if isinstance(batch, (list, tuple)):
        return [tensor for item in batch for tensor in _tensors(item)]
    return []


def test_custom_type_counts() -> None:
    """The instrument of this file measures."""
    batch = PinsItself([1])
    assert not batch.pinned
    assert batch.pin_memory().pinned
