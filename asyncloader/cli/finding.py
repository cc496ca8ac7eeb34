"""A finding of a command: the thing looked at, and the advice about it."""

from __future__ import annotations

from typing import NamedTuple


class Finding(NamedTuple):
    """Something that was looked at. ``advice`` is empty where all is well."""

    what: str
    found: str
    advice: str = ""
    is_bad: bool = False
