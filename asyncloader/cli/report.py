"""The output of the commands: tables for people, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


class Report:
    """Where a command's results go.

    Args:
        as_json: Print one JSON document at the end, and nothing else.
    """

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._found: dict[str, Any] = {}

    def table(self, name: str, title: str, rows: Sequence[dict[str, Any]]) -> None:
        """Show rows that have the same keys; strings to the left, figures to the right. None stays empty."""
        self._found[name] = [dict(row) for row in rows]
        if self._as_json or not rows:
            return
        cells = [[show(value) for value in row.values()] for row in rows]
        right = [not isinstance(value, str) for value in rows[-1].values()]
        heads = list(rows[0])
        widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
        print(title)
        for row in [heads, *cells]:
            padded = (
                cell.rjust(width) if to_the_right else cell.ljust(width)
                for cell, width, to_the_right in zip(row, widths, right, strict=True)
            )
            print("  " + "  ".join(padded).rstrip())

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

    @contextmanager
    def progress(self, what: str, total: int) -> Iterator[Any]:
        """Show a bar on a terminal; yields what advances it, which takes a word about what is being done."""
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task(what, total=total)

            def advance(word: str) -> None:
                bar.update(task, advance=1, description=f"{what}: {word}")

            yield advance


def show(value: Any) -> str:
    """Write down a value, a number with three digits or so."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)
