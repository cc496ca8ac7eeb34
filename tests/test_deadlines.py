"""Tests that hang: each is named, whatever it hangs in, and the others are run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HANGING = '''
import asyncio, ctypes, os, signal, threading
import pytest, uvloop

hangs = pytest.mark.timeout(4)

def test_first(): pass

@hangs
def test_waits():
    threading.Event().wait()

@hangs
async def test_awaits():
    await asyncio.Event().wait()

@hangs
def test_awaits_on_uvloop():
    async def never(): await asyncio.Event().wait()
    uvloop.run(never())

@hangs
async def test_runs_without_a_pause():
    while True: pass

@hangs
def test_in_c():
    """Held up in C with the interpreter's lock, beside a copy that has the same pipes and stays."""
    if os.fork() == 0:
        threading.Event().wait(20)
        os._exit(0)
    libc = ctypes.PyDLL(None)
    libc.signal(signal.SIGALRM, ctypes.c_void_p(1))  # ignored: nothing interrupts the sleep
    libc.sleep(1000)

@pytest.fixture
def hangs_at_its_end():
    yield
    threading.Event().wait()

@hangs
def test_in_a_fixture(hangs_at_its_end): pass

@hangs
def test_in_a_fixture_after_a_failure(hangs_at_its_end):
    assert False

def test_a_copy_ends_with_its_test():
    if os.fork() == 0:
        raise AssertionError
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 1

def test_last(): pass
'''


@pytest.mark.slow
def test_tests_that_hang_are_named(tmp_path: Path) -> None:
    """They fail or end their process; the tests after them are run, and nobody waits for a process that is gone."""
    (tmp_path / "test_hanging.py").write_text(HANGING)
    command = [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", "--rootdir", tmp_path, "-p"]
    command += ["tests.support.beside", "-p", "tests.support.deadlines", "--beside", "1", "-rA", tmp_path]
    wide = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "300"}
    done = subprocess.run(command, cwd=tmp_path, env=wide, capture_output=True, text=True, timeout=150, check=False)
    said = re.findall(r"^([A-Z]+) test_hanging.py::(\w+)(?: - (\w+))?", done.stdout, re.MULTILINE)
    assert sorted(said) == [
        ("ERROR", "test_in_a_fixture", "Failed"),
        ("FAILED", "test_awaits", "Failed"),
        ("FAILED", "test_awaits_on_uvloop", "the"),
        ("FAILED", "test_in_a_fixture_after_a_failure", "assert"),
        ("FAILED", "test_in_a_fixture_after_a_failure", "the"),
        ("FAILED", "test_in_c", "the"),
        ("FAILED", "test_runs_without_a_pause", "Failed"),
        ("FAILED", "test_waits", "Failed"),
        ("PASSED", "test_a_copy_ends_with_its_test", ""),
        ("PASSED", "test_first", ""),
        ("PASSED", "test_in_a_fixture", ""),
        ("PASSED", "test_last", ""),
    ], done.stdout + done.stderr
