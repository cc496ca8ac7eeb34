"""Names of keyword arguments: what signatures tell of them, and what a wrong one was meant to be."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

OF_WORKERS = frozenset(
    {
        "persistent_workers",
        "prefetch_factor",
        "multiprocessing_context",
        "timeout",
        "max_tasks_per_child",
        "max_worker_memory",
    }
)
"""Options about workers, which a loader that is made anew without any is not given: torch refuses some of them."""

_ADVICE = {
    "seed": "the seed of the order and of augmentation is the generator's: generator=torch.Generator().manual_seed(3); "
    "or call torch.manual_seed(3) before the run",
    "rank": "ranks are a sampler's: sampler=ElasticSampler(dataset), or torch's DistributedSampler",
    "world_size": "ranks are a sampler's: sampler=ElasticSampler(dataset), or torch's DistributedSampler",
    "num_replicas": "ranks are a sampler's: sampler=ElasticSampler(dataset), or torch's DistributedSampler",
    "device": "batches are made on the CPU: pin_memory=True, and batch.to(device, non_blocking=True) in the loop",
    "transform": "transforms are the dataset's",
}
"""Of arguments that other loaders have, and for which no name here is close."""

P = ParamSpec("P")
R = TypeVar("R")


def checked(init: Callable[P, R]) -> Callable[P, R]:
    """Have a function say what a keyword that it does not know was meant to be.

    The signature stays that of the function: Lightning, `help()` and type checkers read it.
    """
    signature = inspect.signature(init)
    _, *names = signature.parameters

    @functools.wraps(init)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in sorted(kwargs.keys() - signature.parameters.keys()):
            close = get_close_matches(name, names, 1)
            meant = f". Did you mean {close[0]!r}?" if close else ""
            meant = f": {_ADVICE[name]}" if name in _ADVICE else meant
            raise TypeError(f"DataLoader.__init__() got an unexpected keyword argument {name!r}{meant}")
        return init(*args, **kwargs)

    call.__dict__["__signature__"] = signature
    return call


def name_options(init: Any, options: Mapping[str, inspect.Parameter]) -> None:
    """Add options to the signature of an ``__init__`` that takes any keywords, before those."""
    if not isinstance(init, FunctionType):
        return
    signature = inspect.signature(init)
    *named, last = signature.parameters.values() or [None]
    if last is None or last.kind is not inspect.Parameter.VAR_KEYWORD:
        return
    added = [parameter for name, parameter in options.items() if name not in signature.parameters]
    init.__dict__["__signature__"] = signature.replace(parameters=[*named, *added, last])
