"""Checks of single options, with errors that say what is allowed."""

from __future__ import annotations

from difflib import get_close_matches
from typing import get_args

from asyncloader.errors import ConfigurationError


def one_of(name: str, value: object, kind: object) -> None:
    """Raise a ConfigurationError if a value is none of those of a `Literal`."""
    allowed = get_args(kind)
    if value not in allowed:
        close = get_close_matches(str(value), allowed, 1)
        meant = f". Did you mean {close[0]!r}?" if close else ""
        raise ConfigurationError(f"{name} should be one of {', '.join(map(repr, allowed))}, but got {value!r}{meant}")


def at_least(name: str, value: object, *, least: int, unit: str = "") -> None:
    """Raise a ConfigurationError if a value is no integer, or a smaller one."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(f"{name} should be an integer of at least {least}{unit}, but got {value!r}")
