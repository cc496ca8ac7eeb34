"""What CONTRIBUTING.md promises whoever opens a file: short functions. `make lint` runs this program."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "asyncloader"
FUNCTION_LINES = 60


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return how many lines the body of a function has: a signature may have as many as there are options."""
    code = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return (function.end_lineno or 0) - code[0].lineno + 1 if code else 0


def long_functions() -> Iterator[str]:
    """Describe each function that is too long."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for each in ast.walk(ast.parse(path.read_text())):
            if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)) and lines_of(each) > FUNCTION_LINES:
                yield f"{path}:{each.lineno}: {each.name} has {lines_of(each)} lines; {FUNCTION_LINES} at most"


if __name__ == "__main__":
    sys.exit("\n".join(long_functions()) or None)
