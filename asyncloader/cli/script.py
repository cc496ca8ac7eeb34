"""A user's script, run until it begins to read from a loader."""

from __future__ import annotations

import contextlib
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

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
        with contextlib.ExitStack() as replaced, contextlib.redirect_stdout(sys.stderr):
            torchs = torch.utils.data.DataLoader
            for kind, name in ((torchs, "__iter__"), (DataLoader, "__iter__"), (DataLoader, "__aiter__")):
                replaced.enter_context(mock.patch.object(kind, name, stop))
            runpy.run_path(str(script), run_name="__main__")
    except _Found as found:
        return found.loader
    except SystemExit:
        return None
    finally:
        sys.argv, sys.path[:] = argv, path
    return None
