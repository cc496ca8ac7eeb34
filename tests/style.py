"""What CONTRIBUTING.md promises whoever opens a file: short functions; and tests that can be collected everywhere.

The quick tests import nothing that `dev` in pyproject.toml does not install. `make lint` runs this program.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
import tomllib
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "asyncloader"
TESTS = ROOT / "tests"
FUNCTION_LINES = 60
APART = ("frameworks", "clusters", "benchmarks")
"""Folders of tests that are collected only where what they import is installed."""
IMPORTED_AS = {"pillow": "PIL", "scikit_learn": "sklearn"}


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


@functools.cache
def installed() -> frozenset[str]:
    """Return the packages that the quick tests have, as they are imported."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    found, left = {"asyncloader", "tests", *sys.stdlib_module_names}, [*project["dependencies"], *extras["dev"]]
    while left:
        name, _, more = re.findall(r"^([\w-]+)(\[([\w,]+)\])?", left.pop())[0]
        if name == "asyncloader":
            left += [each for extra in more.split(",") for each in extras[extra]]
        name = name.replace("-", "_")
        found.add(IMPORTED_AS.get(name, name))
    return frozenset(found)


def imports_of(path: Path) -> set[str]:
    """Return what a module imports as soon as it is imported itself, and not what it tries to, or only has types of."""
    found, left = set[str](), [*ast.parse(path.read_text()).body]
    while left:
        match left.pop():
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                pass
            case ast.If(body=body, orelse=orelse):
                left += [*body, *orelse]
            case ast.Import(names=names):
                found |= {each.name for each in names}
            case ast.ImportFrom(module=str(module), names=names):
                found |= {module, *(f"{module}.{each.name}" for each in names)}
    return found


@functools.cache
def files_of(module: str) -> frozenset[Path]:
    """Return the files of a module of ours, and of the packages that it lies in."""
    names = [*accumulate(module.split("."), "{}/{}".format)]
    paths = [ROOT / file for name in names for file in (f"{name}.py", f"{name}/__init__.py")]
    return frozenset(path for path in paths if path.exists())


@functools.cache
def neighbours_of(path: Path) -> tuple[frozenset[Path], frozenset[str]]:
    """Return the modules of ours that a module imports, and the packages of others that are not installed."""
    names = imports_of(path)
    ours = {name for name in names if name.startswith(("asyncloader", "tests"))}
    others = {name.partition(".")[0] for name in names} - installed()
    return frozenset().union(*map(files_of, ours)), frozenset(others)


def missing_imports() -> Iterator[str]:
    """Describe each quick test whose module cannot be imported where only `dev` is installed, and why."""
    for test in [*sorted(TESTS.rglob("conftest.py")), *sorted(TESTS.rglob("test_*.py"))]:
        if test.relative_to(TESTS).parts[0] in APART:
            continue
        seen, left = {test}, [test]
        while left:
            path = left.pop()
            ours, others = neighbours_of(path)
            for name in sorted(others):
                yield f"{test}: imports {path.relative_to(ROOT)}, which imports {name}, which `dev` does not install"
            left += ours - seen
            seen |= ours


if __name__ == "__main__":
    sys.exit("\n".join([*long_functions(), *missing_imports()]) or None)
