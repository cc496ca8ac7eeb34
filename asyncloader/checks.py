"""Checks of single options, with errors that say what is allowed."""

from __future__ import annotations

import contextlib
import operator
from typing import Any, get_args

from asyncloader.errors import ConfigurationError


def one_of(name: str, value: object, kind: object) -> None:
    """Raise a ConfigurationError if a value is none of those of a `Literal`."""
    allowed = get_args(kind)
    if value not in allowed:
        raise ConfigurationError(f"{name} should be one of {', '.join(map(repr, allowed))}, but got {value!r}")


def no_word(num_workers: object) -> None:
    """Raise a ConfigurationError if the number of workers of a loader that is made already was set to "auto"."""
    if num_workers == "auto":
        raise ConfigurationError(
            "num_workers should be a number where it is set later, but got 'auto': make the loader with "
            'num_workers="auto"'
        )


def at_least(name: str, value: Any, *, least: int) -> int:
    """Return an integer of any kind, numpy's and torch's too, as Python's own.

    Raises:
        ConfigurationError: The value is no integer, or a smaller one.
    """
    with contextlib.suppress(TypeError):
        if not isinstance(value, bool) and (number := operator.index(value)) >= least:
            return number
    raise ConfigurationError(f"{name} should be an integer of at least {least}, but got {value!r}")
