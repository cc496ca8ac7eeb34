"""The examples in docstrings run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import asyncloader.datasets

MODULES = [module.name for module in pkgutil.iter_modules(asyncloader.datasets.__path__, "asyncloader.datasets.")]


@pytest.mark.usefixtures("threads_of_obstore")
def test_examples_in_docstrings_run() -> None:
    """Those that need no server, all of them in `>>>` form."""
    results = [doctest.testmod(importlib.import_module(name)) for name in MODULES]
    assert sum(result.attempted for result in results) > 5
    assert sum(result.failed for result in results) == 0
