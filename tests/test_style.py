"""What CONTRIBUTING.md promises whoever opens a file: short functions."""

import ast
from pathlib import Path

import pytest

MODULES = sorted((Path(__file__).resolve().parents[1] / "asyncloader").rglob("*.py"))
FUNCTION_LINES = 60


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many lines a function has, its docstring left out."""
    first = function.body[0]
    docstring = (first.end_lineno or 0) - first.lineno + 1 if ast.get_docstring(function) is not None else 0
    return (function.end_lineno or 0) - function.lineno + 1 - docstring


@pytest.mark.parametrize("module", MODULES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_functions_are_short(module: Path) -> None:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    functions = [each for each in ast.walk(ast.parse(module.read_text())) if isinstance(each, kinds)]
    assert {each.name: lines for each in functions if (lines := lines_of(each)) > FUNCTION_LINES} == {}
