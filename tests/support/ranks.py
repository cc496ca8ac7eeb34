"""Runs a program in several processes that form a process group, as torchrun would, and collects what each found."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.nursery import Nursery

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 120

# A trainer of its own kind may stand in the environment of who runs the tests.
NOT_HANDED_ON = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def run_ranks(program: Path, found: Path, *arguments: str, ranks: int = 2) -> list[Any]:
    """Start a program once per rank, and return what each rank told with `tell`, or fail with what it printed."""
    group = _group(ranks)
    started: list[subprocess.Popen[str]] = []
    with contextlib.ExitStack() as running:
        for rank in range(ranks):
            environment = _environment(found, **group, RANK=str(rank), LOCAL_RANK=str(rank))
            started.append(running.enter_context(_start(program, *arguments, environment=environment)))
        for process in started:
            running.callback(_kill, process)  # the others, if one of them has failed
        for process in started:
            _expect_success(process)
    return told(found, ranks)


def fork_ranks(nursery: Nursery, program: Path, found: Path, *arguments: str, ranks: int = 2) -> list[Any]:
    """Do the same with forked programs, which need not import torch."""
    given = {**_group(ranks), "TOLD_IN": str(found)}
    with contextlib.ExitStack() as running:
        started = []
        for rank in range(ranks):
            started.append(nursery.start(program, *arguments, **given, RANK=str(rank), LOCAL_RANK=str(rank)))
            running.callback(started[-1].close)
        for each in started:
            assert each.wait(TIMEOUT_S) == 0, each.explain("it failed")
    return told(found, ranks)


def run_launcher(program: Path, found: Path, *arguments: str, ranks: int = 2) -> list[Any]:
    """Start a program once, which starts the other ranks itself; return what each rank told with `tell`."""
    with _start(program, *arguments, environment=_environment(found)) as process:
        try:
            _expect_success(process)
        finally:
            _kill(process)
    return told(found, ranks)


def tell(rank: int, what: Any) -> None:
    """In a rank: hand the test what was found, which JSON has to be able to say."""
    Path(os.environ["TOLD_IN"], f"{rank}.json").write_text(json.dumps(what))


def told(found: Path, ranks: int) -> list[Any]:
    return [json.loads((found / f"{rank}.json").read_text()) for rank in range(ranks)]


def _start(program: Path, *arguments: str, environment: dict[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, str(program), *arguments]
    return subprocess.Popen(
        command,
        env=environment,
        cwd=environment["TOLD_IN"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a program, and the ranks that it has started, unless it has ended well."""
    if process.returncode == 0:
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _environment(found: Path, **more: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in NOT_HANDED_ON}
    return {**inherited, "PYTHONPATH": str(ROOT), "TOLD_IN": str(found), "OMP_NUM_THREADS": "1", **more}


def _expect_success(process: subprocess.Popen[str]) -> None:
    printed, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, printed


def _group(ranks: int) -> dict[str, str]:
    return {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
