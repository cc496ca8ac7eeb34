"""A worker thread's own copy of the dataset, as far as a worker process would have one."""

from __future__ import annotations

import copy
from typing import Any

from torch.utils.data import ChainDataset, ConcatDataset, StackDataset, Subset


def private_copy(dataset: Any) -> Any:
    """Copy the dataset, and those inside torch's wrappers, but share what they hold.

    So what one worker sets on it (a session that belongs to its loop, a file that is opened at first use, what
    ``worker_init_fn`` changes) is not seen by others, and the data themselves are there once. What cannot be copied is
    shared.
    """
    try:
        copied = copy.copy(dataset)
    except Exception:
        return dataset
    if isinstance(copied, Subset):
        copied.dataset = private_copy(copied.dataset)
    elif isinstance(copied, StackDataset):
        inner = copied.datasets
        if isinstance(inner, dict):
            copied.datasets = {name: private_copy(member) for name, member in inner.items()}
        else:
            copied.datasets = tuple(map(private_copy, inner))
    elif isinstance(copied, (ConcatDataset, ChainDataset)) and isinstance(copied.datasets, (list, tuple)):
        copied.datasets = [private_copy(member) for member in copied.datasets]
    return copied
