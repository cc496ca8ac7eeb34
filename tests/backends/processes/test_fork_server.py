"""Workers that are not forked: the main module without a guard, and what the fork server imports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from asyncloader.errors import MAIN_IS_IMPORTED
from tests.support.nursery import Program

Run = Callable[..., Program]

NUMBERS = """
import os
import sys
import multiprocessing
import multiprocessing.util
from multiprocessing import forkserver, spawn

import asyncloader
from asyncloader import DataLoader
from asyncloader.errors import WorkerStartError

class Numbers:
    def __init__(self, length=8):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return index

class Server(Numbers):
    def __getitem__(self, index):
        "Whether the process that the worker was forked from has torch, and its threads."
        server = f"/proc/{os.getppid()}"
        return "libtorch" in open(f"{server}/maps").read(), len(os.listdir(f"{server}/task"))

def loader(dataset, **options):
    return DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="forkserver", **options)

def epoch(dataset=None):
    return list(loader(dataset or Numbers()))
"""


FORKED = """
def fork(path, arguments, passed):
    # In place of a new interpreter, which imports torch for 2 s; what follows is what that would run.
    if pid := os.fork():
        return pid
    import traceback
    sys.argv = ["-c", arguments[-1]]
    sys.modules["__main__"] = type(sys)("__main__")
    try:
        exec(arguments[-2])
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)

if __name__ == "__main__":
    multiprocessing.util.spawnv_passfds = fork
"""


@pytest.mark.parametrize("new", [FORKED, pytest.param("", marks=pytest.mark.slow)], ids=["forked", "spawned"])
def test_a_main_module_without_a_guard_is_an_error_that_shows_it(run: Run, new: str) -> None:
    """Each worker shows how to write it, and the trainer's error says so; what comes after the loop is not run."""
    main = """
for batch in DataLoader(Numbers(), num_workers=2, multiprocessing_context="spawn"):
    pass
print("trained", flush=True)
"""
    program = run(NUMBERS + new + main)
    assert program.returncode == 1
    assert program.out == ""
    assert '    if __name__ == "__main__":\n        main()\n' in program.err
    assert f"at its start. The traceback is on stderr. {MAIN_IS_IMPORTED}" in program.err


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


def test_a_long_state_does_not_hold_up_the_trainer(run: Run, tmp_path: Path) -> None:
    """It starts the worker, and goes on, while that imports the main module: here until the trainer has gone on.

    What that module sets before it imports torch is in force, though our own modules were there first.
    """
    main = f"""
import os
import sys
print(__name__, "torch" in sys.modules, flush=True)

class Heavy:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index

    def state_dict(self):
        return {{"state": bytes(1 << 20)}}

    def load_state_dict(self, state):
        pass

fifo = "{tmp_path / "fifo"}"
if __name__ == "__mp_main__" and os.path.exists(fifo):
    open(fifo).read()
if __name__ == "__main__":
    from asyncloader import DataLoader
    first = DataLoader(Heavy(), batch_size=None, num_workers=1, worker_backend="thread")
    second = DataLoader(Heavy(), batch_size=None, num_workers=1, multiprocessing_context="spawn")
    seen = [next(iter(first))]
    second.load_state_dict(first.state_dict())
    first.close()
    os.mkfifo(fifo)
    rest = iter(second)
    open(fifo, "w").close()
    print(seen + list(rest))
"""
    assert run(main).out.splitlines()[1:] == ["__mp_main__ False", f"{list(range(8))}"]


def test_the_fork_servers_life(run: Run, tmp_path: Path) -> None:
    """One that cannot start is one clear error, and the next loader starts another; one that runs is used as it is.

    It has torch, beside what the user named, of which some cannot be imported; no thread of it is left once it has
    forked. Where it is killed its workers stay.
    """
    (tmp_path / "ends_it.py").write_text("raise SystemExit('not today')")
    main = f"""
if __name__ == "__main__":
    os.environ["PYTHONPATH"] = "{tmp_path}:" + os.environ.get("PYTHONPATH", "")
    multiprocessing.set_forkserver_preload(["ends_it"])
    try:
        epoch()
    except WorkerStartError as error:
        print("ends_it" in str(error), "fork server" in str(error))
    multiprocessing.set_forkserver_preload(["no_such_module_here", "json"])
    print(set(map(tuple, epoch(Server()))))
    print(forkserver._forkserver._preload_modules[:2], "torch" in forkserver._forkserver._preload_modules)
    pid = forkserver._forkserver._forkserver_pid
    iterator = iter(loader(Numbers(64), max_buffered_bytes=0))
    seen = [next(iterator)]
    print(forkserver._forkserver._forkserver_pid == pid)
    os.kill(pid, 9)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    print(seen + list(iterator) == list(range(64)), forkserver._forkserver._forkserver_pid == pid)
"""
    program = run(NUMBERS + main)
    assert program.out.splitlines() == [
        "True True",
        "{(True, 1)}",
        "['no_such_module_here', 'json'] True",
        "True",
        "True True",
    ], program.explain("it did something else")
    assert program.err.startswith("not today\n")
    assert "If a fork server made it, that has ended too." not in program.err
    assert "Traceback" not in program.err


def test_a_fork_server_that_imports_a_main_module_without_a_guard(run: Run) -> None:
    """As it does from Python 3.12.8 and 3.13.1 on: the server shows the guard, and the error here follows."""
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
    _, server, error = program.err.split("WorkerStartError: ")
    assert server.startswith("The main module iterates over a DataLoader")
    assert '    if __name__ == "__main__":\n        main()\n' in server
    assert "Exception ignored" not in program.err
    assert error.startswith("The fork server ended before it had made a worker process")
    assert "`if __name__" in error
