"""Data pipes of torch in worker threads: a hook that all threads of a process share finds the pipes of a graph."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

from torch.utils.data.dataloader import _sharding_worker_init_fn

_walking = threading.Lock()


def _renew() -> None:
    global _walking  # whoever holds it in the parent is not here
    _walking = threading.Lock()


os.register_at_fork(after_in_child=_renew)


def one_walks() -> AbstractContextManager[object]:
    """Have one thread at a time walk over a graph: otherwise it finds pipes of another one's, and shards them twice."""
    return _walking


def shard(worker_init_fn: Callable[[int], None] | None, world_size: int, rank: int, worker_id: int) -> None:
    """Divide the pipes among workers as torch does, and call the user's function."""
    with one_walks():
        _sharding_worker_init_fn(None, world_size, rank, worker_id)
    if worker_init_fn is not None:
        worker_init_fn(worker_id)
