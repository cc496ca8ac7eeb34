"""Programs under test, each a process of its own, forked from one that has imported torch and asyncloader already.

    pytest ── request: source, arguments, two pipes ──> nursery (imports once)
                                                          └── keeper, one a program: reports pid, end, status
                                                                └── the program, as `__main__`, in a session of its own

A fault needs a real process: one to kill, to interrupt, to let end. Starting Python and importing torch takes seconds,
a fork milliseconds. What follows the fork is the real thing: the program runs in the interpreter's main module. How far
its end goes is what costs most, for it writes to every page that the program shares with this process (`End`).

Workers of a program are forked unless it says otherwise: most programs here have no guard around their main part.

This file is run as a script (the nursery's side) and imported (the side of the tests).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import enum
import faulthandler
import io
import json
import multiprocessing
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import warnings
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]


class End(enum.StrEnum):
    """How far a program goes that has come to its end."""

    HOOKS = enum.auto()  # threads are joined, exit hooks run
    INTERPRETER = enum.auto()  # the interpreter is finalized: 0.1 s of CPU time more
    DESTRUCTORS = enum.auto()  # C++ takes down torch's registries: 0.1 s more, 0.3 s on a busy machine


# ------------------------------------------------------------------------------------------------ the nursery's side


def serve_requests(control: socket.socket) -> dict[str, Any]:
    """Fork a keeper for each request; return, in the program's process, what it is to run."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers are not waited for
    while True:
        message, fds, _, _ = socket.recv_fds(control, 1 << 20, 3)
        if not message:
            os._exit(0)
        if os.fork() == 0:
            control.close()
            return keep(json.loads(message), *fds)
        for fd in fds:
            os.close(fd)


def keep(request: dict[str, Any], stdout: int, stderr: int, report: int) -> dict[str, Any]:
    """Fork the program and report on it until its end; return in the program."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()  # the keeper's own group: a Ctrl-C is for the program's
    if (pid := os.fork()) == 0:
        settle(request, stdout, stderr)
        os.close(report)
        return request
    os.write(report, json.dumps({"pid": pid}).encode() + b"\n")
    os.close(stdout)
    os.close(stderr)
    _, status = os.waitpid(pid, 0)
    ended = {"ended": time.monotonic(), "returncode": os.waitstatus_to_exitcode(status)}
    os.write(report, json.dumps(ended).encode() + b"\n")
    os._exit(0)


def settle(request: dict[str, Any], stdout: int, stderr: int) -> None:
    """Make this process one that might have been started from a shell."""
    os.setsid()
    # Ignored where the tests run behind nohup or in the background of a script.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["folder"])
    os.environ.update(request["environment"])
    for fd, number in ((os.open(os.devnull, os.O_RDONLY), 0), (stdout, 1), (stderr, 2)):
        os.dup2(fd, number)
        os.close(fd)
    sys.stdout, sys.stderr = open_output(1), open_output(2)
    faulthandler.register(signal.SIGQUIT)  # see Program.kill_hung
    if request["end"] != End.DESTRUCTORS:
        leave_without_destructors()
    multiprocessing.set_start_method("fork")
    sys.argv = [request["path"], *request["arguments"]]
    sys.path.insert(0, request["folder"])
    # Python 3.12 and later, at any fork: see pyproject.toml
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)


def leave_without_destructors() -> None:
    """Have the process end when the interpreter has been finalized, before C's exit() calls what C++ has registered."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):  # glibc: called with the status, the latest registered first
        libc.on_exit(libc._exit, None)


