"""What consumers do to the progress of a run, without one."""

from __future__ import annotations

from typing import Any

from asyncloader.engine.progress import Progress


def give(progress: Progress, batch: int, **more: Any) -> None:
    """Have a consumer been given the batch of this number."""
    progress.now = progress.now.after(batch, **more, in_order=progress.in_order)
