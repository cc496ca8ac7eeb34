"""Worker processes that are not forked: of spawn and of the fork server.

    multiprocessing:   new process ── imports the main module ── unpickles what it is to do
    here:              new process ── unpickles what it is to do ── is connected ── imports the main module

So a worker whose main module cannot be imported tells the parent what and where, instead of writing to stderr, each of
them; one whose main module would begin to iterate, having no guard, ends at that point without a word of its own; and
the parent is not held up where what it has to say fills a pipe.

The fork server, which starts empty, is given torch and what a worker imports: its workers then start in the time of a
fork. Other modules that it is to import, and a server that runs already, are the user's affair.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import signal
from collections.abc import Callable
from multiprocessing import context, forkserver, popen_forkserver, popen_spawn_posix, resource_tracker, spawn
from multiprocessing import util as _util
from multiprocessing.context import BaseContext, set_spawning_popen
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import dump
from typing import Any, cast

from asyncloader.errors import WorkerStartError
from asyncloader.signals import masked

PRELOAD = ("torch", "torch.utils.data", "asyncloader.preload")
"""What the fork server imports for us. No thread is left of it when a worker is forked, and no device is touched."""

util: Any = _util
_ENDS_WITHIN_S = 1.0
_NOT_TOLD = 255  # multiprocessing's stand-in for a status that the fork server did not send
_MAIN = ("init_main_from_name", "init_main_from_path")


def imports_main(context: BaseContext) -> bool:
    """Whether a worker that is started so imports the main module itself.

    A forked one has it. A context of the user's own is used as it is, and gives it to its processes.
    """
    return type(context) in _CONTEXTS and context.get_start_method() in _KINDS


def main_module() -> dict[str, str]:
    """Return what tells a worker which the main module is."""
    data = spawn.get_preparation_data("")
    return {key: data[key] for key in _MAIN if key in data}


def make_process(context: BaseContext, target: Callable[..., object], args: tuple[Any, ...]) -> BaseProcess:
    """Return a process that is not started yet. Where it imports the main module itself, it is given none."""
    if not imports_main(context):
        return cast(BaseProcess, cast(Any, context).Process(target=target, args=args))
    make, launch = _KINDS[context.get_start_method()]
    process: BaseProcess = make(target=target, args=args)
    cast(Any, process)._Popen = launch  # of this process alone, in place of its class's
    return process


def start_server() -> None:
    """Start the fork server, if there is none; what it imports takes it seconds, which this does not wait for.

    Without SIGCHLD it would never learn of the end of a worker.
    """
    _preload()
    with masked(signal.SIG_UNBLOCK, {signal.SIGCHLD}):
        forkserver.ensure_running()


def _preload() -> None:
    """Add to what the fork server imports. The list is read at its start: a server that is running is as it is."""
    named: list[str] = forkserver._forkserver._preload_modules  # type: ignore[attr-defined]
    forkserver.set_forkserver_preload([*named, *(name for name in PRELOAD if name not in named)])


class _Spawn(popen_spawn_posix.Popen):
    """Starts an interpreter, as its base does, which leaves no place to say what is sent."""

    _fds: list[int]

    def _launch(self, process: BaseProcess) -> None:
        tracker_fd: int = cast(Any, resource_tracker).getfd()
        self._fds.append(tracker_fd)
        data = _without_main(self, process)
        self.sentinel, child_w = os.pipe()
        child_r, parent_w = os.pipe()
        self.finalizer = util.Finalize(self, util.close_fds, (self.sentinel, parent_w))
        try:
            command = spawn.get_command_line(tracker_fd=tracker_fd, pipe_handle=child_r)
            self.pid = util.spawnv_passfds(spawn.get_executable(), command, [*self._fds, child_r, child_w])
        finally:
            util.close_fds(child_r, child_w)
        with open(parent_w, "wb", closefd=False) as file:
            file.write(data)


class _Forkserver(popen_forkserver.Popen):
    """Has the fork server make a process, as its base does."""

    _fds: list[int]

    def _launch(self, process: BaseProcess) -> None:
        data = _without_main(self, process)
        try:
            self.sentinel, write_end = forkserver.connect_to_new_process(self._fds)
            kept = os.dup(write_end)  # the worker's sign that this process is there
            self.finalizer = util.Finalize(self, util.close_fds, (kept, self.sentinel))
            with open(write_end, "wb") as file:
                file.write(data)
            self.pid = forkserver.read_signed(self.sentinel)
            self.server: int = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
        except (EOFError, ConnectionError) as error:
            _await_end(forkserver._forkserver._forkserver_pid)  # type: ignore[attr-defined]
            raise fork_server_ended() from error


def _without_main(popen: Any, process: Any) -> bytes:
    data = spawn.get_preparation_data(process.name)
    for key in _MAIN:
        data.pop(key, None)
    file = io.BytesIO()
    del process._Popen  # in the child, which knows nothing of this module, it is a process of multiprocessing's own
    set_spawning_popen(popen)
    try:
        dump(data, file)
        dump(process, file)
    finally:
        set_spawning_popen(None)
    return file.getvalue()  # not its buffer: of a file that is collected before that, Python 3.15 prints an error


_KINDS: dict[str, tuple[Any, Any]] = {
    "spawn": (context.SpawnProcess, _Spawn),
    "forkserver": (context.ForkServerProcess, _Forkserver),
}
_CONTEXTS = (context.SpawnContext, context.ForkServerContext, context.DefaultContext)


def exitcode(popen: Any, code: int | None) -> int | None:
    """Return the status with which a process is said to have ended: None if that is of a fork server that ended too."""
    server = getattr(popen, "server", None)
    if code != _NOT_TOLD or server is None:
        return code
    with contextlib.suppress(OSError):  # it was reaped
        return code if os.waitid(os.P_PID, server, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None else None
    return None


def _await_end(pid: int | None) -> None:
    """Wait for a process that is about to end: multiprocessing starts a new fork server when the old one has gone."""
    with contextlib.suppress(OSError, TypeError):
        fd = os.pidfd_open(pid)  # type: ignore[arg-type]
        try:
            select.select([fd], [], [], _ENDS_WITHIN_S)
        finally:
            os.close(fd)


def fork_server_ended() -> WorkerStartError:
    """Say that there is no fork server to make a worker. The next loader starts another one."""
    named = ", ".join(forkserver._forkserver._preload_modules)  # type: ignore[attr-defined]
    return WorkerStartError(
        "The fork server ended before it had made a worker process; if it told why, that is on stderr. When it starts, "
        f'it imports {named}: can those be imported? __main__ has to have its `if __name__ == "__main__"` guard. The '
        "next loader starts a new one."
    )
