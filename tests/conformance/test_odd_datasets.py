"""Datasets, samplers and trainers that torch's loader takes as they are, and that ours could trip over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, SequentialSampler
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from tests.conformance.comparison import Subject, same_as_torch

WORKERS = pytest.mark.parametrize("num_workers", [0, 2])


class ModesSeen(Dataset[Any]):
    """Samples that tell the modes of the thread that makes them."""

    def __init__(self) -> None:
        self.encode = torch.nn.Linear(4, 2)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        made = self.encode(torch.ones(4))
        seen = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), made.requires_grad)
        return (*seen, torch.finfo(made.dtype).bits)


class NeedsArguments(IterableDataset[int]):
    """Its state is told to who knows the arguments, as with some datasets for streaming."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(5))

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        return {"n": num_samples, "from": from_beginning}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


class CannotTell(NeedsArguments):
    """Asked for its state it raises."""

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        raise RuntimeError("no state")


class LooksUp(IterableDataset[int]):
    """Whatever it does not have is looked up, and raises a KeyError."""

    def __init__(self) -> None:
        self.config = {"a": 1}

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["config"][name]

    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


class LookingUp(SequentialSampler):
    """A sampler that does so."""

    def __getattr__(self, name: str) -> Any:
        return {"a": 1}[name]


class Shaped(Dataset[Any]):
    """Arrays and tensors with nothing in them, in some dimension; videos that were stored channels-last."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        return {
            "none": np.zeros((3, 0), np.float32),
            "inner": np.zeros((2, 0, 2)),
            "outer": np.zeros((0, 2)),
            "tensor": torch.zeros(3, 0),
            "video": torch.full((2, 8, 8, 3), float(index)).permute(0, 3, 1, 2),
        }


@WORKERS
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "autocast"])
@same_as_torch("modes of the caller", async_for=False)
def test_modes_of_the_thread_that_iterates(make: Subject, mode: str, num_workers: int) -> object:
    """Under fork, workers have no_grad, inference_mode and autocast of the caller."""
    entered = {
        "no_grad": torch.no_grad(),
        "inference_mode": torch.inference_mode(),
        "autocast": torch.autocast("cpu", torch.bfloat16),
    }
    context = "fork" if num_workers else None
    with entered[mode]:
        loader = make(ModesSeen(), batch_size=2, num_workers=num_workers, multiprocessing_context=context)
        return [[part.tolist() for part in batch] for batch in loader]


@pytest.mark.covering(1)
@WORKERS
@pytest.mark.parametrize("kind", [NeedsArguments, CannotTell, LooksUp])
@same_as_torch("odd datasets")
def test_datasets_that_do_not_answer_what_torch_does_not_ask(make: Subject, kind: Any, num_workers: int) -> object:
    """Datasets have a `state_dict` that takes arguments or raises, or a `__getattr__` that raises KeyError."""
    return make.batches(make(kind(), batch_size=2, num_workers=num_workers))


@WORKERS
@same_as_torch("odd datasets")
def test_samplers_that_do_not_answer_what_torch_does_not_ask(make: Subject, num_workers: int) -> object:
    """Samplers have a `__getattr__` that raises KeyError."""
    return make.batches(make(range(5), batch_size=2, sampler=LookingUp(range(5)), num_workers=num_workers))


@pytest.mark.processes
@pytest.mark.parametrize("num_workers", [0, 1])
@same_as_torch("collate", async_for=True)
def test_layouts_and_dimensions_of_nothing(make: Subject, num_workers: int) -> object:
    """Zeros among the dimensions of arrays; strides of full and of short batches of samples that are channels-last."""
    batches = make.batches(make(Shaped(), batch_size=4, num_workers=num_workers))
    return [{name: (part, part.stride()) for name, part in batch.items()} for batch in batches]


@same_as_torch("default device", async_for=False)
def test_default_device_of_the_trainer(make: Subject) -> object:
    """Without workers, numbers and arrays are collated on the trainer's default device."""
    samples = [(index, 1.5, np.float32(2), np.ones(1)) for index in range(4)]
    iterator = iter(make(samples, batch_size=2))
    with torch.device("meta"):
        return [part.device.type for part in next(iterator)]


@same_as_torch("subclasses", async_for=False)
def test_subclass_with_attributes_and_an_iterator_of_its_own(make: Subject) -> object:
    """Private names that a subclass may well use; torch's iterator, with persistent workers; ending them by hand."""

    class Own(make.cls):  # type: ignore[name-defined,misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._options = {"mine": True}
            self._epoch = None

    class Torchs(make.cls):  # type: ignore[name-defined,misc]
        def _get_iterator(self) -> Any:
            return _MultiProcessingDataLoaderIter(self)

    seen = []
    for cls in (Own, Torchs):
        loader = cls(range(4), **make.complete({"num_workers": 1, "persistent_workers": True}))
        seen += [list(loader), list(loader)]
        loader._iterator._shutdown_workers()
    return seen
