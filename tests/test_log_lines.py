"""Warnings of a program that has set up no logging."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import logging
{set_up}
import asyncloader
logging.getLogger("asyncloader").warning("a %s line", "telling")
logging.getLogger("asyncloader.datasets").warning("another")
logging.getLogger("asyncloader").info("nobody wants to know")
"""


@pytest.mark.parametrize(
    ("set_up", "shown"),
    [
        ("", ["asyncloader: a telling line", "asyncloader: another"]),
        ("logging.basicConfig()", ["WARNING:asyncloader:a telling line", "WARNING:asyncloader.datasets:another"]),
        ("logging.lastResort = None", []),
        ("logging.getLogger('asyncloader').addHandler(logging.NullHandler())", []),
    ],
)
def test_each_line_names_the_library(set_up: str, shown: list[str]) -> None:
    """Once, and only where the program's own handlers do not."""
    program = PROGRAM.format(set_up=set_up)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == shown
