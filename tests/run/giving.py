"""What consumers do to the progress of a run, without one."""

from __future__ import annotations

from typing import Any

from asyncloader.engine.progress import Given, Progress


def give(progress: Progress, batch: int, **more: Any) -> None:
    """Have a consumer been given the batch of this number."""
    place = progress.now.after(Given(batch, **more), is_ahead=not progress.in_order)
    progress.counted = place, ()
    progress.forget(place.position)
