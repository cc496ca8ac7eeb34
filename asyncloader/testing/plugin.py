"""The option ``--loader`` of pytest, for :mod:`asyncloader.testing.suite`."""

from typing import Any


def pytest_addoption(parser: Any) -> None:
    """Pytest's hook: the adapters whose loaders are tested."""
    parser.addoption("--loader", action="append", default=[], metavar="MODULE:CLASS", help="an adapter of a loader")
