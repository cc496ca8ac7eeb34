"""How large batches are that worker threads hand over as they are: what decides how far they run ahead."""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from torch.utils.data import Dataset

from asyncloader import DataLoader
from asyncloader.backends.threads.transport import UNKNOWN, batch_bytes

NBYTES = 1 << 20


@dataclasses.dataclass
class Plain:
    x: Any


@dataclasses.dataclass(slots=True)
class Slotted:
    x: Any
    unset: Any = dataclasses.field(init=False)


class Hidden:
    __slots__ = ("__x",)

    def __init__(self, x: Any) -> None:
        self.__x = x


class Raising:
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


def in_a_cycle(x: Any) -> list[Any]:
    made = [x]
    made.append(made)
    return made


WRAPPERS: list[Callable[[Any], Any]] = [
    lambda x: x,
    lambda x: [x],
    lambda x: {"x": (x, "text")},
    lambda x: {x: 1},
    lambda x: collections.deque([x]),
    lambda x: collections.UserDict(x=x),
    lambda x: np.array([x, None], dtype=object),
    lambda x: Plain([Slotted(x)]),
    Hidden,
    in_a_cycle,
    lambda x: [x, x],  # counts once
]


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("content", [torch.zeros(NBYTES // 4), bytes(NBYTES)], ids=["tensor", "bytes"])
def test_what_is_in_it_counts(wrap: Callable[[Any], Any], content: Any) -> None:
    """However deep, in whatever Python can hold it."""
    size = batch_bytes(wrap(content))
    assert NBYTES <= size < NBYTES + 2000 or (isinstance(content, bytes) and size < 2 * NBYTES + 2000)


@pytest.mark.parametrize("batch", [PIL.Image.new("RGB", (9, 9)), iter([]), [Raising()], torch.eye(3).to_sparse()])
def test_what_cannot_be_looked_into_has_no_size(batch: Any) -> None:
    """And says so."""
    assert batch_bytes([batch]) == UNKNOWN


@pytest.mark.parametrize("wrap", [Plain, lambda x: iter([x])])
def test_threads_do_not_run_far_ahead_of_a_slow_batch(wrap: Callable[[Any], Any]) -> None:
    """8 MiB are 8 batches of 1 MiB in a dataclass; of what has no size only torch's window is made."""
    go_on = threading.Event()
    made: list[int] = []

    class Data(Dataset[Any]):
        def __len__(self) -> int:
            return 400

        def __getitem__(self, index: int) -> Any:
            if index == 2:
                go_on.wait(1.0)
            made.append(index)
            return wrap(torch.empty(NBYTES // 4))

    loader: DataLoader[Any] = DataLoader(
        Data(),
        batch_size=None,
        collate_fn=lambda batch: batch,
        num_workers=2,
        worker_backend="thread",
        max_buffered_bytes=8 << 20,
        scheduling="dynamic",
    )
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    assert len(made) <= 3 + 4 + 8
    iterator.close()
