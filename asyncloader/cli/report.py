"""The output of the commands: tables for people, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table


class Report:
    """Where a command's results go.

    Args:
        as_json: Print one JSON document at the end, and nothing else.
    """

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._found: dict[str, Any] = {}

    def table(self, name: str, title: str, rows: Sequence[dict[str, Any]]) -> None:
        """Show rows that have the same keys; strings to the left, figures to the right."""
        self._found[name] = [dict(row) for row in rows]
        if self._as_json:
            return
        print(title)
        shown = Table(box=None)
        for name, value in rows[0].items():
            shown.add_column(name, justify="left" if isinstance(value, str) else "right")
        for row in rows:
            shown.add_row(*map(show, row.values()))
        Console(width=1000, highlight=False, markup=False).print(shown)

    def say(self, name: str, text: str, value: Any = None) -> None:
        """Print a sentence. In JSON it is the text, or the value behind it."""
        self._found[name] = text if value is None else value
        if not self._as_json:
            print(text)

    def end(self) -> None:
        """Print what was found, if JSON is wanted."""
        if self._as_json:
            json.dump(self._found, sys.stdout, indent=1, default=str)
            print()


def show(value: Any) -> str:
    """Write down a value, a number with three digits or so."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)
