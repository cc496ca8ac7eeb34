"""The examples in docstrings run, and a client that is not installed is asked for by the name of its extra."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest

import asyncloader.datasets
from asyncloader.datasets.errors import require

MODULES = [module.name for module in pkgutil.iter_modules(asyncloader.datasets.__path__, "asyncloader.datasets.")]


def test_examples_in_docstrings_run() -> None:
    """Those that need no server, all of them in `>>>` form."""
    results = [doctest.testmod(importlib.import_module(name)) for name in MODULES]
    assert sum(result.attempted for result in results) > 5
    assert sum(result.failed for result in results) == 0


def test_a_missing_client_is_asked_for_by_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to install; that something is missing inside a client that is there is not hidden."""
    with pytest.raises(ModuleNotFoundError, match=r"Something needs no_such_client.*'asyncloader\[extra\]'"):
        require("no_such_client", "extra", "Something")
    (tmp_path / "broken_client.py").write_text("import what_it_needs")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'what_it_needs'$"):
        require("broken_client", "extra", "Something")
