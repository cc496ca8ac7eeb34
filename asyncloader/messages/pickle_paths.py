"""The part of a dataset that cannot be sent to workers, by its path: ``dataset.cfg.log.lock``.

Objects are taken apart into what pickle saves of them, and each step pickles the parts once more: this is for what has
failed.
"""

from __future__ import annotations

from typing import Any

from asyncloader.messages.messages import WorkerSpec
from asyncloader.messages.pickled_spec import is_picklable
from asyncloader.seeding.holdings import parts_of

_DEEPEST = 8


def say_unpicklable(spec: WorkerSpec) -> str:
    """Say which part of a spec cannot be pickled, and what to do about it."""
    path, thing = "dataset", spec.dataset
    parts = [(name, getattr(spec, name)) for name in ("dataset", "collate_fn", "worker_init_fn")]
    for depth in range(_DEEPEST):
        if (bad := next((part for part in parts if not is_picklable(part[1])), None)) is None:
            break
        path, thing = f"{path}.{bad[0]}" if depth else bad[0], bad[1]
        parts = _state(thing) or list(parts_of(thing, lambda _: False, set()))
    return (
        f"{path} ({type(thing).__name__}) cannot be sent to a worker. Make it in the worker, at its first "
        'use or in __setstate__; or fork workers: multiprocessing_context="fork".'
    )


def _state(thing: Any) -> list[tuple[str, Any]]:
    """Return the attributes that are pickled: those in slots too, and none that ``__getstate__`` leaves out."""
    try:
        state = thing.__getstate__()
    except Exception:  # the user's
        return []
    halves = state if isinstance(state, tuple) else (state,)
    return [(str(name), value) for half in halves if isinstance(half, dict) for name, value in half.items()]
