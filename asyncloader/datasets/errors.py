"""The error of data that do not come, and the one for what is not installed."""

from __future__ import annotations

import importlib
from types import ModuleType

from asyncloader.errors import AsyncLoaderError

MAX_BYTES = 1 << 30
"""The most that a sample has, unless a dataset is told otherwise."""


class FetchError(AsyncLoaderError, OSError):
    """A file or object did not come whole, for a reason other than that it is not there or may not be read."""


def too_large(what: str, max_bytes: int) -> FetchError:
    """Return the error for a sample that has more bytes than it may have."""
    return FetchError(
        f"{what}: larger than {max_bytes:,} bytes, which is the most that a sample may have. If that is right, give "
        "the dataset a larger max_bytes"
    )


def require(module: str, extra: str, user: str) -> ModuleType:
    """Import a module that one of the package's extras installs.

    Args:
        module: Name of the module to import.
        extra: The extra of asyncloader that brings it.
        user: The class that needs it, named in the error.

    Raises:
        ImportError: The module is not installed; the message says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or module.split(".")[0] != error.name.split(".")[0]:
            raise  # it is there, and something that it needs itself is not
        needed = f"{user} needs {module}, which is not installed: pip install 'asyncloader[{extra}]'"
        raise ModuleNotFoundError(needed, name=error.name) from error
