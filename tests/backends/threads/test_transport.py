"""How large batches are that worker threads hand over as they are: what decides how far they run ahead."""

from __future__ import annotations

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


WRAPPERS: list[Callable[[Any], Any]] = [
    lambda x: x,
    lambda x: [x],
    lambda x: {"x": (x, "text", 3)},
    lambda x: [{"rows": [x]}, [1, 2, 3]],
    lambda x: (x, None, np.float32(1)),
]


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize(
    "content", [torch.zeros(NBYTES // 4), np.zeros(NBYTES, np.uint8), bytes(NBYTES)], ids=["tensor", "array", "bytes"]
)
def test_what_is_in_it_counts(wrap: Callable[[Any], Any], content: Any) -> None:
    """Tensors, arrays and texts, in lists, tuples and dicts."""
    assert NBYTES <= batch_bytes(wrap(content)) < NBYTES + 2000


UNKNOWNS = [
    PIL.Image.new("RGB", (9, 9)),
    iter([]),
    Plain(torch.ones(3)),
    torch.eye(3).to_sparse(),
    np.array([None]),
    [[[[torch.ones(3)]]]],
]


@pytest.mark.parametrize("batch", UNKNOWNS)
def test_what_is_not_looked_into_has_no_size(batch: Any) -> None:
    """And says so."""
    assert batch_bytes([batch]) == UNKNOWN


@pytest.mark.parametrize("wrap", [lambda x: {"x": x}, Plain])
def test_threads_do_not_run_far_ahead_of_a_slow_batch(wrap: Callable[[Any], Any]) -> None:
    """8 MiB are 8 batches of 1 MiB in a dict; of what has no size only torch's window is made."""
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
