"""Workers that are not forked: the main module without a guard, and what the fork server imports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.nursery import Program

Run = Callable[..., Program]

NUMBERS = """
import os
import sys
import multiprocessing
from multiprocessing import forkserver, spawn

import asyncloader
from asyncloader import DataLoader, WorkerStartError

class Numbers:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index

class Server(Numbers):
    def __getitem__(self, index):
        "Whether the process that the worker was forked from has torch, and its threads."
        server = f"/proc/{os.getppid()}"
        return "libtorch" in open(f"{server}/maps").read(), len(os.listdir(f"{server}/task"))

def epoch(dataset=None):
    return list(DataLoader(dataset or Numbers(), batch_size=None, num_workers=2, multiprocessing_context="forkserver"))
"""


@pytest.mark.parametrize("method", ["spawn", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_a_main_module_without_a_guard_is_one_error_that_shows_it(run: Run, method: str) -> None:
    """Nothing of the workers' own is on stderr, and what comes after the loop is not run in them."""
    main = f"""
for batch in DataLoader(Numbers(), num_workers=2, multiprocessing_context="{method}"):
    pass
print("trained", flush=True)
"""
    program = run(NUMBERS + main)
    assert program.returncode == 1
    assert program.out == ""
    assert program.err.count("Traceback") == program.err.count("WorkerStartError: ") == 1
    assert '    if __name__ == "__main__":' in program.err
    assert program.err.count("\n") <= 30


def test_a_process_of_the_users_own_without_a_guard_shows_it_too(run: Run) -> None:
    """A process that iterates over a loader while it imports the main module would start processes for ever."""
    main = """
multiprocessing.current_process()._inheriting = True  # as multiprocessing has it meanwhile
multiprocessing.process._parent_process = object()
try:
    epoch()
except WorkerStartError as error:
    print('if __name__ == "__main__":' in str(error))
"""
    assert run(NUMBERS + main).out == "True\n"


def test_the_main_module_comes_before_torch(run: Run) -> None:
    """What it sets before it imports torch is in force, though our own modules were there first."""
    program = run("""
import sys
print(__name__, "torch" in sys.modules, flush=True)

class Numbers:
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return index

if __name__ == "__main__":
    from asyncloader import DataLoader
    print(len(list(DataLoader(Numbers(), num_workers=1, multiprocessing_context="spawn"))))
""")
    assert program.out.splitlines()[1:] == ["__mp_main__ False", "2"]


def test_the_fork_server_has_torch(run: Run) -> None:
    """Beside what the user named, of which some cannot be imported; no thread of it is left once it has forked."""
    main = """
if __name__ == "__main__":
    multiprocessing.set_forkserver_preload(["no_such_module_here", "json"])
    print(set(map(tuple, epoch(Server()))))
    print(forkserver._forkserver._preload_modules[:2], "torch" in forkserver._forkserver._preload_modules)
"""
    assert run(NUMBERS + main).out == "{(True, 1)}\n['no_such_module_here', 'json'] True\n"


def test_a_fork_server_that_runs_is_used_as_it_is(run: Run) -> None:
    """It may be the user's, with what that needs; and one that was killed is started again by the next loader."""
    main = """
if __name__ == "__main__":
    multiprocessing.set_forkserver_preload([])
    forkserver.ensure_running()
    pid = forkserver._forkserver._forkserver_pid
    print(epoch()[-1], forkserver._forkserver._forkserver_pid == pid)
    os.kill(pid, 9)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    print(epoch()[-1], forkserver._forkserver._forkserver_pid == pid)
"""
    assert run(NUMBERS + main).out == "7 True\n7 False\n"


def test_a_fork_server_that_cannot_start_is_one_clear_error(run: Run, tmp_path: Path) -> None:
    """It names what the server was to import; the next loader works where that was put right."""
    (tmp_path / "ends_it.py").write_text("raise SystemExit('not today')")
    main = f"""
if __name__ == "__main__":
    os.environ["PYTHONPATH"] = "{tmp_path}:" + os.environ.get("PYTHONPATH", "")
    multiprocessing.set_forkserver_preload(["ends_it"])
    try:
        epoch()
    except WorkerStartError as error:
        print("ends_it" in str(error), "fork server" in str(error))
    multiprocessing.set_forkserver_preload([])
    print(epoch()[-1])
"""
    program = run(NUMBERS + main)
    assert (program.out, program.err) == ("True True\n7\n", "not today\n")


def test_a_fork_server_that_imports_a_main_module_without_a_guard(run: Run) -> None:
    """As it does from Python 3.12.8 and 3.13.1 on: a line of the server's, and the error here."""
    main = """
prepare = spawn.get_preparation_data

def fixed(name):  # as the later versions have it
    data = prepare(name)
    return {**data, "main_path": data["init_main_from_path"]} if name == "ignore" else data

spawn.get_preparation_data = fixed
epoch()
"""
    program = run(NUMBERS + main)
    assert program.returncode == 1
    assert program.err.startswith("The fork server ends. The main module iterates over a DataLoader")
    assert program.err.count("WorkerStartError: ") == 1
    assert "`if __name__" in program.err
