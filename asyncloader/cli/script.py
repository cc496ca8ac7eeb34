"""A user's script, run until it begins to read from a loader."""

from __future__ import annotations

import contextlib
import runpy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.utils.data

from asyncloader.loader import DataLoader


class _Found(BaseException):
    """Ends the script; not an Exception, which scripts catch."""

    def __init__(self, loader: torch.utils.data.DataLoader[Any]) -> None:
        super().__init__()
        self.loader = loader


def first_loader(script: Path, arguments: Sequence[str]) -> torch.utils.data.DataLoader[Any] | None:
    """Run a script until it asks a loader with workers for its first batch; return that loader, None if none comes.

    What the script prints goes to stderr. Everything that it does before is done.
    """

    def stop(loader: torch.utils.data.DataLoader[Any]) -> Any:
        raise _Found(loader)

    argv, path = sys.argv, sys.path[:]
    sys.argv = [str(script), *arguments]
    sys.path[:0] = [str(script.parent.resolve())]
    try:
        with _replaced(stop), contextlib.redirect_stdout(sys.stderr):
            runpy.run_path(str(script), run_name="__main__")
    except _Found as found:
        return found.loader
    except SystemExit:
        return None
    finally:
        sys.argv, sys.path[:] = argv, path
    return None


@contextlib.contextmanager
def _replaced(stop: Any) -> Iterator[None]:
    """Have both loaders' classes stop where a run over the data begins."""
    kinds = [(torch.utils.data.DataLoader, "__iter__"), (DataLoader, "__iter__"), (DataLoader, "__aiter__")]
    before = [(kind, name, vars(kind).get(name)) for kind, name in kinds]
    for kind, name in kinds:
        setattr(kind, name, stop)
    try:
        yield
    finally:
        for kind, name, method in before:
            if method is None:
                delattr(kind, name)
            else:
                setattr(kind, name, method)
