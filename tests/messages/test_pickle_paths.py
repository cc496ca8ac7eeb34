"""What cannot be sent to workers is named by its path."""

from __future__ import annotations

import functools
import multiprocessing
import pickle
import sys
import threading
import types
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import Subset

from asyncloader import DataLoader
from asyncloader.messages.pickled_spec import PickledSpec, pickle_by_value
from asyncloader.worker.serve import opened
from tests.support.nursery import Program


class Held:
    """A dataset that holds whatever it is given."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index


class Slotted:
    """Has no ``__dict__``."""

    __slots__ = ("lock",)

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def method(self) -> None:
        """Do nothing."""


class Careful:
    """Leaves one lock out when it is pickled, and not the other."""

    def __init__(self) -> None:
        self.left_out = threading.Lock()
        self._kept = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"kept": self._kept}


def closed_over(lock: Any) -> Any:
    """Return a function that pickle refuses, by reference and by value."""
    return lambda batch: (batch, lock)


@pytest.mark.parametrize(
    ("dataset", "path"),
    [
        (Held(cfg={"log": SimpleNamespace(lock=threading.Lock())}), "dataset.cfg.log.lock"),
        (Held(parts=[1, (2, threading.Lock())]), "dataset.parts.1.1"),
        (Held(many={**dict.fromkeys(range(60)), "bad": threading.Lock()}), "dataset.many.bad"),
        ([1, threading.Lock()], "dataset.1"),
        (Held(slotted=Slotted()), "dataset.slotted.lock"),
        (Held(careful=Careful()), "dataset.careful.kept"),
        (Held(call=functools.partial(print, 1, threading.Lock())), "dataset.call.args.1"),
        (Held(call=functools.partial(print, end=threading.Lock())), "dataset.call.keywords.end"),
        (Held(call=Slotted().method), "dataset.call.__self__.lock"),
        (Subset(Held(cfg=Slotted()), [0, 1]), "dataset.dataset.cfg.lock"),  # type: ignore[type-var]
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_pickled_is_named(dataset: Any, path: str) -> None:
    """By names and numbers; the error itself stays pickle's."""
    loader = DataLoader(dataset, num_workers=1, multiprocessing_context="forkserver")
    with pytest.warns(UserWarning, match="Got pickle error"), pytest.raises(TypeError, match="lock") as caught:
        iter(loader)
    assert caught.value.__notes__[-1].startswith(f"{path} (lock) cannot be sent")


@pytest.mark.parametrize("name", ["collate_fn", "worker_init_fn"])
def test_so_are_functions(name: str) -> None:
    functions: Any = {name: closed_over(threading.Lock())}
    loader = DataLoader(Held(), num_workers=1, multiprocessing_context="spawn", **functions)
    with pytest.warns(UserWarning, match="Got pickle error"), pytest.raises(TypeError) as caught:
        iter(loader)
    assert caught.value.__notes__[-1].startswith(f"{name}.lock (lock) cannot be sent")


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


@pytest.mark.parametrize("nbytes", [0, 5, 1 << 20])
def test_a_storage_arrives(nbytes: int) -> None:
    """torch's own pickle of it does not unpickle."""
    storage = torch.arange(nbytes, dtype=torch.uint8).untyped_storage()
    data, *buffers = pickle_by_value({"storage": storage, "again": storage})
    opened = pickle.loads(data, buffers=[bytearray(buffer) for buffer in buffers])
    assert isinstance(opened["storage"], torch.UntypedStorage)
    assert bytes_of(opened["storage"]).equal(bytes_of(storage))
    assert opened["again"] is opened["storage"]


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_dataset_may_hold_storages(method: str) -> None:
    """Of either kind, without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        typed = torch.arange(4.0).storage()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dataset = Held(
            untyped=torch.arange(4.0).untyped_storage(),
            typed=typed,
            shared=torch.ones(4).share_memory_().untyped_storage(),
        )
        assert len(list(DataLoader(dataset, num_workers=1, multiprocessing_context=method))) == 4


ABOVE = "Define classes and functions that the dataset needs above that line"


def test_a_class_below_the_guard_is_told_where_it_belongs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pickle finds it in the trainer's main module, and not in that of a worker, as multiprocessing imports it."""
    trainers, workers = types.ModuleType("__main__"), types.ModuleType("__mp_main__")
    trainers.Numbers = type("Numbers", (list,), {"__module__": "__main__"})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "__main__", trainers)
    data = pickle.dumps(trainers.Numbers([1, 2]))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "__main__", workers)
    error: Any = opened(functools.partial(pickle.loads, data))
    assert "attribute 'Numbers'" in str(error)
    assert any(ABOVE in note for note in error.__notes__)


@pytest.mark.slow
def test_a_spawned_worker_tells_it(run: Callable[..., Program]) -> None:
    """In the trainer's error."""
    program = run(
        """
from asyncloader import DataLoader

if __name__ == "__main__":

    class Numbers(list):
        pass

    next(iter(DataLoader(Numbers([1, 2]), num_workers=1, multiprocessing_context="spawn")))
"""
    )
    assert "attribute 'Numbers'" in program.err
    assert ABOVE in program.err


def test_a_lock_can_be_pickled_with_a_dataset_alone() -> None:
    """As multiprocessing has it: to a process that is being launched."""
    lock = multiprocessing.get_context("spawn").Lock()
    PickledSpec(lock).close()
    with pytest.raises(RuntimeError, match="inheritance"):
        pickle.dumps(lock)
