"""Whether ranks have to agree on their steps: what is imported where they do not."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from asyncloader.iteration.runs import Runs
from asyncloader.settings import EqualSteps


def in_step(iterator: Any, mode: EqualSteps | None, runs: Runs) -> Any:
    """Return an iterator that takes as many steps as those of other ranks; if there are none, the one that is given."""
    runs.yielded = None
    if mode is None or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return iterator
    from asyncloader.iteration.equal_steps import EqualStepsIterator

    return EqualStepsIterator(iterator, mode, runs)
