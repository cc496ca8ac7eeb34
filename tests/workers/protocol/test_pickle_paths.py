"""What cannot be sent to workers, and what is large to send, are named by their paths."""

from __future__ import annotations

import threading
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from asyncloader import DataLoader


class Held:
    """A dataset that holds whatever it is given."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index


def closed_over(lock: Any) -> Any:
    """Return a function that pickle refuses, by reference and by value."""
    return lambda batch: (batch, lock)


@pytest.mark.parametrize(
    ("dataset", "path"),
    [
        (Held(cfg={"log": SimpleNamespace(lock=threading.Lock())}), "dataset.cfg['log'].lock"),
        (Held(parts=[1, (2, threading.Lock())]), "dataset.parts[1][1]"),
        (Held(many=[threading.Lock()] * 101), "dataset.many"),
        ([1, threading.Lock()], "dataset[1]"),
    ],
)
def test_what_cannot_be_pickled_is_named(dataset: Any, path: str) -> None:
    """As one would write it in Python; the error itself stays pickle's."""
    loader = DataLoader(dataset, num_workers=1, multiprocessing_context="forkserver")
    with pytest.warns(UserWarning, match="Got pickle error"), pytest.raises(TypeError, match="lock") as caught:
        iter(loader)
    assert f"{path} cannot be sent" in caught.value.__notes__[-1]


@pytest.mark.parametrize("name", ["collate_fn", "worker_init_fn"])
def test_so_are_functions(name: str) -> None:
    functions: Any = {name: closed_over(threading.Lock())}
    loader = DataLoader(Held(), num_workers=1, multiprocessing_context="spawn", **functions)
    with pytest.warns(UserWarning, match="Got pickle error"), pytest.raises(TypeError) as caught:
        iter(loader)
    assert caught.value.__notes__[-1].startswith(name)


def test_what_workers_copy_is_told_where_it_is_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """The innermost part that most of it is for, once. Arrays and tensors do not count: workers map them."""
    monkeypatch.setattr("asyncloader.workers.protocol.pickle_paths._told", set())
    monkeypatch.setattr("asyncloader.workers.protocol.pickle_paths.MANY_BYTES", 1 << 20)
    labels = [f"sample {number}" for number in range(200_000)]
    shared = {"array": np.zeros(1 << 20), "tensor": torch.zeros(1 << 20)}
    large = Held(cfg={"labels": labels, "other": labels[:10]}, **shared)
    with pytest.warns(UserWarning, match=r"dataset\.cfg\['labels'\] \(list\)") as caught:
        assert len(list(DataLoader(large, num_workers=1, multiprocessing_context="forkserver"))) == 4
    assert [str(each.message).partition(";")[0] for each in caught] == [
        "Each worker unpickles 2 MB into memory of its own whenever it is started"
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(list(DataLoader(large, num_workers=1, multiprocessing_context="forkserver"))) == 4
        monkeypatch.setattr("asyncloader.workers.protocol.pickle_paths._told", set())
        assert len(list(DataLoader(Held(**shared), num_workers=1, multiprocessing_context="forkserver"))) == 4