def leave_after_hooks(status: int) -> None:
    """End the process when what it has asked for at its end is done, and leave the interpreter as it is."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def open_output(fd: int) -> io.TextIOWrapper:
    """Open what the interpreter would have opened, had it been started with this environment."""
    if os.environ.get("PYTHONUNBUFFERED"):
        return io.TextIOWrapper(open(fd, "wb", buffering=0, closefd=False), write_through=True)
    return io.TextIOWrapper(open(fd, "wb", closefd=False), line_buffering=fd == 2)


def main() -> types.CodeType:
    """Import what programs need, then wait for requests; returns once in each program.

    Of our modules the nursery imports all that a loader with workers does, 0.4 s of CPU time, and uses none of them: a
    program is a fork of a process that has no loop, no worker and no memory of ours.
    """
    import torch

    import asyncloader.datasets
    import asyncloader.engine.portal
    import asyncloader.loader
    import asyncloader.online
    import asyncloader.run.inline_iterator
    import asyncloader.run.worker_iterator  # noqa: F401
    from tests.support import small_forks

    with contextlib.suppress(ImportError):
        import psutil  # noqa: F401
        import rich.console
        import rich.progress
        import rich.table  # noqa: F401
        import typer  # noqa: F401
        import uvloop  # noqa: F401

    torch.empty(0)
    small_forks.settle()
    request = serve_requests(socket.socket(fileno=int(sys.argv[1])))
    path = request["path"]
    globals().update(_nursery=sys.modules["__main__"], ends=End(request["end"]))
    program = types.ModuleType("__main__")
    program.__file__ = path
    sys.modules["__main__"] = sys.modules["__mp_main__"] = program
    return compile(Path(path).read_text(), path, "exec")


# ------------------------------------------------------------------------------------------------ the side of the tests


class Program:
    """A program that runs, or has run."""

    def __init__(self, folder: Path, pid: int, stdout: int, stderr: int, report: int) -> None:
        self.folder = folder
        self.pid = pid
        self.out = ""
        self.err = ""
        self.returncode: int | None = None
        self.ended_at = 0.0
        self._streams = {stdout: b"", stderr: b"", report: b""}
        self._stdout, self._stderr, self._report = stdout, stderr, report
        self._selector = selectors.DefaultSelector()
        for fd in self._streams:
            os.set_blocking(fd, False)
            self._selector.register(fd, selectors.EVENT_READ)

    def _read(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(max(0.0, timeout_s)):
            data = os.read(key.fd, 1 << 16)
            self._streams[key.fd] += data
            if not data:
                self._selector.unregister(key.fd)
        self.out = self._streams[self._stdout].decode(errors="replace")
        self.err = self._streams[self._stderr].decode(errors="replace")
        if self._streams[self._report].endswith(b"\n"):
            ended = json.loads(self._streams[self._report])
            self.returncode, self.ended_at = ended["returncode"], ended["ended"]

    def read_until(self, text: str, timeout_s: float = 30.0) -> None:
        """Wait until the program has printed the text, and a line's end after it."""
        deadline = time.monotonic() + timeout_s
        while "\n" not in self.out.partition(text)[2]:
            assert self.returncode is None, self.explain(f"ended without {text!r}")
            assert time.monotonic() < deadline, self.explain(f"no {text!r} within {timeout_s} s")
            self._read(deadline - time.monotonic())

    def wait(self, timeout_s: float = 30.0) -> int:
        """Wait for the end of the program; return its status. What hangs is made to show its stacks, and is killed."""
        deadline = time.monotonic() + timeout_s
        while self.returncode is None:
            self._read(deadline - time.monotonic())
            if self.returncode is None and time.monotonic() > deadline:
                self.kill_hung()
                raise AssertionError(self.explain(f"did not end within {timeout_s} s"))
        self._read(0)
        return self.returncode

    def kill_hung(self) -> None:
        """Have the stacks of all threads of all its processes written to stderr, then end it."""
        for signum, pause_s in ((signal.SIGQUIT, 1.0), (signal.SIGKILL, 5.0)):
            for pid in self.family():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signum)
            deadline = time.monotonic() + pause_s
            while self.returncode is None and time.monotonic() < deadline:
                self._read(deadline - time.monotonic())

    def explain(self, what: str) -> str:
        """Describe what the program did, for a failed assertion."""
        return f"{what}; status {self.returncode}\n--- stdout\n{self.out}\n--- stderr\n{self.err}\n---"

    def family(self) -> dict[int, str]:
        """Return the processes of the program's session, itself included, with their states."""
        found = {}
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                with contextlib.suppress(OSError):
                    fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                    if int(fields[3]) == self.pid and fields[0] != "Z":  # dead, and whoever has adopted it is slow
                        found[int(entry)] = fields[0]
        return found

    def survivors(self, timeout_s: float) -> dict[int, str]:
        """Return what is left of the program's processes after so long; wait no longer than needed."""
        deadline = time.monotonic() + timeout_s
        while (left := self.family()) and time.monotonic() < deadline:
            time.sleep(0.005)
        return left

    def close(self) -> None:
        """Kill whatever is left."""
        for pid in self.family():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._selector.close()
        for fd in self._streams:
            os.close(fd)


class Nursery:
    """Starts programs. Has one process, which ends with the tests."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, "-W", "always", __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            start_new_session=True,
        )
        theirs.close()

    def start(self, path: Path, *arguments: str, end: End = End.HOOKS, **environment: str) -> Program:
        """Run the file as a program, in its folder, so far to its end."""
        pipes = [os.pipe() for _ in range(3)]
        request = {
            "path": str(path),
            "folder": str(path.parent),
            "arguments": arguments,
            "environment": environment,
            "end": end,
        }
        socket.send_fds(self._control, [json.dumps(request).encode()], [write for _, write in pipes])
        for _, write in pipes:
            os.close(write)
        stdout, stderr, report = (read for read, _ in pipes)
        line = b""
        while not line.endswith(b"\n"):
            data = os.read(report, 1)
            assert data, "the nursery has ended"
            line += data
        return Program(path.parent, json.loads(line)["pid"], stdout, stderr, report)

    def close(self) -> None:
        """End the nursery."""
        self._control.close()
        self._process.wait(10)


if __name__ == "__main__":
    # Not in a function: the program is to end as any program does, by coming to the end of its main module.
    program = main()
    try:
        exec(program, sys.modules["__main__"].__dict__)
    except SystemExit as exited:
        if globals()["ends"] is not End.HOOKS or not isinstance(exited.code, int | None):
            raise
        leave_after_hooks(exited.code or 0)
    if globals()["ends"] is End.HOOKS:
        leave_after_hooks(0)
