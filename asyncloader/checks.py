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


def says_auto(num_workers: object) -> bool:
    """Whether a number of workers is "auto", with which a loader is made.

    Raises:
        ConfigurationError: if it is another word.
    """
    if not isinstance(num_workers, str) or num_workers == "auto":
        return num_workers == "auto"
    close = "'auto'" if get_close_matches(num_workers.strip().lower(), ["auto"]) else num_workers.strip()
    meant = f". Did you mean {close}?" if close == "'auto'" or close.isdecimal() else ""
    raise ConfigurationError(
        f'num_workers should be an integer of at least 0, or "auto", but got {num_workers!r}{meant}'
    )


def no_word(num_workers: object) -> None:
    """Raise a ConfigurationError if the number of workers of a loader that is made already was set to a word."""
    if says_auto(num_workers):
        raise ConfigurationError(
            "num_workers should be a number where it is set later, but got 'auto': make the loader with "
            'num_workers="auto"'
        )


def at_least(name: str, value: object, *, least: int, unit: str = "") -> None:
    """Raise a ConfigurationError if a value is no integer, or a smaller one."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(f"{name} should be an integer of at least {least}{unit}, but got {value!r}")
