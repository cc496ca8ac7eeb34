"""Whether ranks have to agree on their steps: what is imported where they do not."""

from __future__ import annotations

from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from asyncloader.options import EqualSteps
from asyncloader.run.runs import Runs

_numbers: WeakKeyDictionary[Runs, int] = WeakKeyDictionary()
_next_number = count()


def enrol(runs: Runs, mode: EqualSteps | None) -> Runs:
    """Give the runs of a loader that is made now a number, among those that are to be in step with other ranks.

    Ranks know by it whether they speak of the same loader, if all of them make their loaders in the same order.
    """
    if mode is not None and runs not in _numbers:
        _numbers[runs] = next(_next_number)
    return runs


def in_step(iterator: Any, mode: EqualSteps | None, runs: Runs) -> Any:
    """Return an iterator that takes as many steps as those of other ranks; if there are none, the one that is given."""
    if mode is None or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return iterator
    from asyncloader.run.equal_steps import EqualStepsIterator

    enrol(runs, mode)  # where the mode was set later
    return EqualStepsIterator(iterator, mode, _numbers[runs])
