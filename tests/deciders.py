"""Options for a decider that is alone: those of a loader with two workers, but for what a test chooses."""

from __future__ import annotations

from functools import cache
from typing import Any

from asyncloader import DataLoader
from tests import inside

_DEFAULTS = {"num_at_start": 2, "num_workers": 0, "prefetch": 2, "max_buffered_bytes": 0}


class _Chosen:
    """An `Options` record some of whose fields, or of the properties that follow from them, have other values."""

    def __init__(self, chosen: dict[str, Any]) -> None:
        unknown = [name for name in chosen if not hasattr(_of_a_loader(), name)]
        assert not unknown, f"no options: {unknown}"
        self._chosen = chosen

    def __getattr__(self, name: str) -> Any:
        return self._chosen[name] if name in self._chosen else getattr(_of_a_loader(), name)


@cache
def _of_a_loader() -> Any:
    return inside.options(DataLoader(range(100), 4, num_workers=2))  # type: ignore[arg-type]


def options(**chosen: Any) -> Any:
    """Return options with these values; two batches for each worker, and no run-ahead, unless they say otherwise."""
    return _Chosen({**_DEFAULTS, **chosen})
