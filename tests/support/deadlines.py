"""A plugin: how long a test may take. A test that hangs fails, or ends its process; both ways the report names it.

    timeout        pytest-timeout raises in the test: 60 s, see `timeout` in pyproject.toml and the marker `timeout`
    timeout × 5/4  faulthandler writes all stacks and ends the process: for C code that holds the lock of Python, for
                   uvloop, which runs no handler while nothing happens, and for fixtures that hang after the test
                   failed. Where tests run beside others, the report names the test that was running (beside.py)

A forked copy that comes out of its test ends there: it would go on as a second pytest.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import traceback
from collections.abc import Generator
from typing import Any

import pytest

from tests.support.beside import OWNER

HARD = 5 / 4
LEFT_OUT_S = 180.0
SOAK_S = 1800.0
LEFT_OUT = ("slow", "gpu", "benchmark", "services", "ray", "frameworks", "soak")
"""Markers of tests that `make test` leaves out: they may take longer."""
LIMIT_S = pytest.StashKey[float]()
STDERR = pytest.StashKey[int]()
FAILED = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    """Keep the stderr that is not captured."""
    fd = config.stash[STDERR] = os.dup(2)
    config.add_cleanup(lambda: os.close(fd))


def pytest_itemcollected(item: pytest.Item) -> None:
    """Give a test that `make test` leaves out its limit, unless it has one."""
    if item.get_closest_marker("timeout") is None and any(map(item.get_closest_marker, LEFT_OUT)):
        item.add_marker(pytest.mark.timeout(SOAK_S if item.get_closest_marker("soak") else LEFT_OUT_S))


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Generator[None, object, object]:
    """Start the second clock of a test with the first one."""
    item.stash[LIMIT_S] = settings.timeout
    start_clock(item)
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """Start it again for the ends of fixtures where the test has failed: then pytest has stopped all clocks."""
    if item.stash.get(FAILED, False):
        start_clock(item)
    return (yield)


def start_clock(item: pytest.Item) -> None:
    """End this process unless the test, or its fixtures, end in time."""
    if (limit_s := item.stash.get(LIMIT_S, 0.0)) > 0:
        faulthandler.dump_traceback_later(limit_s * HARD, exit=True, file=item.config.stash[STDERR])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Stop the second clock."""
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Note failures; end a forked copy that has come out of its test."""
    if call.excinfo is not None:
        item.stash[FAILED] = True
    if os.getpid() != item.config.stash[OWNER]:
        traceback.print_exception(call.excinfo.value if call.excinfo else None)
        sys.stderr.flush()
        os._exit(1)
