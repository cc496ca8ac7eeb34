"""Data pipes of torch beside worker threads: a hook that all threads of a process share finds the pipes of a graph.

torch finds the pipes that a pipe is made of by pickling it, with a hook on the class of all pipes. Another thread that
pickles or copies a pipe meanwhile meets the hook too: its own pipe becomes a stub, and the first thread shards the
other's pipes. Two walks at once are an error of torch's. So a thread that walks over a graph, copies or pickles a pipe
holds one lock.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data.dataloader import _sharding_worker_init_fn

_walking = threading.RLock()  # what is pickled may make a loader of another pipe


def _renew() -> None:
    global _walking  # a thread that holds the lock in the parent is not in the child
    _walking = threading.RLock()


os.register_at_fork(after_in_child=_renew)


def one_walks(dataset: Any) -> AbstractContextManager[object]:
    """Have no other thread walk over a graph of pipes, copy or pickle one meanwhile, if this dataset is a pipe."""
    return _walking if isinstance(dataset, (IterDataPipe, MapDataPipe)) else contextlib.nullcontext()


def shard(worker_init_fn: Callable[[int], None] | None, world_size: int, rank: int, worker_id: int) -> None:
    """Divide the pipes among workers as torch does, and call the user's function."""
    with _walking:
        _sharding_worker_init_fn(None, world_size, rank, worker_id)
    if worker_init_fn is not None:
        worker_init_fn(worker_id)
