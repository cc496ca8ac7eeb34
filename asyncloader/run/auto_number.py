"""``num_workers="auto"``: what the number has come to, in a loader and in its states."""

from __future__ import annotations

from typing import Any

from asyncloader.options import AutoWorkers, Options


def note(loader: Any, num_workers: int) -> None:
    """Have a loader, if it is there, say how many workers there are now; unless its number was set meanwhile."""
    if loader is not None and isinstance(loader.num_workers, AutoWorkers):
        loader.num_workers = AutoWorkers(num_workers)


def found(state: dict[str, Any], options: Options, now: int) -> AutoWorkers:
    """Return with how many workers a run goes on from a state: with what it had come to, as far as that may be here.

    Args:
        state: The state. A loader with a fixed number of workers leaves the number out.
        options: The loader's.
        now: How many there are.
    """
    return AutoWorkers(min(state.get("num_workers") or now, options.most_waiting))
