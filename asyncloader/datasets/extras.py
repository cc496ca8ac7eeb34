"""Import clients that are installed on demand, and say which extra brings them where they are missing."""

from __future__ import annotations

import importlib
from types import ModuleType


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
