"""What cannot be sent to workers, or makes the dataset large to send: its path, as one would write it in Python.

    dataset.cfg['log'].lock      cannot pickle '_thread.lock' object
    dataset.annotations          list, 312 MB

Objects are taken apart as pickle does it: attributes, items. Each step pickles the parts once more, so this is for what
has failed, or takes long anyway.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from asyncloader.workers.protocol.messages import WorkerSpec
from asyncloader.workers.protocol.pickled_spec import count_copied_bytes, is_picklable

MANY_BYTES = 100 << 20
"""From here on, what a dataset makes workers copy is told of."""

_told: set[type] = set()
"""Classes of datasets that have been told of: to find what is large takes as long as several picklings."""

_DEEPEST = 8
_FEW = 100  # items of a container; one with more is named as a whole


class _Part(NamedTuple):
    path: str
    thing: Any


def say_unpicklable(spec: WorkerSpec) -> str:
    """Say which part of a spec cannot be pickled, and what to do about it."""
    part = _Part("dataset", spec.dataset)
    inside = [part, _Part("collate_fn", spec.collate_fn), _Part("worker_init_fn", spec.worker_init_fn)]
    for _ in range(_DEEPEST):
        bad = next((part for part in inside if not is_picklable(part.thing)), None)
        if bad is None:
            break
        part, inside = bad, _parts(bad)
    return (
        f"{part.path} cannot be sent to a worker. Make it in the worker, at its first use or in __setstate__; or fork "
        'workers: multiprocessing_context="fork".'
    )


def say_large(spec: WorkerSpec, copied_bytes: int) -> str | None:
    """Say what most of a large pickle is for, and what to do about it; None where it is not large, or was told before.

    Args:
        spec: What is sent.
        copied_bytes: How much of it each worker unpickles into memory of its own.
    """
    if copied_bytes < MANY_BYTES or type(spec.dataset) in _told:
        return None
    _told.add(type(spec.dataset))
    part, part_bytes = _Part("dataset", spec.dataset), copied_bytes
    for _ in range(_DEEPEST):
        sizes = ((count_copied_bytes(inner.thing), inner) for inner in _parts(part))
        size, largest = max(sizes, key=lambda sized: sized[0], default=(0, part))
        if 2 * size < copied_bytes:
            break
        part, part_bytes = largest, size
    return (
        f"Each worker unpickles {copied_bytes >> 20} MB into memory of its own whenever it is started; "
        f"{part_bytes >> 20} MB of that are {part.path} ({type(part.thing).__name__}). Keep them in an array, a "
        "tensor, a SharedList or a SharedDict, which workers share; and keep the workers: persistent_workers=True."
    )


def _parts(whole: _Part) -> list[_Part]:
    """List attributes and items; nothing of large containers and of classes."""
    path, thing = whole
    if isinstance(thing, type):
        return []
    found = [_Part(f"{path}.{name}", value) for name, value in getattr(thing, "__dict__", {}).items()]
    if isinstance(thing, dict) and len(thing) <= _FEW:
        found += [_Part(f"{path}[{key!r}]", value) for key, value in thing.items()]
    elif isinstance(thing, (list, tuple)) and len(thing) <= _FEW:
        found += [_Part(f"{path}[{number}]", item) for number, item in enumerate(thing)]
    return found
