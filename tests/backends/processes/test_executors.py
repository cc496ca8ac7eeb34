"""What an executor makes of processes that run already."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, process
from multiprocessing.connection import wait
from typing import Any, cast

import pytest

from asyncloader import DataLoader
from asyncloader.backends.processes import executors
from asyncloader.backends.processes.executors import Running
from asyncloader.errors import WorkerStartError


@pytest.fixture
def pids() -> Iterator[list[int]]:
    """Two processes, of which the first has ended; nobody has reaped it."""
    pids = []
    for ends in (True, False):
        pid = os.fork()
        if pid == 0:
            while not ends:
                signal.pause()
            os._exit(3)
        pids.append(pid)
    os.waitid(os.P_PID, pids[0], os.WEXITED | os.WNOWAIT)
    yield pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def make_running(pid: int) -> Running:
    pidfd = os.pidfd_open(pid)
    try:
        return Running(pid, pidfd)
    finally:
        os.close(pidfd)


def test_a_process_that_has_died_before_it_is_given_holds_nobody_up(
    pids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From Python 3.12 on, an executor that is broken holds its lock for as long as any of its processes lives."""
    submit, taken = ProcessPoolExecutor.submit, []

    def submit_and_break(self: ProcessPoolExecutor, task: Any) -> Future[Any]:
        future = submit(self, task)
        assert future.exception(60) is not None
        lock = cast(Any, self)._shutdown_lock
        if lock.acquire(timeout=1):  # before 3.12, where the executor's thread waits for the other process without it
            taken.append(lock)
        return future

    monkeypatch.setattr(ProcessPoolExecutor, "submit", submit_and_break)
    running = [make_running(pid) for pid in pids]
    managers: list[threading.Thread] = []
    adopting = threading.Thread(target=lambda: managers.append(executors.adopt(running)), daemon=True)
    adopting.start()
    adopting.join(10)
    try:
        assert not adopting.is_alive()
        assert managers[0].is_alive()
    finally:
        os.kill(pids[1], signal.SIGKILL)
        wait([running[1].sentinel])
        for lock in taken:
            lock.release()
        for thread in (adopting, *managers):
            thread.join(10)
    assert not managers[0].is_alive()


def test_no_thread_for_the_executor_is_an_error_of_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers that were launched are ended."""

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(cast(Any, process)._ExecutorManagerThread, "start", refuse)
        with pytest.raises(WorkerStartError, match="can't start new thread"):
            iter(DataLoader(range(4), num_workers=2, multiprocessing_context="fork"))  # type: ignore[arg-type]
